"""A folder that appears when it is complete, or not at all."""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dynamo_megatron.checkpoint.export import prepare_folder
from dynamo_megatron.checkpoint.manifest import sync_folder
from dynamo_megatron.convert.errors import ConversionError

# Configuration, tokenizer, headers and the index of tensors.
_MARGIN = 32 << 20


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
    partial = out.with_name(f"{out.name}.tmp-{secrets.token_hex(4)}")
    prepare_folder(out, partial)
    try:
        free = shutil.disk_usage(partial).free
        if free < num_bytes + _MARGIN:
            raise ConversionError(
                f"{out.parent} has {free / 2**30:.2f} GiB free and the weights alone take "
                f"{num_bytes / 2**30:.2f} GiB: free some space or choose another folder."
            )
        yield partial
        partial.rename(out)
        sync_folder(out.parent)
    except BaseException:  # an interruption too
        shutil.rmtree(partial, ignore_errors=True)
        raise
