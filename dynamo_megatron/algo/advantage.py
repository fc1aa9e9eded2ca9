"""Advantages of rollouts within their group. Groups are ragged: sizes may all differ.

Shape letters: R rollouts of all groups in any order, P prompts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from dynamo_megatron.algo._checks import require_equal_shapes


@dataclass(frozen=True, slots=True)
class _Centred:
    """Rewards minus their group's mean, sorted by (group, reward); 0 where a group says nothing.

    Attributes:
        rows_R: [R] the valid rows, in sorted order.
        group_R: [R] group number of each of them, from 0.
        size_R: [R] valid rollouts in its group.
        centred_R: [R] float64.
    """

    rows_R: Tensor
    group_R: Tensor
    size_R: Tensor
    centred_R: Tensor


def group_advantages(
    rewards_R: Tensor,
    group_index_R: Tensor,
    valid_R: Tensor,
    *,
    normalize: Literal["std", "none"] = "std",
    epsilon: float = 1e-6,
) -> Tensor:
    """Group-relative advantages: (r - mean) / (std + epsilon), or r - mean.

    Mean and sample standard deviation (ddof = 1) are those of the group's valid rollouts. A group
    with one valid rollout, or with exactly equal rewards, teaches nothing: its advantages are
    exactly 0. Sums run in an order of their own, in float64, so permuting the rows permutes the
    result bit for bit.

    Args:
        rewards_R: [R] float rewards; anything (also NaN) where not valid.
        group_index_R: [R] int64, equal for the rollouts of one prompt; any labels.
        valid_R: [R] bool, False where the verification failed.
        normalize: "std" is GRPO. "none" leaves the scale alone (Dr.GRPO); the variance law behind
            the allocation, p (1 - p), holds for this one only.
        epsilon: added to the standard deviation.

    Returns:
        [R] float32, 0 where not valid.

    Raises:
        ValueError: a valid reward is not finite, or the inputs do not fit together.

    Source: GRPO, arXiv:2402.03300; "none" is Dr.GRPO, arXiv:2503.20783. Equality decides about a
    group of equal rewards, because a float std of equal rewards need not be 0 (NeMo-RL#4158).
    """
    if normalize not in ("std", "none"):
        raise ValueError(f'normalize is {normalize!r}; the known ones are "std" and "none".')
    centred = _centre(rewards_R, group_index_R, valid_R)
    values_R = centred.centred_R
    if normalize == "std":
        square_sum_P = torch.bincount(centred.group_R, weights=values_R.square())
        variance_R = square_sum_P[centred.group_R] / (centred.size_R - 1).clamp(min=1)
        values_R = values_R / (variance_R.sqrt() + epsilon)
    return _scatter(centred, values_R, rewards_R.numel())


def loo_advantages(rewards_R: Tensor, group_index_R: Tensor, valid_R: Tensor) -> Tensor:
    """Leave-one-out advantages: the reward minus the mean of the group's other valid rollouts.

    Equal to n / (n - 1) (r - mean). Arguments, zeros and errors as in `group_advantages`.

    Returns:
        [R] float32, 0 where not valid.

    Source: RLOO, arXiv:2402.14740.
    """
    centred = _centre(rewards_R, group_index_R, valid_R)
    size_R = centred.size_R.double()
    values_R = centred.centred_R * size_R / (size_R - 1).clamp(min=1)
    return _scatter(centred, values_R, rewards_R.numel())


def prompt_weights(group_sizes: Tensor) -> Tensor:
    """Factor (B / N) / n_i that gives every prompt, not every rollout, the same weight.

    A mean over all rollouts weights prompt i by n_i / B: variable sizes then change the objective
    towards prompts of middling difficulty. Multiplying prompt i's advantages by this factor
    restores 1 / N each, the estimator whose variance the allocation minimises. Exactly so under a
    mean over sequences; under a mean over tokens long responses still weigh more.

    Args:
        group_sizes: [P] rollouts n_i of each prompt, all >= 1.

    Returns:
        [P] float64; the mean over the B rollouts is 1.

    Raises:
        ValueError: a prompt has no rollout.
    """
    if bool((group_sizes < 1).any()):
        prompt = int((group_sizes < 1).nonzero()[0])
        raise ValueError(
            f"prompt {prompt} has {int(group_sizes[prompt])} rollouts: a prompt without rollouts "
            "cannot be given weight 1/N. Leave it out of the batch."
        )
    sizes = group_sizes.double()
    return sizes.sum() / group_sizes.numel() / sizes


def _centre(rewards_R: Tensor, group_index_R: Tensor, valid_R: Tensor) -> _Centred:
    require_equal_shapes(
        {"rewards_R": rewards_R, "group_index_R": group_index_R, "valid_R": valid_R}
    )
    if valid_R.dtype != torch.bool or group_index_R.dtype != torch.int64:
        raise ValueError(
            f"valid_R must be bool and group_index_R int64, got {valid_R.dtype} and "
            f"{group_index_R.dtype}."
        )
    bad = valid_R & ~rewards_R.isfinite()
    if bool(bad.any()):
        row = int(bad.nonzero()[0])
        raise ValueError(
            f"rollout {row} has reward {rewards_R[row].item()} and counts as verified: it would "
            "make its whole group NaN. Mark a failed verification as not valid."
        )
    rows_R = valid_R.nonzero()[:, 0]
    rows_R = rows_R[rewards_R[rows_R].argsort(stable=True)]
    rows_R = rows_R[group_index_R[rows_R].argsort(stable=True)]
    _, group_R, size_P = torch.unique_consecutive(
        group_index_R[rows_R], return_inverse=True, return_counts=True
    )
    sorted_R = rewards_R[rows_R].double()
    last_P = size_P.cumsum(0) - 1
    alike_P = sorted_R[last_P] == sorted_R[last_P - size_P + 1]
    mean_P = torch.bincount(group_R, weights=sorted_R) / size_P
    centred_R = torch.where(alike_P[group_R], 0.0, sorted_R - mean_P[group_R])
    return _Centred(rows_R=rows_R, group_R=group_R, size_R=size_P[group_R], centred_R=centred_R)


def _scatter(centred: _Centred, values_R: Tensor, num_rows: int) -> Tensor:
    advantages_R = torch.zeros(num_rows, dtype=torch.float32)
    advantages_R[centred.rows_R] = values_R.float()
    return advantages_R
