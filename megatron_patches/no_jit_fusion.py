"""Keep megatron-core from compiling its fused functions.

Failure:  no error; the first training step compiles C++ for about 18 seconds in every process,
    and again for each new shape.
Trigger:  a forward pass through a function that megatron-core decorates with ``jit_fuser``
    (bias-dropout-add, bias-activation, ...), which is ``torch.compile``.
Safe because: upstream's own switch is used; the functions run as written. Only megatron-core's
    decorator changes: unlike ``TORCHDYNAMO_DISABLE`` it leaves ``torch.compile`` to everyone else.
Upstream: ``disable_jit_fuser()`` exists, but can only be called after ``import megatron.core``,
    when the decorated functions are compiled ones already.
Delete when: megatron-core takes the choice from the configuration.
"""

from types import ModuleType

from megatron_patches._guard import require_cpu_only_host
from megatron_patches._import_hook import MegatronImportHook

NAME = "no_jit_fusion"


def apply(hook: MegatronImportHook) -> None:
    """Register the switch, to be thrown before any function is decorated."""
    require_cpu_only_host(NAME)
    hook.after("megatron.core.jit", _disable)


def _disable(module: ModuleType) -> None:
    module.disable_jit_fuser()
