"""Qwen2 and Qwen2.5 (also Math and Coder): bias on queries, keys and values; small ones tied."""

from dynamo_megatron.hf.families.base import Family

QWEN2 = Family(
    model_type="qwen2",
    causal_lm="Qwen2ForCausalLM",
    qk_norm=False,
    qkv_bias=True,
    only={"use_sliding_window": False},
)
