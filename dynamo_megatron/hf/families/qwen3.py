"""Qwen3, dense: RMSNorm on queries and keys, no bias; small ones tied."""

from dynamo_megatron.hf.families.base import Family

QWEN3 = Family(
    model_type="qwen3",
    causal_lm="Qwen3ForCausalLM",
    qk_norm=True,
    qkv_bias=False,
    only={"use_sliding_window": False, "attention_bias": False},
)
