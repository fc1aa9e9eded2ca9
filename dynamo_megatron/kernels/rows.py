"""The statistics in plain torch, a few rows at a time.

A block of rows small enough for the second-level cache goes through about ten elementwise passes
that never leave it, so the logits are read from memory once. Exponentials are taken to base 2:
``torch.exp2`` costs a quarter of ``torch.exp`` on a CPU, and the change of base is a factor in a
multiplication that is needed anyhow.
"""

import math

import torch
from torch import Tensor

from dynamo_megatron.kernels.finish import RowState
from dynamo_megatron.kernels.shard import D_FLOOR, S0, S1, S2, S3, ZY, M, VocabShard, finite_max

LOG2_E = 1.0 / math.log(2.0)

# Bytes of the two float32 scratch blocks. CPU: the best of 0.25 to 4 MiB on a core with 1 MiB of L2
# (the curve is flat above); GPU: a rounding error beside the logits, and few launches.
CPU_SCRATCH_BYTES = 2 << 20
GPU_SCRATCH_BYTES = 1 << 28


class RowBlocks:
    """Row slices of a [T, V] problem and the scratch they share.

    Attributes:
        rows: Rows of one block.
        slices: The row slices, in order.
    """

    def __init__(self, tokens: int, columns: int, device: torch.device):
        budget = CPU_SCRATCH_BYTES if device.type == "cpu" else GPU_SCRATCH_BYTES
        self.rows = max(1, min(tokens, budget // (2 * 4 * max(columns, 1))))
        self.slices = [slice(a, min(a + self.rows, tokens)) for a in range(0, tokens, self.rows)]
        self._scratch = torch.empty(2, self.rows, columns, dtype=torch.float32, device=device)

    def scratch(self, rows: slice) -> tuple[Tensor, Tensor]:
        """Two float32 blocks for these rows."""
        n = rows.stop - rows.start
        return self._scratch[0, :n], self._scratch[1, :n]


def target_logits(logits_TVp: Tensor, targets_T: Tensor, shard: VocabShard) -> Tensor:
    """[T] float32 logit of each target, -inf where another shard holds it."""
    if shard.valid == 0 or targets_T.numel() == 0:
        return torch.full(targets_T.shape, -torch.inf, device=targets_T.device)
    columns_T, owned_T = shard.columns(targets_T)
    z_T = logits_TVp.gather(1, columns_T[:, None])[:, 0].float()
    return torch.where(owned_T, z_T, -torch.inf)


def forward_rows(
    logits_TVp: Tensor, targets_T: Tensor, inv_T: Tensor, shard: VocabShard, *, need_q: bool
) -> Tensor:
    """Partial statistics of this shard.

    Args:
        logits_TVp: [T, Vp] float32, bfloat16 or float16.
        targets_T: [T] int64 global ids.
        inv_T: [T] float64, 1 / temperature.
        shard: This rank's shard.
        need_q: Also sum s2 and s3.

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
    blocks = RowBlocks(tokens, shard.valid, logits_TVp.device)
    # On a CPU the guard against 0 * -inf is taken only once a -inf was met.
    guard = logits_TVp.device.type != "cpu"
    for rows in blocks.slices:
        d, e = blocks.scratch(rows)
        _block_sums(logits_TV[rows], base2_T1[rows], d, e, out_6T[:, rows], guard=guard)
        if not guard and not math.isfinite(float(out_6T[S1, rows].sum())):
            guard = True
            _block_sums(logits_TV[rows], base2_T1[rows], d, e, out_6T[:, rows], guard=True)
    out_6T[S1] *= math.log(2.0)
    if need_q:
        out_6T[S3] *= math.log(2.0)
    return out_6T


def _block_sums(
    z: Tensor, base2: Tensor, d: Tensor, e: Tensor, out: Tensor, *, guard: bool
) -> None:
    """One block: m, s0, s1 / ln 2, s2, s3 / ln 2 into ``out``; ``d``, ``e`` are scratch."""
    d.copy_(z)
    m = torch.amax(d, dim=-1)
    out[M] = m
    # Subtract before scaling: the difference of two logits is exact or nearly so, their scaled
    # values are not.
    d.sub_(finite_max(m)[:, None]).mul_(base2)
    if guard:
        d.clamp_(min=D_FLOOR)
    torch.exp2(d, out=e)
    torch.sum(e, dim=-1, out=out[S0])
    torch.sum(d.mul_(e), dim=-1, out=out[S1])
    if out.shape[0] == 6:
        # torch.sum adds pairwise. linalg.vector_norm, one pass less, adds in a row: 1e-5 off.
        torch.sum(d.mul_(e), dim=-1, out=out[S3])
        torch.sum(e.mul_(e), dim=-1, out=out[S2])


def backward_rows(
    logits_TVp: Tensor,
    grad_TVp: Tensor,
    targets_T: Tensor,
    inv_T: Tensor,
    state: RowState,
    shard: VocabShard,
    grad_logp_T: Tensor | None,
    grad_entropy_T: Tensor | None,
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
    shift_T1 = (state.log_s0.double() * LOG2_E).float()[:, None]
    m_T1 = state.m[:, None]
    # -(g + k (d - mu)) = constant + slope * d2, with d2 = d / ln 2.
    constant_T1 = (-g_T if k_T is None else k_T * state.mu - g_T)[:, None]
    slope_T1 = None if k_T is None else (-k_T * math.log(2.0))[:, None]
    blocks = RowBlocks(logits_TV.shape[0], shard.valid, logits_TVp.device)
    for rows in blocks.slices:
        d, p = blocks.scratch(rows)
        d.copy_(logits_TV[rows]).sub_(m_T1[rows]).mul_(base2_T1[rows])
        torch.sub(d, shift_T1[rows], out=p).exp2_()
        if slope_T1 is None:
            p.mul_(constant_T1[rows])
        else:
            d.clamp_(min=D_FLOOR).mul_(slope_T1[rows]).add_(constant_T1[rows])
            p.mul_(d)
        grad_TV[rows].copy_(p)
    held_T = owned_T.nonzero()[:, 0]
    grad_TVp[held_T, columns_T[held_T]] = at_target_T[held_T].to(grad_TVp.dtype)
    grad_TVp[ignored_T.nonzero()[:, 0]] = 0
    grad_TVp[:, shard.valid :] = 0
