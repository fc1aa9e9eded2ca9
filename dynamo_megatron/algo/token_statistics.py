"""Token statistics from whole rows of logits: the reference that the fast kernels must equal."""

from __future__ import annotations

import torch
from torch import Tensor

from dynamo_megatron.types import TokenStats


def dense_token_stats(
    logits_TV: Tensor, targets_T: Tensor, *, temperature: float | Tensor = 1.0
) -> TokenStats:
    """Statistics of pi = softmax(logits / temperature), by plain autograd.

    Args:
        logits_TV: [T, V] any float dtype. -inf forbids an entry (probability 0, gradient 0).
            Below float32 it is raised to float32 before anything is computed.
        targets_T: [T] int64 in [0, V); a negative target marks a row to ignore.
        temperature: > 0, one for all rows or [T].

    Returns:
        float32, or float64 for float64 logits. logp and entropy are differentiable, the rest is
        detached. An ignored row has logp = lam = 0 and gives the logits no gradient.

    Raises:
        ValueError: a target is >= V, the temperature is not positive, or the shapes do not fit.
    """
    _check_inputs(logits_TV, targets_T, temperature)
    ignored_T = targets_T < 0
    logits_TV = logits_TV if logits_TV.dtype == torch.float64 else logits_TV.float()
    if isinstance(temperature, Tensor):
        temperature = temperature.to(logits_TV.dtype)[:, None]
    top_T1 = logits_TV.detach().amax(dim=-1, keepdim=True)
    # Subtract, then scale: logits far from 0 lose digits in the other order.
    shifted_TV = (logits_TV - top_T1) / temperature
    # 0 * -inf is NaN, in the value and in the gradient. Any finite number has the right product.
    finite_TV = shifted_TV.masked_fill(shifted_TV == -torch.inf, 0.0)
    weight_TV = shifted_TV.exp()
    total_T = weight_TV.sum(dim=-1)
    mean_T = (weight_TV * finite_TV).sum(dim=-1) / total_T

    target_T = shifted_TV.gather(1, targets_T.clamp(min=0)[:, None])[:, 0]
    logp_T = torch.where(ignored_T, 0.0, target_T - total_T.log())
    entropy_T = total_T.log() - mean_T
    entropy_T = torch.where(ignored_T, entropy_T.detach(), entropy_T)
    with torch.no_grad():
        pi_TV = weight_TV / total_T[:, None]
        # Lambda_a = log pi_a + H is the shifted logit minus its mean: exact at a sharp peak.
        lam_T = torch.where(ignored_T, 0.0, target_T - mean_T)
        q_T = (pi_TV.square() * (finite_TV - mean_T[:, None])).sum(dim=-1)
        sum_pi2_T = pi_TV.square().sum(dim=-1)
    return TokenStats(logp=logp_T, entropy=entropy_T, lam=lam_T, sum_pi2=sum_pi2_T, q=q_T)


def _check_inputs(logits_TV: Tensor, targets_T: Tensor, temperature: float | Tensor) -> None:
    if logits_TV.dim() != 2 or targets_T.shape != logits_TV.shape[:1]:
        raise ValueError(
            f"need logits [T, V] and targets [T], got {list(logits_TV.shape)} and "
            f"{list(targets_T.shape)}. Select the rows that predict a token first."
        )
    size = logits_TV.shape[1]
    if bool((targets_T >= size).any()):
        raise ValueError(
            f"target {int(targets_T.max())} is outside the vocabulary of {size} entries: the data "
            "was tokenised with another tokenizer, or the logits are one rank's shard only."
        )
    if isinstance(temperature, Tensor):
        if temperature.shape != targets_T.shape:
            raise ValueError(
                f"temperature has shape {list(temperature.shape)}, expected one number or one per "
                f"row, {list(targets_T.shape)}."
            )
        positive = bool((temperature > 0).all())
    else:
        positive = temperature > 0
    if not positive:
        raise ValueError(
            f"temperature is {temperature}: logits are divided by it, it must be positive. Greedy "
            "sampling has no policy gradient."
        )
