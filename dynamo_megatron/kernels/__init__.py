"""The token statistics: log pi(y), entropy, and the exact expected term of the entropy change."""

from dynamo_megatron.kernels.engine import Implementation
from dynamo_megatron.kernels.linear import fused_head_pays, token_stats_linear
from dynamo_megatron.kernels.token_stats import token_stats

__all__ = ["Implementation", "fused_head_pays", "token_stats", "token_stats_linear"]
