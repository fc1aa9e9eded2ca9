"""The token statistics: log pi(y), entropy, and the exact expected term of the entropy change."""

from dynamo_megatron.kernels.token_stats import Implementation, token_stats

__all__ = ["Implementation", "token_stats"]
