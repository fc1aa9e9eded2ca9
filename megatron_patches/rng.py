"""Let megatron-core's CUDA random state tracker drive the CPU generator.

Failure:  ``AssertionError: Torch not compiled with CUDA enabled`` when a region is entered
    (dropout, activation recomputation); with a CUDA build, seeds are queued for a device that
    never comes, so tensor-parallel ranks draw the same numbers.
Trigger:  ``model_parallel_cuda_manual_seed`` and ``get_cuda_rng_tracker().fork()`` without a GPU.
Safe because: on a CPU-only host every random number comes from the CPU generator, so that is the
    state to save, switch and restore. The states have the same type (a uint8 tensor) and the
    tracker treats them as opaque.
Upstream: the tracker is written for the CUDA generator only.
Delete when: megatron-core's tracker takes the generator to drive.
"""

import logging
from types import ModuleType

import torch

from megatron_patches._guard import checked_function, require_cpu_only_host
from megatron_patches._import_hook import MegatronImportHook
from megatron_patches.torch_view import ModuleView

NAME = "rng"

_MODULE = "megatron.core.tensor_parallel.random"
_CPU_STATE_WARNING = "CPU RNG state changed within GPU RNG context"


def apply(hook: MegatronImportHook) -> None:
    """Register the change of megatron-core's random state module."""
    require_cpu_only_host(NAME)
    hook.after(_MODULE, _use_cpu_generator)


def _use_cpu_generator(module: ModuleType) -> None:
    checked_function(module, "_get_cuda_rng_state", sha="aa26caaa069c")
    checked_function(module, "_set_cuda_rng_state", sha="b179c9d95438")
    # The tracker's `add` and the seeding function go to torch.cuda directly.
    cuda = ModuleView(module.torch.cuda, get_rng_state=torch.get_rng_state, manual_seed=_seed)
    vars(module).update(
        _get_cuda_rng_state=_get_state,
        _set_cuda_rng_state=_set_state,
        torch=ModuleView(module.torch, cuda=cuda),
    )
    # The tracker warns when the CPU generator moves inside a region: here it is meant to.
    logging.getLogger(_MODULE).addFilter(_is_not_cpu_state_warning)


def _get_state(
    device: object = "cuda", clone: bool = False, graph_safe: bool = False
) -> torch.Tensor:
    """The state of the CPU generator (always a copy, so ``clone`` has nothing to add)."""
    return torch.get_rng_state()


def _set_state(new_state: torch.Tensor, device: object = -1, graph_safe: bool = False) -> None:
    torch.set_rng_state(new_state)


def _seed(seed: int) -> None:
    torch.default_generator.manual_seed(seed)


def _is_not_cpu_state_warning(record: logging.LogRecord) -> bool:
    return record.getMessage() != _CPU_STATE_WARNING
