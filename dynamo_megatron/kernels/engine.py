"""Which code sums up the rows: plain torch, compiled torch, or Triton."""

import functools
import importlib.util
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from dynamo_megatron.kernels.blocks import CompiledBlocks
from dynamo_megatron.kernels.finish import RowState, finish
from dynamo_megatron.kernels.rows import backward_rows, forward_rows
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
        impl = "triton" if device.type == "cuda" and _triton_installed() else "torch"
    if impl == "torch":
        return TORCH
    if impl == "torch_compile":
        return TORCH_COMPILE
    if impl == "triton":
        return _triton_engine()
    raise ValueError(
        f"impl={impl!r} is not available here: choose 'auto', 'torch', 'torch_compile' or "
        "'triton' ('reference' in token_stats only)."
    )


@functools.cache
def _triton_installed() -> bool:
    """Whether Triton can be imported; where not, says once what that costs."""
    if importlib.util.find_spec("triton") is not None:
        return True
    logger.warning(
        "triton is not installed: the token statistics run in plain torch, several times slower "
        "on a GPU. Install triton, or set the implementation to 'torch' to silence this."
    )
    return False


def _triton_engine() -> Engine:
    """Imported on use: a CPU needs no Triton."""
    from dynamo_megatron.kernels.triton_engine import (
        triton_finish,
        triton_gradient,
        triton_partials,
    )

    return Engine(triton_partials, triton_finish, triton_gradient)
