"""Reading the pickles of a distributed checkpoint through an allow-list.

A distributed checkpoint holds pickles in three places: ``.metadata`` (torch reads it with plain
``pickle.load``), ``common.pt`` and the tensors of ``*.distcp`` (``torch.load``). A fourth, objects
inside ``*.distcp``, is read without restriction by torch's planner; our checkpoints have none, and
one that has is refused. Nothing in a checkpoint can name a function outside the lists here.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata

from dynamo_megatron.checkpoint.errors import CheckpointError

METADATA, COMMON = ".metadata", "common.pt"

# Plain records and an enumeration, built from values; none acts on anything outside itself.
_DCP = "torch.distributed.checkpoint"
_METADATA_GLOBALS = frozenset(
    {
        *(
            (f"{_DCP}.metadata", name)
            for name in (
                "BytesStorageMetadata",
                "ChunkStorageMetadata",
                "Metadata",
                "MetadataIndex",
                "StorageMeta",
                "TensorProperties",
                "TensorStorageMetadata",
                "_MEM_FORMAT_ENCODING",
            )
        ),
        (f"{_DCP}.filesystem", "_StorageInfo"),
        ("pathlib", "PosixPath"),
        ("torch", "Size"),
        ("torch", "bfloat16"),
        ("torch", "float32"),
        ("torch", "float64"),
        ("torch", "float16"),
        ("torch", "int64"),
        ("torch.serialization", "_get_layout"),
    }
)


class _MetadataUnpickler(pickle.Unpickler):
    """Finds the records of a checkpoint's index, and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _METADATA_GLOBALS:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}")
        return super().find_class(module, name)


def read_index(folder: Path, files: Collection[str]) -> Metadata:
    """Read ``.metadata`` and check that it can be handed to torch.

    Args:
        folder: the checkpoint.
        files: names of the checkpoint's files; the index may point to no other.

    Raises:
        CheckpointError: the pickle asks for anything but the records of an index, it is damaged,
            it lists pickled objects, or it points outside the checkpoint.
    """
    path = folder / METADATA
    index = _load_index(path)
    objects = [
        name
        for name, entry in index.state_dict_metadata.items()
        if isinstance(entry, BytesStorageMetadata)
    ]
    if objects:
        raise _refused(path, f"it lists pickled objects: {', '.join(sorted(objects)[:3])}")
    strangers = {info.relative_path for info in index.storage_data.values()} - set(files)
    if strangers:
        raise _refused(path, f"it points to files outside the checkpoint: {sorted(strangers)[:3]}")
    return index


def _load_index(path: Path) -> Metadata:
    try:
        with path.open("rb") as stream:
            index = _MetadataUnpickler(stream).load()
    except pickle.UnpicklingError as error:
        raise _refused(path, error) from None
    except Exception as error:  # a damaged pickle raises anything
        raise _damaged(path, error) from None
    if not isinstance(index, Metadata) or not isinstance(index.storage_data, dict):
        raise _damaged(path, f"a {type(index).__name__} instead of an index of tensors")
    return index


def name_unreadable_tensor(folder: Path) -> None:
    """After a failed load: read tensor by tensor, safely, until the one that fails.

    Raises:
        CheckpointError: names its file, and what its pickle asked for.
    """
    for entry, info in _load_index(folder / METADATA).storage_data.items():
        path = folder / info.relative_path
        with path.open("rb") as stream:
            stream.seek(info.offset)
            content = io.BytesIO(stream.read(info.length))
        try:
            torch.load(content, map_location="cpu", weights_only=True)
        except pickle.UnpicklingError as error:
            raise _refused(path, f"tensor {entry.fqn}: {_first_sentence(error)}") from None
        except Exception as error:  # a damaged file raises anything
            raise _damaged(path, f"tensor {entry.fqn}, {_first_sentence(error)}") from None


def read_common(folder: Path) -> dict[str, Any]:
    """Read ``common.pt``: numbers, strings, lists, dicts and tensors only.

    Raises:
        CheckpointError: the pickle asks for anything else, or it is damaged.
    """
    path = folder / COMMON
    try:
        # Explicitly: the default gives way to the variable TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD.
        return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise _refused(path, _first_sentence(error)) from None
    except Exception as error:  # a damaged file raises anything
        raise _damaged(path, error) from None


def _first_sentence(error: Exception) -> str:
    """The message of torch without its advice to switch the restriction off."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    named = [line for line in lines if "GLOBAL" in line or "Unsupported" in line]
    return (named or lines or [type(error).__name__])[0]


def _refused(path: Path, why: object) -> CheckpointError:
    return CheckpointError(
        f"{path} is refused: {why}. A checkpoint of this trainer holds tensors, numbers and text; "
        "this file was made by something else or tampered with, and reading it could run code. Do "
        "not load it."
    )


def _damaged(path: Path, why: object) -> CheckpointError:
    detail = f"{type(why).__name__}: {why}" if isinstance(why, Exception) else why
    return CheckpointError(f"{path} cannot be read ({detail}): the file is damaged.")
