"""LM head and token statistics in one: the logits exist a chunk of tokens at a time.

Shapes: S rows of hidden states, n ranks, T tokens that count, d hidden size, Vp columns.

Chunks are over tokens, not over the vocabulary: a chunk's gradient of the hidden states is then
final (no float32 [T, d] accumulator), and the weight gradient is accumulated in float32 where
Megatron keeps it anyhow. The price is that the backward projects again: four matrix products
instead of three.
"""

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from dynamo_megatron.kernels.engine import Engine, Implementation, choose_engine
from dynamo_megatron.kernels.finish import RowState
from dynamo_megatron.kernels.inputs import check_rows, check_targets, inverse_temperature
from dynamo_megatron.kernels.shard import VocabShard, exchange_partials
from dynamo_megatron.types import TokenStats

# Bytes of logits that exist at once when token_chunk is None.
CPU_CHUNK_BYTES = 32 << 20
GPU_CHUNK_BYTES = 256 << 20
# Logits of a micro-batch that may be held whole, as the default of fused_head_pays.
LOGITS_BUDGET_BYTES = 2 << 30


def fused_head_pays(
    tokens: int, columns: int, element_size: int, *, budget_bytes: int = LOGITS_BUDGET_BYTES
) -> bool:
    """Whether `token_stats_linear` should be preferred to the LM head and `token_stats`.

    It projects once more (four matrix products for three) and saves the logits, so it pays where
    they would not fit: where ``tokens * columns * element_size`` exceeds the budget. Count the
    tokens that are projected, without prompts and padding. The same on every rank of a
    tensor-parallel group, whose ranks hold equally many tokens and columns.

    Args:
        tokens: Rows projected.
        columns: Columns of this rank's shard, padding included.
        element_size: Bytes of a logit.
        budget_bytes: What the logits of a micro-batch may take.
    """
    return tokens * columns * element_size > budget_bytes


def token_stats_linear(
    hidden_Sd: Tensor,
    weight_Vpd: Tensor,
    targets_T: Tensor,
    *,
    temperature: float | Tensor = 1.0,
    vocab_size: int,
    vocab_start: int | None = None,
    group: dist.ProcessGroup | None = None,
    rows_T: Tensor | None = None,
    sequence_parallel: bool = False,
    entropy_grad: bool = True,
    need_q: bool = True,
    token_chunk: int | None = None,
    impl: Implementation = "auto",
) -> TokenStats:
    """`token_stats` of ``hidden @ weight.T``, whose logits are never held for all tokens.

    The logits are rounded to the dtype of ``hidden`` chunk by chunk, as the LM head would, so the
    result equals that of the head followed by `token_stats`. With gradients disabled nothing is
    kept; else the hidden states as given, the weight, and three float32 a token.

    Args:
        hidden_Sd: [S, d] hidden states, contiguous, equal on every rank; with
            ``sequence_parallel`` this rank's [S / n, d] of them.
        weight_Vpd: [Vp, d] this rank's rows of the LM head (or of a tied embedding), same dtype.
        targets_T: [T] int64 global ids, equal on every rank; negative ones are ignored.
        temperature: One for all tokens, or [T].
        vocab_size: True size of the vocabulary, without padding. Padded rows of the weight are
            never multiplied, their gradient is 0.
        vocab_start: Global id of the weight's row 0; None for equal shards in rank order.
        group: The tensor-parallel group; None when the weight holds the whole vocabulary.
        rows_T: [T] int64, the row of the S hidden states that predicts each target, each at most
            once; None when all do, in order. Other rows are not projected and get gradient 0.
        sequence_parallel: The hidden states are split over ``group`` along S.
        entropy_grad: Let ``entropy`` carry a gradient.
        need_q: Compute ``sum_pi2`` and ``q``.
        token_chunk: Tokens projected at once; None for as many as make 32 MiB of logits on a CPU,
            256 MiB on a GPU.
        impl: As in `token_stats`, without ``reference``.

    Returns:
        `TokenStats`, as from `token_stats`.

    Raises:
        ValueError: As `token_stats`; or hidden states and weight that do not fit.

    Weight gradient: summed over chunks in float32. Where the weight has a float32 ``main_grad``
    (Megatron's DistributedDataParallel) the sum goes straight into it and the returned gradient is
    zero, which that class's hook may add or skip: ``grad_added_to_main_grad`` is left as it is,
    because setting it would make the hook drop what another micro-batch, or a tied embedding,
    hands over the ordinary way. Elsewhere the sum is returned in the weight's dtype.

    Collectives on ``group``: forward, those of `token_stats`, after one all-gather of the hidden
    states with ``sequence_parallel``; backward, one all-reduce of [S, d], or with
    ``sequence_parallel`` one all-gather and one reduce-scatter. Every rank must call.
    """
    check_rows("hidden", hidden_Sd)
    check_rows("weight", weight_Vpd)
    width, features = weight_Vpd.shape
    if hidden_Sd.shape[1] != features or hidden_Sd.dtype != weight_Vpd.dtype:
        raise ValueError(
            f"hidden {list(hidden_Sd.shape)} {hidden_Sd.dtype} does not fit weight "
            f"{list(weight_Vpd.shape)} {weight_Vpd.dtype}: both need the same d and dtype."
        )
    if token_chunk is not None and token_chunk < 1:
        raise ValueError(f"token_chunk must be at least 1, got {token_chunk}; None chooses it.")
    shard = VocabShard.of(width, vocab_size=vocab_size, vocab_start=vocab_start, group=group)
    held = hidden_Sd.shape[0] * (shard.ranks if sequence_parallel else 1)
    tokens = held if rows_T is None else rows_T.shape[0]
    check_targets(targets_T, tokens, vocab_size, hidden_Sd.device)
    inv_T = inverse_temperature(temperature, tokens, hidden_Sd.device)
    plan = _Plan(
        shard=shard,
        engine=choose_engine(impl, hidden_Sd.dtype, hidden_Sd.device),
        chunk=token_chunk or _default_chunk(weight_Vpd),
        sequence_parallel=sequence_parallel and shard.ranks > 1,
        entropy_grad=entropy_grad,
        need_q=need_q,
    )
    return TokenStats(
        *_TokenStatsLinear.apply(hidden_Sd, weight_Vpd, targets_T, inv_T, rows_T, plan)
    )


def _default_chunk(weight_Vpd: Tensor) -> int:
    """Tokens whose logits fill the budget, at least 16."""
    budget = CPU_CHUNK_BYTES if weight_Vpd.device.type == "cpu" else GPU_CHUNK_BYTES
    return max(16, budget // (weight_Vpd.shape[0] * weight_Vpd.element_size()))


@dataclass(frozen=True, slots=True)
class _Plan:
    """The settings of one call."""

    shard: VocabShard
    engine: Engine
    chunk: int
    sequence_parallel: bool
    entropy_grad: bool
    need_q: bool

    @property
    def real_shard(self) -> VocabShard:
        """The shard without its padding, which is not projected."""
        return dataclasses.replace(self.shard, width=self.shard.valid)

    def rows_of(self, hidden_Sd: Tensor, rows_T: Tensor | None) -> Tensor:
        """[T, d] hidden states that are projected."""
        if self.sequence_parallel:
            whole_Sd = hidden_Sd.new_empty(
                hidden_Sd.shape[0] * self.shard.ranks, hidden_Sd.shape[1]
            )
            dist.all_gather_single(whole_Sd, hidden_Sd, group=self.shard.group)
            hidden_Sd = whole_Sd
        return hidden_Sd if rows_T is None else hidden_Sd.index_select(0, rows_T)

    def reduced(self, grad_Td: Tensor, rows_T: Tensor | None, shape: torch.Size) -> Tensor:
        """Gradient of the hidden states as given, summed over the ranks' vocabulary shards."""
        ranks, group = self.shard.ranks, self.shard.group
        if rows_T is not None:
            held = shape[0] * (ranks if self.sequence_parallel else 1)
            grad_Td = grad_Td.new_zeros(held, shape[1]).index_copy_(0, rows_T, grad_Td)
        if self.sequence_parallel:
            mine = grad_Td.new_empty(shape)
            dist.reduce_scatter_single(mine, grad_Td, group=group)
            return mine
        if ranks > 1:
            dist.all_reduce(grad_Td, group=group)
        return grad_Td


class _TokenStatsLinear(torch.autograd.Function):
    """Projects, sums up and forgets; the backward projects again."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_Sd: Tensor,
        weight_Vpd: Tensor,
        targets_T: Tensor,
        inv_T: Tensor,
        rows_T: Tensor | None,
        plan: _Plan,
    ) -> tuple[Tensor, ...]:
        hidden_Td = plan.rows_of(hidden_Sd, rows_T)
        shard = plan.real_shard
        tokens = hidden_Td.shape[0]
        partial_6T = hidden_Td.new_empty(6 if plan.need_q else 4, tokens, dtype=torch.float32)
        for part, logits in _chunks(hidden_Td, weight_Vpd[: shard.width], plan.chunk):
            partial_6T[:, part] = plan.engine.partials(
                logits, targets_T[part], inv_T[part], shard, need_q=plan.need_q
            )
        parts_R6T = exchange_partials(partial_6T, inv_T, shard)
        stats, state = plan.engine.finish(parts_R6T, targets_T, inv_T)
        detached = [stats.lam, stats.sum_pi2, stats.q]
        if not plan.entropy_grad:
            detached.append(stats.entropy)
        ctx.mark_non_differentiable(*detached)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(  # rows_T may be None
            hidden_Sd, weight_Vpd, targets_T, inv_T, rows_T, state.m, state.log_s0, state.mu
        )
        ctx.plan = plan
        return stats.logp, stats.entropy, stats.lam, stats.sum_pi2, stats.q

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_logp_T, grad_entropy_T, *_):
        hidden_Sd, weight_Vpd, targets_T, inv_T, rows_T, m, log_s0, mu = ctx.saved_tensors
        plan: _Plan = ctx.plan
        shard = plan.real_shard
        hidden_Td = plan.rows_of(hidden_Sd, rows_T)
        grad_Td = torch.empty_like(hidden_Td) if ctx.needs_input_grad[0] else None
        sink = _WeightGradient(weight_Vpd) if ctx.needs_input_grad[1] else None
        weight = weight_Vpd[: shard.width]
        for part, logits in _chunks(hidden_Td, weight, plan.chunk):
            plan.engine.gradient(
                logits,
                logits,
                targets_T[part],
                inv_T[part],
                RowState(m[part], log_s0[part], mu[part]),
                shard,
                None if grad_logp_T is None else grad_logp_T[part],
                None if grad_entropy_T is None else grad_entropy_T[part],
            )
            if grad_Td is not None:
                torch.mm(logits, weight, out=grad_Td[part])
            if sink is not None:
                sink.add(logits, hidden_Td[part])
        grad_hidden = None if grad_Td is None else plan.reduced(grad_Td, rows_T, hidden_Sd.shape)
        grad_weight = None if sink is None else sink.returned()
        return grad_hidden, grad_weight, None, None, None, None


def _chunks(hidden_Td: Tensor, weight_Vd: Tensor, chunk: int):
    """Yield (token slice, its logits); one buffer serves all chunks."""
    tokens = hidden_Td.shape[0]
    buffer = hidden_Td.new_empty(min(chunk, tokens), weight_Vd.shape[0])
    for start in range(0, tokens, chunk):
        part = slice(start, min(start + chunk, tokens))
        logits = buffer[: part.stop - start]
        torch.mm(hidden_Td[part], weight_Vd.t(), out=logits)
        yield part, logits


class _WeightGradient:
    """Sums the chunks' weight gradients in float32."""

    def __init__(self, weight_Vpd: Tensor):
        self._weight = weight_Vpd
        # Megatron's DistributedDataParallel hangs its buffer on the parameter.
        main: Tensor | None = None
        if hasattr(weight_Vpd, "main_grad"):
            main = weight_Vpd.main_grad  # pyright: ignore[reportAttributeAccessIssue]
        if main is not None and main.dtype == torch.float32:
            self._sum, self._in_main_grad = main, True
        else:
            self._sum = torch.zeros_like(weight_Vpd, dtype=torch.float32)
            self._in_main_grad = False

    def add(self, grad_logits_tV: Tensor, hidden_td: Tensor) -> None:
        """Add one chunk's ``grad_logits.T @ hidden``."""
        total = self._sum[: grad_logits_tV.shape[1]]
        grad_Vt = grad_logits_tV.t()
        if hidden_td.dtype == torch.float32:
            total.addmm_(grad_Vt, hidden_td)
        elif hidden_td.device.type == "cuda":
            # 16-bit factors, float32 sum: what Megatron's fused weight-gradient kernel does.
            torch.addmm(total, grad_Vt, hidden_td, out_dtype=torch.float32, out=total)
        else:
            total.addmm_(grad_Vt.float(), hidden_td.float())

    def returned(self) -> Tensor:
        """What autograd gets."""
        if self._in_main_grad:
            return torch.zeros_like(self._weight)
        return self._sum.to(self._weight.dtype)
