"""Show megatron-core modules a torch whose current CUDA device is the CPU.

Failure:  ``AssertionError: Torch not compiled with CUDA enabled`` (or ``RuntimeError: No CUDA GPUs
    are available`` / ``Found no NVIDIA driver`` with a CUDA build), from ``torch.cuda.
    current_device()`` while building a layer, and from tensors made with ``device="cuda"`` in the
    schedules, the optimizers and the gradient norm.
Trigger:  building a model, a forward-backward pass or an optimizer step without a GPU.
Safe because: the calls that are replaced cannot succeed on such a host. Only modules of
    megatron-core see the view; torch itself stays as it is, so that transformers and others are
    untouched. A wrapper in torch would not be: ``with torch.device("meta")`` finds the factory
    functions by identity, and transformers would load wrong rotary frequencies without an error.
Upstream: megatron-core supports CUDA only; there is no seam for the device.
Delete when: megatron-core takes its device from one replaceable place.
"""

import functools
from collections.abc import Callable
from types import ModuleType

import torch

from megatron_patches._guard import require_cpu_only_host
from megatron_patches._import_hook import MegatronImportHook

NAME = "torch_view"

_CPU = torch.device("cpu")
# The factories that megatron-core 0.16.1 calls with a literal device="cuda".
_FACTORIES = ("tensor", "zeros", "ones", "empty", "empty_like")


class ModuleView(ModuleType):
    """A module that shows another one, with some attributes replaced.

    Everything else is looked up in the shown module at each access, so what that imports or sets
    later is seen as well.
    """

    def __init__(self, shown: ModuleType, **replaced: object) -> None:
        super().__init__(shown.__name__, shown.__doc__)
        self.__dict__.update(replaced, __spec__=shown.__spec__, _shown=shown)

    def __getattr__(self, name: str) -> object:
        return getattr(self._shown, name)

    def __dir__(self) -> list[str]:
        return dir(self._shown)


def apply(hook: MegatronImportHook) -> None:
    """Register the view for every megatron-core module that imports torch."""
    require_cpu_only_host(NAME)
    view = _cpu_view()

    def show(module: ModuleType) -> None:
        if vars(module).get("torch") is torch:
            vars(module)["torch"] = view

    hook.after_every(show)


def _cpu_view() -> ModuleView:
    cuda = ModuleView(
        torch.cuda,
        # A device where torch returns an index: every use passes it on as `device=`.
        current_device=lambda: _CPU,
        # Work on the CPU is done when its call returns.
        synchronize=lambda device=None: None,
    )
    factories = {name: _on_cpu(getattr(torch, name)) for name in _FACTORIES}
    return ModuleView(torch, cuda=cuda, **factories)


def _on_cpu(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(factory)
    def create(*args: object, **kwargs: object) -> torch.Tensor:
        if "device" in kwargs and _names_cuda(kwargs["device"]):
            kwargs["device"] = _CPU
        return factory(*args, **kwargs)

    return create


def _names_cuda(device: object) -> bool:
    if isinstance(device, str):
        return device.split(":")[0] == "cuda"
    return isinstance(device, torch.device) and device.type == "cuda"
