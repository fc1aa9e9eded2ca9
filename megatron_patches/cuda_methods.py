"""Let ``tensor.cuda()``, called by megatron-core, return the CPU tensor.

Failure:  ``RuntimeError: Invalid device, must be cuda device`` or ``AssertionError: Torch not
    compiled with CUDA enabled`` from ``Tensor.cuda``.
Trigger:  saving a distributed optimizer, fully parallel checkpoint loading, tied embeddings with
    pipeline stages, restoring a gradient scaler, without a GPU.
Safe because: on a CPU-only host the method can only raise. It still does for every caller outside
    megatron-core, so that nobody else believes in a GPU.
Upstream: megatron-core supports CUDA only.
Delete when: megatron-core moves tensors with ``.to(device)``, its device replaceable.
"""

import functools
import sys
from typing import Any

import torch

from megatron_patches._guard import require_cpu_only_host
from megatron_patches._import_hook import MegatronImportHook, is_megatron_module

NAME = "cuda_methods"


def apply(hook: MegatronImportHook) -> None:
    """Replace ``torch.Tensor.cuda``; ``hook`` is not needed, as the method is torch's own."""
    require_cpu_only_host(NAME)
    upstream = torch.Tensor.cuda

    @functools.wraps(upstream)
    def cuda(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        caller = sys._getframe(1).f_globals.get("__name__", "")
        return self if is_megatron_module(caller) else upstream(self, *args, **kwargs)

    torch.Tensor.cuda = cuda
