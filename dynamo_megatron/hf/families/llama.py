"""Llama 2 and 3.x, and what shares its code such as SmolLM2: no bias, scaled frequencies."""

from dynamo_megatron.hf.families.base import Family

LLAMA = Family(
    model_type="llama",
    causal_lm="LlamaForCausalLM",
    qk_norm=False,
    qkv_bias=False,
    only={"attention_bias": False, "mlp_bias": False},
    rope_types=("default", "llama3"),
)
