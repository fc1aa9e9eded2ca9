"""The completion marker of a checkpoint: what is in the folder, for which model, by what version.

``complete.json`` is written after everything else is on disk, so a folder without it is half
written, whatever its name.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from dynamo_megatron.checkpoint.errors import CheckpointError
from dynamo_megatron.hf.architecture import Architecture

logger = logging.getLogger(__name__)

FORMAT_VERSION = 1
MARKER = "complete.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class FileRecord:
    """Size in bytes and SHA-256: torch does not look at the checksums in its own files."""

    size: int
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """What ``complete.json`` says.

    Attributes:
        format_version: of this layout of files.
        step: training steps done.
        saved_at: seconds since 1970.
        megatron_core: version that wrote the tensors.
        torch: likewise.
        fingerprint: the model; must be equal to load.
        layout: sizes of the parallel groups; may differ.
        optimizer: Megatron-Core's class of optimizer, or ``WEIGHTS_ONLY``; must be equal.
        optimizer_state: the optimizer had made an update and its state is in the checkpoint.
        scheduler_steps: position of the learning-rate schedule.
        files: by path relative to the folder, without the marker itself.
    """

    format_version: int
    step: int
    saved_at: float
    megatron_core: str
    torch: str
    fingerprint: Mapping[str, Any]
    layout: Mapping[str, int]
    optimizer: str
    optimizer_state: bool
    scheduler_steps: int
    files: Mapping[str, FileRecord]


WEIGHTS_ONLY = "none, weights only"
"""What stands for the optimizer in a checkpoint that was converted and not trained."""


def model_fingerprint(arch: Architecture, dtype: torch.dtype) -> dict[str, Any]:
    """What must be equal for a model to be loaded."""
    return {"architecture": asdict(arch), "dtype": str(dtype).removeprefix("torch.")}


def write_file(path: Path, content: bytes) -> None:
    """Write a file and wait until it is on disk."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as stream:
        stream.write(content)
        stream.flush()
        os.fsync(stream.fileno())


def sync_folder(path: Path) -> None:
    """Wait until the folder's list of files is on disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def hash_files(folder: Path, names: Iterable[str]) -> dict[str, str]:
    """SHA-256 by name of files under ``folder``."""
    return {name: _sha256(folder / name) for name in names}


def record_files(folder: Path, hashes: Mapping[str, str]) -> dict[str, FileRecord]:
    """Records of every file under ``folder``, with their folders synced to disk.

    Args:
        folder: the checkpoint.
        hashes: what is known already, from the ranks that wrote the large files.
    """
    records = {}
    for base, _, names in os.walk(folder):
        for path in (Path(base, name) for name in names):
            name = path.relative_to(folder).as_posix()
            records[name] = FileRecord(
                size=path.stat().st_size, sha256=hashes.get(name) or _sha256(path)
            )
        sync_folder(Path(base))
    return dict(sorted(records.items()))


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Mark ``folder`` as complete. A kill leaves either the whole marker or none."""
    partial = folder / f"{MARKER}.partial"
    write_file(partial, encode_manifest(manifest))
    partial.rename(folder / MARKER)
    sync_folder(folder)


def encode_manifest(manifest: Manifest) -> bytes:
    """The marker's JSON."""
    return (json.dumps(asdict(manifest), indent=2) + "\n").encode()


def read_manifest(folder: Path) -> Manifest:
    """Read ``folder``'s marker.

    Raises:
        CheckpointError: there is none, it is not a marker, or a newer version wrote it.
    """
    path = folder / MARKER
    try:
        return decode_manifest(path.read_bytes(), path)
    except (FileNotFoundError, NotADirectoryError):
        raise CheckpointError(
            f"{folder} has no {MARKER}: it is no checkpoint, or saving it was interrupted. "
            "Choose a folder that has one."
        ) from None


def decode_manifest(content: bytes, path: Path) -> Manifest:
    """The manifest that ``encode_manifest`` was given; ``path`` is for messages.

    Raises:
        CheckpointError: the content is something else, or of a newer version.
    """
    try:
        raw = json.loads(content)
        version = raw["format_version"]
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{path} is not the marker of a checkpoint ({type(error).__name__}: {error}). The "
            "file is damaged: delete its folder to fall back to the checkpoint before it."
        ) from None
    if version != FORMAT_VERSION:
        raise CheckpointError(
            f"{path} has format version {version}, this version of dynamo_megatron reads "
            f"{FORMAT_VERSION}. Use the version that wrote it."
        )
    try:
        files = {name: FileRecord(**record) for name, record in raw.pop("files").items()}
        return Manifest(files=files, **raw)
    except (KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{path} lacks or adds fields ({error}). The file was edited or damaged: delete its "
            "folder to fall back to the checkpoint before it."
        ) from None


def tell_other_version(path: Path, manifest: Manifest) -> None:
    """Log when another Megatron-Core wrote the tensors than the one installed."""
    if manifest.megatron_core != (installed := version("megatron-core")):
        logger.warning(
            "%s was written by megatron-core %s, installed is %s: the tensors are checked by name "
            "and shape only.",
            path,
            manifest.megatron_core,
            installed,
        )


def verify_sizes(folder: Path, manifest: Manifest) -> None:
    """Look for every recorded file.

    Raises:
        CheckpointError: a file is missing or has another size.
    """
    for name, record in manifest.files.items():
        path = folder / name
        try:
            size = path.stat().st_size
        except FileNotFoundError:
            raise CheckpointError(f"{path} is missing from the checkpoint.") from None
        if size != record.size:
            raise CheckpointError(
                f"{path} has {size} bytes and was saved with {record.size}: it is truncated or "
                "was written over."
            )


def verify_hashes(folder: Path, manifest: Manifest, *, rank: int, world_size: int) -> None:
    """Read this rank's share of the files, the largest dealt out first, and compare hashes.

    Raises:
        CheckpointError: a file is not what was saved.
    """
    by_size = sorted(manifest.files, key=lambda name: (-manifest.files[name].size, name))
    for name in by_size[rank::world_size]:
        if _sha256(folder / name) != manifest.files[name].sha256:
            raise CheckpointError(
                f"{folder / name} has the right size but another SHA-256 than when it was saved: "
                "it is damaged or was edited."
            )


def different_keys(saved: Mapping[str, Any], present: Mapping[str, Any]) -> list[str]:
    """Lines "key: saved <value>, now <value>" for every leaf that differs."""
    saved, present = dict(_leaves(saved)), dict(_leaves(present))
    return [
        f"{key}: saved {saved.get(key, 'nothing')!r}, now {present.get(key, 'nothing')!r}"
        for key in sorted(saved.keys() | present.keys())
        if key not in saved or key not in present or saved[key] != present[key]
    ]


def _leaves(value: Any, prefix: str = ""):
    """(dotted path, leaf) pairs. Tuples count as lists, as in JSON."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _leaves(inner, f"{prefix}.{key}" if prefix else str(key))
    else:
        yield prefix, list(value) if isinstance(value, tuple) else value


def _sha256(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
