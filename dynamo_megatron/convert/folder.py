"""A folder that appears when it is complete, or not at all."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from dynamo_megatron.checkpoint.export import prepare_folder
from dynamo_megatron.checkpoint.manifest import sync_folder
from dynamo_megatron.convert.errors import ConversionError

# Configuration, tokenizer, headers and the index of tensors.
_MARGIN = 32 << 20


def require_new(out: Path, *sources: Path) -> None:
    """Refuse, before any work, a place where no folder can appear or that is not to be changed.

    Args:
        out: of the conversion.
        sources: what is converted.

    Raises:
        ConversionError: says what is there.
    """
    for source in sources:
        if out.resolve().is_relative_to(source.resolve()):
            raise ConversionError(
                f"{out} is in {source}, which is converted and must not be changed: choose a "
                "folder elsewhere."
            )
    if out.name in ("", ".."):
        raise ConversionError(f"{out} is not the name of a new folder: give one, such as {out}/new")
    # The finished folder is renamed to it, which replaces neither.
    if out.is_symlink() or os.path.ismount(out):
        kind = "symbolic link" if out.is_symlink() else "mount point"
        raise ConversionError(f"{out} is a {kind} and no new folder: choose another name.")
    there = next(path for path in out.absolute().parents if os.path.lexists(path))
    if not there.is_dir():
        raise ConversionError(
            f"{out} cannot be made: {there} is not a folder. Choose another place."
        )


@contextmanager
def new_folder(out: Path, *, num_bytes: int) -> Iterator[Path]:
    """Give a temporary folder that becomes ``out`` when the block ends without an error.

    After an error or an interruption nothing is left. What a killed process left is removed by the
    next conversion to the same folder.

    Args:
        out: must not exist, or be empty.
        num_bytes: of the weights to come.

    Raises:
        CheckpointError: ``out`` has files in it.
        ConversionError: the file system is too full.
    """
    made = [path for path in out.absolute().parents if not path.exists()]
    partial = out.with_name(f"{out.name}.tmp-{secrets.token_hex(4)}")
    ours = [partial]
    try:
        prepare_folder(out, partial)
        free = shutil.disk_usage(partial).free
        if free < num_bytes + _MARGIN:
            raise ConversionError(
                f"{out.parent} has {free / 2**30:.2f} GiB free and the weights alone take "
                f"{num_bytes / 2**30:.2f} GiB: free some space or choose another folder."
            )
        yield partial
        partial.rename(out)
        ours.append(out)
        sync_folder(out.parent)
    except BaseException:  # an interruption too
        for path in ours:
            shutil.rmtree(path, ignore_errors=True)
        with suppress(OSError):
            for path in made:
                path.rmdir()
        raise
