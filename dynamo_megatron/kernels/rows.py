"""The statistics in plain torch, a few rows at a time.

The logits are read from memory once: a block of rows goes through all its passes (see `blocks`)
before the next one is touched, and nothing of the size of the logits is made.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from dynamo_megatron.kernels.blocks import Blocks, EagerBlocks
from dynamo_megatron.kernels.finish import RowState
from dynamo_megatron.kernels.shard import D_FLOOR, S1, S3, ZY, M, VocabShard

LOG2_E = 1.0 / math.log(2.0)

BlocksFactory = Callable[[int, int, torch.device], Blocks]
"""(tokens, columns, device) -> blocks."""


def target_logits(logits_TVp: Tensor, targets_T: Tensor, shard: VocabShard) -> Tensor:
    """[T] float32 logit of each target, -inf where another shard holds it."""
    if shard.valid == 0 or targets_T.numel() == 0:
        return torch.full(targets_T.shape, -torch.inf, device=targets_T.device)
    columns_T, owned_T = shard.columns(targets_T)
    z_T = logits_TVp.gather(1, columns_T[:, None])[:, 0].float()
    return torch.where(owned_T, z_T, -torch.inf)


def forward_rows(
    logits_TVp: Tensor,
    targets_T: Tensor,
    inv_T: Tensor,
    shard: VocabShard,
    *,
    need_q: bool,
    blocks_of: BlocksFactory = EagerBlocks,
) -> Tensor:
    """Partial statistics of this shard.

    Args:
        logits_TVp: [T, Vp] float32, bfloat16 or float16.
        targets_T: [T] int64 global ids.
        inv_T: [T] float64, 1 / temperature.
        shard: This rank's shard.
        need_q: Also sum s2 and s3.
        blocks_of: What works on a block of rows.

    Returns:
        [6, T] float32, or [4, T] without Q.
    """
    tokens = logits_TVp.shape[0]
    out_6T = logits_TVp.new_zeros(6 if need_q else 4, tokens, dtype=torch.float32)
    out_6T[ZY] = target_logits(logits_TVp, targets_T, shard)
    if shard.valid == 0:
        out_6T[M] = -torch.inf
        return out_6T
    logits_TV = logits_TVp[:, : shard.valid]
    base2_T1 = (inv_T * LOG2_E).float()[:, None]
    blocks = blocks_of(tokens, shard.valid, logits_TVp.device)
    for rows in blocks.slices:
        blocks.sums(logits_TV[rows], base2_T1[rows], out_6T[:, rows])
    out_6T[S1] *= math.log(2.0)
    if need_q:
        out_6T[S3] *= math.log(2.0)
    return out_6T


def backward_rows(
    logits_TVp: Tensor,
    grad_TVp: Tensor,
    targets_T: Tensor,
    inv_T: Tensor,
    state: RowState,
    shard: VocabShard,
    grad_logp_T: Tensor | None,
    grad_entropy_T: Tensor | None,
    *,
    blocks_of: BlocksFactory = EagerBlocks,
) -> None:
    """Gradient of the logits, written to ``grad_TVp`` (which may be ``logits_TVp``).

    Args:
        logits_TVp: [T, Vp] the forward's logits.
        grad_TVp: [T, Vp] output, same dtype.
        targets_T: [T] int64 global ids; rows of negative ones become 0.
        inv_T: [T] float64, 1 / temperature.
        state: From the forward.
        shard: This rank's shard.
        grad_logp_T: [T] upstream gradient of log pi(y), or None for zero.
        grad_entropy_T: [T] upstream gradient of the entropy, or None for zero.
        blocks_of: What works on a block of rows.
    """
    inv32_T = inv_T.float()
    zeros_T = torch.zeros_like(state.m)
    ignored_T = targets_T < 0
    g_T = (zeros_T if grad_logp_T is None else grad_logp_T.float()) * inv32_T
    k_T = None if grad_entropy_T is None else grad_entropy_T.float() * inv32_T
    # Before the logits are overwritten; and rounded once, not after adding g to a rounded value.
    columns_T, owned_T = shard.columns(targets_T)
    zy_T = target_logits(logits_TVp, targets_T, shard)
    d_y_T = ((zy_T - state.m) * inv32_T).clamp(min=D_FLOOR)
    weight_T = g_T if k_T is None else g_T + k_T * (d_y_T - state.mu)
    at_target_T = g_T - (d_y_T - state.log_s0).exp() * weight_T

    logits_TV, grad_TV = logits_TVp[:, : shard.valid], grad_TVp[:, : shard.valid]
    base2_T1 = (inv_T * LOG2_E).float()[:, None]
    log2_s0_T1 = (state.log_s0.double() * LOG2_E).float()[:, None]
    m_T1 = state.m[:, None]
    # -(g + k (d - mu)) = constant + slope * d2, with d2 = d / ln 2.
    constant_T1 = (-g_T if k_T is None else k_T * state.mu - g_T)[:, None]
    slope_T1 = None if k_T is None else (-k_T * math.log(2.0))[:, None]
    if shard.valid:
        blocks = blocks_of(logits_TV.shape[0], shard.valid, logits_TVp.device)
        for rows in blocks.slices:
            blocks.gradient(
                logits_TV[rows],
                grad_TV[rows],
                m_T1[rows],
                base2_T1[rows],
                log2_s0_T1[rows],
                constant_T1[rows],
                None if slope_T1 is None else slope_T1[rows],
            )
    held_T = owned_T.nonzero()[:, 0]
    grad_TVp[held_T, columns_T[held_T]] = at_target_T[held_T].to(grad_TVp.dtype)
    grad_TVp[ignored_T.nonzero()[:, 0]] = 0
    grad_TVp[:, shard.valid :] = 0
