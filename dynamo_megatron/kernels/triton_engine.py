"""The Triton engine: checks, grids and outputs around the kernels."""

# A launch takes options that are no parameters of the kernel, and plain values for constants.
# pyright: reportCallIssue=false, reportArgumentType=false

import torch
import triton
from torch import Tensor

from dynamo_megatron.kernels.finish import RowState
from dynamo_megatron.kernels.shard import VocabShard
from dynamo_megatron.kernels.triton_kernels import (
    finish_kernel,
    gradient_kernel,
    partials_kernel,
)
from dynamo_megatron.types import TokenStats

# Columns a program handles at once and the warps it has. By register count (see the test that
# compiles for sm_90a) any of 1024..8192 is sound; benchmarks/token_stats_gpu.py sweeps them.
FORWARD_BLOCK, FORWARD_WARPS = 4096, 8
GRADIENT_BLOCK, GRADIENT_WARPS = 4096, 8
FINISH_BLOCK = 128
# Said outright because Triton's default changes between versions. Fused multiply-add rounds once
# where two operations round twice; every difference that must be exact is taken before a product.
OPTIONS = {"enable_fp_fusion": True}


def triton_partials(
    logits_TVp: Tensor,
    targets_T: Tensor,
    inv_T: Tensor,
    shard: VocabShard,
    *,
    need_q: bool,
    block: int = FORWARD_BLOCK,
    warps: int = FORWARD_WARPS,
) -> Tensor:
    """Partial statistics; see `rows.forward_rows`."""
    _check_contiguous(logits_TVp, targets_T, inv_T)
    tokens, width = logits_TVp.shape
    out = logits_TVp.new_empty(6 if need_q else 4, tokens, dtype=torch.float32)
    if tokens:
        partials_kernel[(tokens,)](
            logits_TVp,
            targets_T,
            inv_T,
            out,
            tokens,
            width,
            shard.valid,
            shard.start,
            BLOCK=_fitting(block, width),
            NEED_Q=need_q,
            num_warps=warps,
            **OPTIONS,
        )
    return out


def triton_finish(
    parts_R6T: Tensor, targets_T: Tensor, inv_T: Tensor
) -> tuple[TokenStats, RowState]:
    """Statistics and backward state; see `finish.finish`."""
    _check_contiguous(parts_R6T, targets_T, inv_T)
    ranks, rows, tokens = parts_R6T.shape
    # NaN marks what was not computed.
    stats = parts_R6T.new_full((5, tokens), float("nan"))
    state = parts_R6T.new_empty(3, tokens)
    if tokens:
        finish_kernel[(triton.cdiv(tokens, FINISH_BLOCK),)](
            parts_R6T,
            targets_T,
            inv_T,
            stats,
            state,
            tokens,
            ranks,
            BLOCK=FINISH_BLOCK,
            NEED_Q=rows == 6,
            **OPTIONS,
        )
    return TokenStats(*stats.unbind()), RowState(*state.unbind())


def triton_gradient(
    logits_TVp: Tensor,
    grad_TVp: Tensor,
    targets_T: Tensor,
    inv_T: Tensor,
    state: RowState,
    shard: VocabShard,
    grad_logp_T: Tensor | None,
    grad_entropy_T: Tensor | None,
    *,
    block: int = GRADIENT_BLOCK,
    warps: int = GRADIENT_WARPS,
) -> None:
    """Gradient of the logits; see `rows.backward_rows`."""
    g_T = None if grad_logp_T is None else grad_logp_T.contiguous()
    k_T = None if grad_entropy_T is None else grad_entropy_T.contiguous()
    _check_contiguous(logits_TVp, grad_TVp, targets_T, inv_T, state.m, state.log_s0, state.mu)
    tokens, width = logits_TVp.shape
    if tokens and width:
        block = _fitting(block, width)
        gradient_kernel[(tokens, triton.cdiv(width, block))](
            logits_TVp,
            grad_TVp,
            targets_T,
            inv_T,
            state.m,
            state.log_s0,
            state.mu,
            g_T,
            k_T,
            width,
            shard.valid,
            shard.start,
            BLOCK=block,
            HAS_G=g_T is not None,
            HAS_K=k_T is not None,
            num_warps=warps,
            **OPTIONS,
        )
    # The kernel writes behind autograd's back: without this a second backward would take the
    # gradient for logits instead of raising.
    torch.autograd.graph.increment_version(grad_TVp)


def _fitting(block: int, width: int) -> int:
    """``block``, or the power of two that covers a narrower row."""
    return min(block, triton.next_power_of_2(max(width, 16)))


def _check_contiguous(*tensors: Tensor) -> None:
    """The kernels take pointers and assume dense rows."""
    for index, tensor in enumerate(tensors):
        assert tensor.is_contiguous(), (
            f"operand {index} {list(tensor.shape)} has strides {tensor.stride()}"
        )
