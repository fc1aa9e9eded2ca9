"""What keeps a patch honest: where it may run, and what it was written against."""

import hashlib
import inspect
from collections.abc import Callable
from importlib import metadata
from types import FunctionType, ModuleType

import torch

SUPPORTED_VERSION = "0.16.1"
"""The megatron-core release that every patch here was read and tested against."""


class PatchError(RuntimeError):
    """A patch may not be applied: wrong host, wrong order, wrong version, or changed source."""


def require_supported_version() -> None:
    """Refuse a megatron-core that the patches were not written for.

    Raises:
        PatchError: megatron-core is missing, or is another release.
    """
    try:
        found = metadata.version("megatron-core")
    except metadata.PackageNotFoundError:
        found = "none"
    if found != SUPPORTED_VERSION:
        raise PatchError(
            f"the patches for CPU hosts are written for megatron-core {SUPPORTED_VERSION}, "
            f"installed is {found}. Patching another release could change its results without an "
            f"error. Run `pip install megatron-core=={SUPPORTED_VERSION}`, or go through "
            "megatron_patches/ with the new sources and raise SUPPORTED_VERSION."
        )


def require_cpu_only_host(patch: str) -> None:
    """Refuse a patch where CUDA is available.

    Args:
        patch: name of the patch, for the message.

    Raises:
        PatchError: ``torch.cuda.is_available()``.
    """
    if torch.cuda.is_available():
        raise PatchError(
            f"the patch {patch!r} sends CUDA calls of megatron-core to the CPU, and this host has "
            "CUDA: training would silently leave the GPU. Call megatron_patches.apply(), which "
            "does nothing here, or hide the GPU with CUDA_VISIBLE_DEVICES='' to test on the CPU."
        )


def source_sha(function: Callable[..., object]) -> str:
    """First 12 hex digits of the SHA-256 of a function's source text."""
    return hashlib.sha256(inspect.getsource(function).encode()).hexdigest()[:12]


def checked_function(owner: ModuleType | type, name: str, *, sha: str) -> FunctionType:
    """Return ``owner.name`` as a plain function, if its source is the one that was patched.

    Args:
        owner: the module or class that defines the function itself (not a base class).
        name: its name there; a static or class method is unwrapped.
        sha: ``source_sha`` of the source that the patch was written against.

    Raises:
        PatchError: the function is gone, or its source has changed.
    """
    where = f"{owner.__name__}.{name}"
    if name not in vars(owner):
        raise PatchError(
            f"{where} no longer exists in megatron-core, so its patch has nothing to change. "
            "Look where the code went: delete the patch if upstream fixed it, else move it there."
        )
    function = getattr(vars(owner)[name], "__func__", vars(owner)[name])
    found = source_sha(function)
    if found != sha:
        raise PatchError(
            f"{where} changed upstream: the patch was written against source {sha}, the installed "
            f"megatron-core has {found}. Patching unread code could change its results. Read the "
            "new source: delete the patch if upstream fixed it, else adapt it and record the new "
            "hash."
        )
    return function
