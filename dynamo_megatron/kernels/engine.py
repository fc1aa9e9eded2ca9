"""Which code sums up the rows: plain torch, compiled torch, or Triton."""

import functools
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from dynamo_megatron.kernels.blocks import CompiledBlocks
from dynamo_megatron.kernels.finish import RowState, finish
from dynamo_megatron.kernels.rows import backward_rows, forward_rows
from dynamo_megatron.kernels.shard import VocabShard
from dynamo_megatron.types import TokenStats

Implementation = Literal["auto", "reference", "torch", "torch_compile", "triton"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Engine:
    """The three stages between logits and statistics; the collective lies between the first two.

    Attributes:
        partials: (logits, targets, inv, shard, need_q=) -> partial statistics [6, T] or [4, T].
        finish: (parts, targets, inv) -> statistics and backward state.
        gradient: (logits, out, targets, inv, state, shard, grad_logp, grad_entropy), writes out.
    """

    partials: Callable[..., Tensor]
    finish: Callable[[Tensor, Tensor, Tensor], tuple[TokenStats, RowState]]
    gradient: Callable[..., None]


TORCH = Engine(forward_rows, finish, backward_rows)
TORCH_COMPILE = Engine(
    functools.partial(forward_rows, blocks_of=CompiledBlocks),
    finish,
    functools.partial(backward_rows, blocks_of=CompiledBlocks),
)


def choose_engine(impl: Implementation, dtype: torch.dtype, device: torch.device) -> Engine:
    """The engine that ``impl`` asks for.

    Raises:
        ValueError: An unknown or unavailable implementation, or logits of float64.
    """
    if dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ValueError(
            f"the streaming token statistics take float32, bfloat16 or float16, got {dtype}. "
            "impl='reference' takes any float dtype."
        )
    if impl == "auto":
        impl = "triton" if device.type == "cuda" and triton_works(device) else "torch"
    if impl == "torch":
        return TORCH
    if impl == "torch_compile":
        return TORCH_COMPILE
    if impl == "triton":
        if device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
            raise ValueError(
                f"impl='triton' needs a CUDA device, the tensors are on {device}. Use 'torch' (or "
                "set TRITON_INTERPRET=1 to run the kernels in Triton's slow interpreter)."
            )
        return _triton_engine()
    raise ValueError(
        f"impl={impl!r} is not available here: choose 'auto', 'torch', 'torch_compile' or "
        "'triton' ('reference' in token_stats only)."
    )


@functools.cache
def triton_works(device: torch.device) -> bool:
    """Whether the kernels can be imported, compiled and run on ``device``; warns once if not.

    A failure here has a good answer, plain torch. A wrong number would not: nothing is compared.
    """
    try:
        engine = _triton_engine()
        shard = VocabShard(0, 16, 16, None)
        inv_T = torch.ones(1, dtype=torch.float64, device=device)
        targets_T = torch.zeros(1, dtype=torch.int64, device=device)
        partial = engine.partials(
            torch.zeros(1, 16, device=device), targets_T, inv_T, shard, need_q=True
        )
        engine.finish(partial[None], targets_T, inv_T)
    except Exception as error:  # ImportError, or any of the compiler's and driver's own
        logger.warning(
            "the Triton kernels do not run on %s (%s: %s): the token statistics use plain torch, "
            "several times slower on a GPU. Repair Triton, or set the implementation to 'torch'.",
            device,
            type(error).__name__,
            error,
        )
        return False
    return True


def _triton_engine() -> Engine:
    """Imported on use: a CPU needs no Triton."""
    from dynamo_megatron.kernels.triton_engine import (
        triton_finish,
        triton_gradient,
        triton_partials,
    )

    return Engine(triton_partials, triton_finish, triton_gradient)
