"""Which code sums up the rows: plain torch, compiled torch, or Triton."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from dynamo_megatron.kernels.finish import RowState, finish
from dynamo_megatron.kernels.rows import backward_rows, forward_rows
from dynamo_megatron.types import TokenStats

Implementation = Literal["auto", "reference", "torch", "torch_compile", "triton"]


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


def choose_engine(impl: Implementation, dtype: torch.dtype, device: torch.device) -> Engine:
    """The engine for ``impl``."""
    del dtype, device, impl
    return TORCH
