"""Vocabulary-parallel token statistics from logits: one pass, one collective.

Shapes: T tokens, V vocabulary entries, Vp columns of this rank's shard.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from dynamo_megatron.kernels.engine import Engine, Implementation, choose_engine
from dynamo_megatron.kernels.finish import RowState
from dynamo_megatron.kernels.inputs import check_rows, check_targets, inverse_temperature
from dynamo_megatron.kernels.reference import reference_token_stats
from dynamo_megatron.kernels.shard import VocabShard, exchange_partials
from dynamo_megatron.types import TokenStats


def token_stats(
    logits_TVp: Tensor,
    targets_T: Tensor,
    *,
    temperature: float | Tensor = 1.0,
    vocab_size: int,
    vocab_start: int | None = None,
    group: dist.ProcessGroup | None = None,
    entropy_grad: bool = True,
    need_q: bool = True,
    inplace_backward: bool = True,
    impl: Implementation = "auto",
) -> TokenStats:
    """Log-probability, entropy and exact expected entropy-change term of each token.

    The policy is ``softmax(logits / temperature)`` over the first ``vocab_size`` ids; further
    columns are padding and have neither probability nor gradient. The logits are read once in the
    forward and once in the backward, in their own dtype, and summed in float32; no other tensor
    of their size is made or kept. With gradients disabled nothing is kept at all.

    Args:
        logits_TVp: [T, Vp] raw logits of this rank's columns, contiguous; float32, bfloat16 or
            float16 (float64 with ``reference``).
        targets_T: [T] int64 global ids, equal on every rank. Negative ones are ignored:
            ``logp`` and ``lam`` are 0 there, and the row's gradient is exactly 0.
        temperature: One for all tokens, or [T].
        vocab_size: True size of the vocabulary, without padding.
        vocab_start: Global id of column 0; None for equal shards in rank order.
        group: The tensor-parallel group; None when the logits hold the whole vocabulary.
        entropy_grad: Let ``entropy`` carry a gradient.
        need_q: Compute ``sum_pi2`` and ``q``, else they are NaN and less is computed and sent.
        inplace_backward: Write the gradient over the logits. A second backward then raises. A
            leaf keeps its values: it gets a gradient of its own.
        impl: ``auto`` takes ``triton`` on CUDA where it is installed, ``reference`` for float64,
            else ``torch``. ``torch_compile`` is ``torch`` with compiled row functions.

    Returns:
        `TokenStats`, float32 [T]; ``lam``, ``sum_pi2`` and ``q`` are detached. NaN logits give
        NaN statistics, and so does a token whose logits are all -inf.

    Raises:
        ValueError: Input that is not contiguous or of the wrong shape, an id at or above
            ``vocab_size``, a temperature that is not positive, shards that miss ids.

    Collectives on ``group``: one all-gather of 24 bytes a token in the forward (16 without Q), or
    one MAX and one SUM above `two_calls_pay_from` tokens; none in the backward. Every rank must
    call, with equally many tokens, none included.

    Source: DynaMO, arXiv:2602.19208, the first-order entropy change
    ``-xi (pi_y Lambda_y - Q)`` with ``Lambda = log pi + H``.
    """
    check_rows("logits", logits_TVp)
    tokens, width = logits_TVp.shape
    check_targets(targets_T, tokens, vocab_size, logits_TVp.device)
    inv_T = inverse_temperature(temperature, tokens, logits_TVp.device)
    shard = VocabShard.of(width, vocab_size=vocab_size, vocab_start=vocab_start, group=group)
    if impl == "reference" or (impl == "auto" and logits_TVp.dtype == torch.float64):
        return reference_token_stats(logits_TVp, targets_T, inv_T, shard, entropy_grad=entropy_grad)
    engine = choose_engine(impl, logits_TVp.dtype, logits_TVp.device)
    in_place = inplace_backward and not logits_TVp.is_leaf
    return TokenStats(
        *_TokenStats.apply(
            logits_TVp, targets_T, inv_T, shard, engine, entropy_grad, need_q, in_place
        )
    )


class _TokenStats(torch.autograd.Function):
    """The streaming forward and its recomputing backward."""

    @staticmethod
    def forward(
        ctx: Any,
        logits_TVp: Tensor,
        targets_T: Tensor,
        inv_T: Tensor,
        shard: VocabShard,
        engine: Engine,
        entropy_grad: bool,
        need_q: bool,
        in_place: bool,
    ) -> tuple[Tensor, ...]:
        partial = engine.partials(logits_TVp, targets_T, inv_T, shard, need_q=need_q)
        stats, state = engine.finish(exchange_partials(partial, inv_T, shard), targets_T, inv_T)
        detached = [stats.lam, stats.sum_pi2, stats.q]
        if not entropy_grad:
            detached.append(stats.entropy)
        ctx.mark_non_differentiable(*detached)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(logits_TVp, targets_T, inv_T, state.m, state.log_s0, state.mu)
        ctx.shard, ctx.engine, ctx.in_place = shard, engine, in_place
        return stats.logp, stats.entropy, stats.lam, stats.sum_pi2, stats.q

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_logp_T, grad_entropy_T, *_):
        logits_TVp, targets_T, inv_T, *state = ctx.saved_tensors
        # detach() shares the version counter: writing here makes a second backward raise.
        grad_TVp = logits_TVp.detach() if ctx.in_place else torch.empty_like(logits_TVp)
        ctx.engine.gradient(
            logits_TVp.detach(),
            grad_TVp,
            targets_T,
            inv_T,
            RowState(*state),
            ctx.shard,
            grad_logp_T,
            grad_entropy_T,
        )
        return grad_TVp, *(None,) * 7
