"""A block of rows at a time: the elementwise work of the torch implementations.

Exponentials are taken to base 2: ``torch.exp2`` costs a quarter of ``torch.exp`` on a CPU, and the
change of base is a factor in a multiplication that is needed anyhow.
"""

import functools
import math
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from dynamo_megatron.kernels.shard import D_FLOOR, S0, S1, S2, S3, M, finite_max

# Bytes of the two float32 scratch blocks. CPU: the best of 0.25 to 4 MiB on a core with 1 MiB of L2
# (the curve is flat above); GPU: a rounding error beside the logits, and few launches.
CPU_SCRATCH_BYTES = 2 << 20
GPU_SCRATCH_BYTES = 1 << 28


class Blocks(Protocol):
    """Splits [T, V] rows into blocks and works on one.

    Attributes:
        slices: The row slices, in order.
    """

    slices: list[slice]

    def sums(self, z: Tensor, base2: Tensor, out: Tensor) -> None:
        """Write m, s0, s1 / ln 2 (, s2, s3 / ln 2) of raw logits ``z`` to their rows of ``out``.

        Args:
            z: [t, V] logits.
            base2: [t, 1] float32, 1 / (temperature ln 2).
            out: [6, t] or [4, t] float32.
        """
        ...

    def gradient(
        self,
        z: Tensor,
        grad: Tensor,
        m: Tensor,
        base2: Tensor,
        log2_s0: Tensor,
        constant: Tensor,
        slope: Tensor | None,
    ) -> None:
        """Write ``2^(d - log2_s0) (constant + slope d)``, ``d = (z - m) base2``, to ``grad``.

        ``grad`` may be ``z``; all but these two are [t, 1] float32; no slope is a slope of 0.
        """
        ...


def row_slices(tokens: int, rows: int) -> list[slice]:
    """Slices of ``rows`` rows that cover ``tokens``."""
    return [slice(a, min(a + rows, tokens)) for a in range(0, tokens, rows)]


class EagerBlocks:
    """About ten passes over a block that stays in the second-level cache."""

    def __init__(self, tokens: int, columns: int, device: torch.device):
        budget = CPU_SCRATCH_BYTES if device.type == "cpu" else GPU_SCRATCH_BYTES
        rows = max(1, min(tokens, budget // (2 * 4 * max(columns, 1))))
        self.slices = row_slices(tokens, rows)
        self._scratch = torch.empty(2, rows, columns, dtype=torch.float32, device=device)
        # The guard against 0 * -inf is a pass. A CPU can look first whether it is needed; a GPU
        # would have to wait for the answer.
        self._look_first = device.type == "cpu"
        self._guard = not self._look_first

    def sums(self, z: Tensor, base2: Tensor, out: Tensor) -> None:
        """See `Blocks.sums`."""
        self._sums(z, base2, out)
        if not self._guard and not math.isfinite(float(out[S1].sum())):
            self._guard = True  # from here on: rows with -inf seldom come alone
            self._sums(z, base2, out)

    def _sums(self, z: Tensor, base2: Tensor, out: Tensor) -> None:
        d, e = self._scratch[:, : z.shape[0]]
        d.copy_(z)
        m = torch.amax(d, dim=-1)
        out[M] = m
        # Subtract before scaling: the difference of two logits is exact or nearly so, their scaled
        # values are not.
        d.sub_(finite_max(m)[:, None]).mul_(base2)
        if self._guard:
            d.clamp_(min=D_FLOOR)
        torch.exp2(d, out=e)
        torch.sum(e, dim=-1, out=out[S0])
        torch.sum(d.mul_(e), dim=-1, out=out[S1])
        if out.shape[0] == 6:
            # torch.sum adds pairwise. linalg.vector_norm, one pass less, adds in a row: 1e-5 off.
            torch.sum(d.mul_(e), dim=-1, out=out[S3])
            torch.sum(e.mul_(e), dim=-1, out=out[S2])

    def gradient(
        self,
        z: Tensor,
        grad: Tensor,
        m: Tensor,
        base2: Tensor,
        log2_s0: Tensor,
        constant: Tensor,
        slope: Tensor | None,
    ) -> None:
        """See `Blocks.gradient`."""
        d, p = self._scratch[:, : z.shape[0]]
        d.copy_(z).sub_(m).mul_(base2)
        torch.sub(d, log2_s0, out=p).exp2_()
        if slope is None:
            p.mul_(constant)
        else:
            p.mul_(d.clamp_(min=D_FLOOR).mul_(slope).add_(constant))
        grad.copy_(p)


class CompiledBlocks:
    """The same work as one fused loop each, by ``torch.compile``: about half the time of eager.

    The first call compiles for some ten seconds and needs a C++ compiler on a CPU.
    """

    def __init__(self, tokens: int, columns: int, device: torch.device):
        del device  # the code is compiled for wherever the logits are
        # Only the gradient makes a block, in the logits' dtype; larger blocks are fewer calls.
        self.slices = row_slices(
            tokens, max(1, min(tokens, 4 * CPU_SCRATCH_BYTES // (4 * columns)))
        )

    def sums(self, z: Tensor, base2: Tensor, out: Tensor) -> None:
        """See `Blocks.sums`."""
        for row, value in zip(out, _compiled(_ordered_sums)(z, base2, out.shape[0]), strict=True):
            if value is not None:
                row.copy_(value)

    def gradient(
        self,
        z: Tensor,
        grad: Tensor,
        m: Tensor,
        base2: Tensor,
        log2_s0: Tensor,
        constant: Tensor,
        slope: Tensor | None,
    ) -> None:
        """See `Blocks.gradient`."""
        grad.copy_(_compiled(_fused_gradient)(z, m, base2, log2_s0, constant, slope))


@functools.cache
def _compiled(function: Callable) -> Callable:
    """Compiled on first use; shapes are left open."""
    return torch.compile(function, dynamic=True)


def _ordered_sums(z: Tensor, base2: Tensor, rows: int) -> list[Tensor | None]:
    """The rows of a partial-statistics tensor; None for the target's logit."""
    x = z.float()
    m = x.amax(dim=-1)
    d = ((x - finite_max(m)[:, None]) * base2).clamp(min=D_FLOOR)
    e = torch.exp2(d)
    ed = e * d
    result = [m, e.sum(dim=-1), ed.sum(dim=-1), None]
    return result if rows == 4 else [*result, (e * e).sum(dim=-1), (e * ed).sum(dim=-1)]


def _fused_gradient(
    z: Tensor,
    m: Tensor,
    base2: Tensor,
    log2_s0: Tensor,
    constant: Tensor,
    slope: Tensor | None,
) -> Tensor:
    d = (z.float() - m) * base2
    p = torch.exp2(d - log2_s0)
    weight = constant if slope is None else constant + slope * d.clamp(min=D_FLOOR)
    return (p * weight).to(z.dtype)
