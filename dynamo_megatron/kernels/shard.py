"""Which part of the vocabulary a rank holds, and the one exchange between the ranks.

Shapes: T tokens, Vp columns of the local shard, R ranks.

A shard sums up what it saw of one token in six numbers, the *partial statistics*. With the raw
logits ``z``, temperature ``tau``, ``m = max z`` over the shard's real columns and
``d = (z - m) / tau`` they are, as rows of a [6, T] tensor::

    m    s0 = sum e^d    s1 = sum e^d d    z_y    s2 = sum e^2d    s3 = sum e^2d d

``z_y`` is the target's logit where this shard owns it, else -inf. Without Q the last two rows are
left out. The merge of two partials is associative and commutative, so blocks of columns, the
programs of a GPU kernel and tensor-parallel ranks all use the same one.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

M, S0, S1, ZY, S2, S3 = range(6)
"""Rows of a partial-statistics tensor."""

D_FLOOR = -1.0e4
"""Floor of ``d``: e^-1e4 is 0 in float32 and float64, and 0 * -1e4 is 0 where 0 * -inf is NaN."""

# Cost model of one collective: seconds a call and bytes a second of one rank's link. They place
# the point where one all-gather loses to a MAX and a SUM, no more; they are not measurements.
CALL_SECONDS = 20e-6
LINK_BYTES_PER_SECOND = 300e9


@dataclass(frozen=True, slots=True)
class VocabShard:
    """The columns of the vocabulary that this rank holds.

    Attributes:
        start: global id of the first column.
        width: columns held, padding included.
        vocab_size: true size of the vocabulary: ids at or above it are padding.
        group: the tensor-parallel group; None when this shard is the whole vocabulary.
    """

    start: int
    width: int
    vocab_size: int
    group: dist.ProcessGroup | None

    @classmethod
    def of(
        cls,
        width: int,
        *,
        vocab_size: int,
        vocab_start: int | None,
        group: dist.ProcessGroup | None,
    ) -> "VocabShard":
        """The shard of this rank; ``vocab_start=None`` means equal shards in rank order.

        Raises:
            ValueError: The shards cannot cover the vocabulary.
        """
        if vocab_size < 1:
            raise ValueError(f"vocab_size must be at least 1, got {vocab_size}.")
        rank, ranks = (group.rank(), group.size()) if group is not None else (0, 1)
        start = rank * width if vocab_start is None else vocab_start
        covered = start + width if ranks == 1 else ranks * width
        if start < 0 or (ranks == 1 and start != 0):
            raise ValueError(
                f"vocab_start={start} leaves ids 0..{start - 1} to other ranks, but there are "
                f"{ranks} ranks. Pass the tensor-parallel group that holds them."
            )
        if (vocab_start is None or ranks == 1) and covered < vocab_size:
            raise ValueError(
                f"{ranks} shard(s) of {width} columns cover {covered} of {vocab_size} ids: "
                "the statistics would miss the rest of the vocabulary. Pass the "
                "tensor-parallel group of these logits as group."
            )
        return cls(start, width, vocab_size, group)

    @property
    def ranks(self) -> int:
        """Number of shards."""
        return 1 if self.group is None else self.group.size()

    @property
    def valid(self) -> int:
        """Columns that belong to the vocabulary; the others are padding."""
        return min(max(self.vocab_size - self.start, 0), self.width)

    def columns(self, targets_T: Tensor) -> tuple[Tensor, Tensor]:
        """Local column of each target (0 where not held) and whether this shard holds it."""
        local_T = targets_T - self.start
        owned_T = (local_T >= 0) & (local_T < self.valid)
        return torch.where(owned_T, local_T, 0), owned_T


def finite_max(m: Tensor) -> Tensor:
    """``m`` with -inf replaced by the lowest finite number; NaN stays."""
    return m.clamp(min=torch.finfo(torch.float32).min)


def rescale_sums(partials_X6T: Tensor, m_T: Tensor, inv_T: Tensor) -> Tensor:
    """The sums of partial statistics, as they would be had they been taken around ``m_T``.

    Args:
        partials_X6T: [..., 6, T] (or 4) float64 partials.
        m_T: [T] float64, at least their maxima.
        inv_T: [T] float64, 1 / temperature.

    Returns:
        [..., 4, T] float64: s0, s1, s2, s3 (or [..., 2, T]: s0, s1).
    """
    # With finite_max a token that is -inf everywhere gives -inf - finite, not NaN.
    delta = ((partials_X6T[..., M, :] - finite_max(m_T)) * inv_T).clamp(min=D_FLOOR)
    r = delta.exp()
    s0, s1 = partials_X6T[..., S0, :], partials_X6T[..., S1, :]
    rows = [r * s0, r * (s1 + delta * s0)]
    if partials_X6T.shape[-2] == 6:
        s2, s3 = partials_X6T[..., S2, :], partials_X6T[..., S3, :]
        rows += [r * r * s2, r * r * (s3 + delta * s2)]
    return torch.stack(rows, dim=-2)


def join_rows(m_T: Tensor, zy_T: Tensor, sums_4T: Tensor) -> Tensor:
    """Partial statistics from the maximum, the target's logit and the sums."""
    return torch.cat([m_T[None], sums_4T[:2], zy_T[None], sums_4T[2:]])


def merge_partials(parts_R6T: Tensor, inv_T: Tensor) -> Tensor:
    """Merge the partial statistics of several shards, in the given order.

    Args:
        parts_R6T: [R, 6, T] (or [R, 4, T] without Q) partials, any float dtype.
        inv_T: [T] float64, 1 / temperature.

    Returns:
        [6, T] (or [4, T]) float64. float64 costs nothing at this size and keeps log pi of a
        far-off token within one rounding of the sums.
    """
    parts = parts_R6T.double()
    m_T = parts[:, M].amax(dim=0)
    return join_rows(m_T, parts[:, ZY].amax(dim=0), rescale_sums(parts, m_T, inv_T).sum(dim=0))


def two_calls_pay_from(ranks: int, rows: int = 6) -> float:
    """Tokens above which a MAX and a SUM move so much less that their second call is repaid.

    The gather sends ``4 rows`` bytes a token to each of n - 1 ranks; two ring all-reduces of the
    same volume move 2/n of it. Equal cost: ``T = call * bandwidth / (4 rows (n - 1)(1 - 2/n))``:
    48k tokens at 8 ranks, 167k at 4, never at 2.
    """
    saved = (ranks - 1) * (1.0 - 2.0 / ranks)
    if saved <= 0:
        return float("inf")
    return CALL_SECONDS * LINK_BYTES_PER_SECOND / (4 * rows * saved)


def exchange_partials(partial_6T: Tensor, inv_T: Tensor, shard: VocabShard) -> Tensor:
    """Let every rank have what `merge_partials` needs for the whole vocabulary.

    The parts come in rank order on every rank, so that their merge is equal bit for bit, whatever
    algorithm the collective runs.

    Args:
        partial_6T: [6, T] or [4, T] float32, contiguous, this rank's part.
        inv_T: [T] float64, 1 / temperature.
        shard: This rank's shard.

    Returns:
        [R, 6, T] float32, or [1, 6, T] where they were summed on the way.

    Collectives on the shard's group: one all-gather, or above `two_calls_pay_from` tokens one MAX
    and one SUM all-reduce. Every rank must call, with equally many tokens, none included.
    """
    if shard.ranks == 1:
        return partial_6T[None]
    rows, tokens = partial_6T.shape
    if tokens > two_calls_pay_from(shard.ranks, rows):
        return _reduce_partials(partial_6T, inv_T, shard)[None]
    parts_R6T = partial_6T.new_empty(shard.ranks, rows, tokens)
    dist.all_gather_single(parts_R6T.view(-1), partial_6T.view(-1), group=shard.group)
    return parts_R6T


def _reduce_partials(partial_6T: Tensor, inv_T: Tensor, shard: VocabShard) -> Tensor:
    """The exchange in two calls: agree on the maximum, rescale to it, sum."""
    maxima_2T = torch.stack([partial_6T[M], partial_6T[ZY]])
    dist.all_reduce(maxima_2T, op=dist.ReduceOp.MAX, group=shard.group)
    sums_4T = rescale_sums(partial_6T.double(), maxima_2T[0].double(), inv_T).float()
    dist.all_reduce(sums_4T, op=dist.ReduceOp.SUM, group=shard.group)
    return join_rows(maxima_2T[0], maxima_2T[1], sums_4T)
