"""From logits to tokens, one stream of random numbers for each sequence.

Shapes: B sequences, V vocabulary, n tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor


def uniforms_for(seeds: Sequence[int], count: int) -> Tensor:
    """The random numbers of some sequences: row b depends on ``seeds[b]`` alone.

    Args:
        seeds: B seeds, in [0, 2**63).
        count: numbers for each sequence; a longer draw begins with the shorter one.

    Returns:
        [B, count] float64 in [0, 1), on the CPU.
    """
    # Philox is keyed directly: no seed hashing, 10 times cheaper than default_rng(seed).
    rows = [np.random.Generator(np.random.Philox(key=seed)).random(count) for seed in seeds]
    return torch.from_numpy(np.stack(rows))


def sample_tokens(
    logits_BV: Tensor, uniforms_B: Tensor, temperature: float
) -> tuple[Tensor, Tensor]:
    """Draw one token for each sequence by inverting the cumulative distribution.

    One uniform number makes one token, so a sequence's tokens depend on its own numbers and not on
    what is sampled beside it.

    Args:
        logits_BV: [B, V], any float dtype.
        uniforms_B: [B] float64 in [0, 1).
        temperature: of the policy softmax(logits / temperature); above 0.

    Returns:
        [B] int64 tokens and [B] float32 log-probabilities under that policy, nats. A token of
        probability 0 is never drawn. Where the logits are not finite, neither is the logprob.
    """
    logp_BV = torch.log_softmax(logits_BV.float() / temperature, dim=-1)
    cdf_BV = logp_BV.double().exp().cumsum(dim=-1)
    # In float64, u <= 1 - 2**-53 keeps u * total below total: an entry above it always exists.
    point_B = uniforms_B * cdf_BV[:, -1]
    token_B = torch.searchsorted(cdf_BV, point_B[:, None], right=True)
    token_B = token_B.clamp_(max=logits_BV.shape[-1] - 1)  # all-NaN rows point past the end
    return token_B[:, 0], logp_BV.gather(1, token_B)[:, 0]


def greedy_tokens(logits_BV: Tensor) -> tuple[Tensor, Tensor]:
    """The most likely token of each sequence and its log-probability at temperature 1."""
    logp_BV = torch.log_softmax(logits_BV.float(), dim=-1)
    logp_B, token_B = logp_BV.max(dim=-1)
    return token_B, logp_B
