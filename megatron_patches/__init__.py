"""The few things that megatron-core needs in order to run on a CPU-only host with gloo.

One file a patch; each says what fails without it, why it is safe and when to delete it. Nothing
happens at import. Call ``apply()`` once, before the first import of ``megatron.core``::

    import megatron_patches

    megatron_patches.apply()
    from megatron.core.models.gpt import GPTModel
"""

import sys
from collections.abc import Collection

import torch

from megatron_patches import (
    cuda_methods,
    distributed_optimizer_adamw,
    import_warnings,
    no_jit_fusion,
    rng,
    sequence_parallel_norm,
    tensor_type_names,
    torch_view,
)
from megatron_patches._guard import PatchError, require_supported_version
from megatron_patches._import_hook import PACKAGE, MegatronImportHook

__all__ = ["PatchError", "apply"]

# torch_view first: rng builds on the view that it puts into the module.
_PATCHES = (
    import_warnings,
    torch_view,
    rng,
    tensor_type_names,
    cuda_methods,
    sequence_parallel_norm,
    distributed_optimizer_adamw,
    no_jit_fusion,
)


def apply() -> tuple[str, ...]:
    """Prepare this process to run megatron-core without CUDA.

    Where CUDA is available this does nothing. A second call does nothing either.

    Returns:
        Names of the patches in force; empty where CUDA is available.

    Raises:
        PatchError: ``megatron.core`` was imported before, or is another release than the patches
            were written for. Importing ``megatron.core`` raises it later when the source of a
            patched function has changed.
    """
    return _apply(skip=())


def _apply(*, skip: Collection[str]) -> tuple[str, ...]:
    """``apply()`` without the patches named in ``skip``, to show what each is needed for."""
    if torch.cuda.is_available():
        return ()
    if hook := MegatronImportHook.installed():
        return hook.names
    require_supported_version()
    if PACKAGE in sys.modules:
        raise PatchError(
            f"{PACKAGE} is already imported, and its modules hold what the patches would replace. "
            "Call megatron_patches.apply() before the first import of megatron.core: at the top "
            "of the entry point, or in the tests' conftest.py."
        )
    chosen = [patch for patch in _PATCHES if patch.NAME not in skip]
    hook = MegatronImportHook()
    for patch in chosen:
        patch.apply(hook)
    hook.install(tuple(patch.NAME for patch in chosen))
    return hook.names
