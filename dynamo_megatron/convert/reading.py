"""Weights of a distributed checkpoint by name: no model, no process group, any layout.

Tensors are read one at a time. A checkpoint's own SHA-256 cover whole files, of which the weights
are a small part where there is optimizer state; here each tensor that is read is compared with the
CRC-32 that stands beside it, and the small files with their SHA-256.
"""

from __future__ import annotations

import io
import math
import zipfile
import zlib
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from dynamo_megatron.checkpoint.errors import CheckpointError
from dynamo_megatron.checkpoint.manifest import (
    MARKER,
    Manifest,
    hash_files,
    read_manifest,
    verify_sizes,
)
from dynamo_megatron.checkpoint.trusted import read_index
from dynamo_megatron.convert.errors import ConversionError
from dynamo_megatron.hf.architecture import Architecture
from dynamo_megatron.hf.mapping import Entry, Kind, checkpoint_key, megatron_shape, parameter_table

_OPTIMIZER = "optimizer."


class CheckpointWeights:
    """The weights of a checkpoint.

    Attributes:
        folder: the checkpoint.
        manifest: its marker.
        dtype: of the weights.
    """

    def __init__(self, folder: Path) -> None:
        """Open a checkpoint and check its files by size.

        Raises:
            ConversionError: it is a checkpoint of another kind.
            CheckpointError: it is incomplete, damaged or not to be trusted.
        """
        _refuse_other_kinds(folder)
        self.folder = folder
        self.manifest: Manifest = read_manifest(folder)
        verify_sizes(folder, self.manifest)
        _verify_small_files(folder, self.manifest)
        index = read_index(folder, self.manifest.files)
        self._described = {
            name: described
            for name, described in index.state_dict_metadata.items()
            if not name.startswith(_OPTIMIZER) and isinstance(described, TensorStorageMetadata)
        }
        self._chunks: dict[str, list[tuple[tuple[int, ...], _StorageInfo]]] = defaultdict(list)
        for where, info in index.storage_data.items():
            self._chunks[where.fqn].append((tuple(where.offset), info))
        self._files: dict[str, io.BufferedReader] = {}
        dtypes = {described.properties.dtype for described in self._described.values()}
        if len(dtypes) != 1:
            raise ConversionError(f"{folder} has weights of the dtypes {sorted(map(str, dtypes))}.")
        (self.dtype,) = dtypes

    def require(self, arch: Architecture) -> None:
        """Refuse weights that are not those of a model, by the names and shapes of all tensors.

        Raises:
            ConversionError: names the tensors.
        """
        wanted: dict[str, tuple[int, ...]] = {}
        for entry in parameter_table(arch):
            shape = megatron_shape(entry, arch, padded_vocab=arch.vocab_size)
            wanted[checkpoint_key(entry)] = (
                shape if entry.layer is None else (arch.num_layers, *shape)
            )
        found = {name: tuple(described.size) for name, described in self._described.items()}
        padded = {checkpoint_key(e) for e in parameter_table(arch) if e.kind is Kind.VOCAB}
        wrong = [
            f"{name} {found[name]} for {shape}"
            for name, shape in wanted.items()
            if name in found and not _fits(found[name], shape, more_rows=name in padded)
        ]
        missing, surplus = sorted(wanted.keys() - found.keys()), sorted(found.keys() - wanted)
        if wrong or missing or surplus:
            raise ConversionError(
                f"{self.folder} and config.json are of different models. Missing tensors: "
                f"{missing or 'none'}; beyond the model: {surplus or 'none'}; of another shape: "
                f"{wrong or 'none'}."
            )

    def tensor(self, entry: Entry) -> Tensor:
        """A full Megatron tensor, put together from the ranks' parts; vocabulary padding included.

        Raises:
            CheckpointError: a part is missing, damaged, or asks to run code.
        """
        key = checkpoint_key(entry)
        shape, parts, covered = tuple(self._described[key].size), [], 0
        if entry.layer is not None:
            shape = shape[1:]
        for offset, info in self._chunks[key]:
            if entry.layer is not None and offset[0] != entry.layer:
                continue
            part = self._read(key, info)
            if entry.layer is not None:
                # Megatron-Core gives all layers' tensors of one kind one name, layers in front.
                offset, part = offset[1:], part[0]
            parts.append((offset, part))
            covered += part.numel()
        if covered != math.prod(shape):
            raise CheckpointError(
                f"{self.folder} holds {covered} of the {math.prod(shape)} numbers of {key} (layer "
                f"{entry.layer}): a rank's part is missing or there twice."
            )
        return _joined(parts, shape, self.dtype)

    def _read(self, key: str, info: _StorageInfo) -> Tensor:
        name = info.relative_path
        if name not in self._files:
            self._files[name] = (self.folder / name).open("rb")
        view = io.BufferedReader(_Slice(self._files[name], info.offset, info.length))
        try:
            tensor = torch.load(view, map_location="cpu", weights_only=True)
            with zipfile.ZipFile(view) as archive:
                (record,) = [r for r in archive.infolist() if r.filename.endswith("/data/0")]
        except Exception as error:  # a damaged file raises anything
            said = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise CheckpointError(
                f"{self.folder / name} is refused: {key} cannot be read ({said}). The file is "
                "damaged, or was made by something else."
            ) from None
        stored = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage()).numpy()
        if zlib.crc32(stored.data) != record.CRC:
            raise CheckpointError(
                f"{self.folder / name} is damaged: the CRC-32 of {key} is another than saved."
            )
        return tensor

    def close(self) -> None:
        """Release the files."""
        while self._files:
            self._files.popitem()[1].close()


class _Slice(io.RawIOBase):
    """A part of a file, as a file."""

    def __init__(self, stream: io.BufferedReader, start: int, length: int) -> None:
        self._stream, self._start, self._length, self._at = stream, start, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._length}[whence]
        self._at = base + offset
        return self._at

    def readinto(self, buffer: Any) -> int:
        wanted = max(min(len(buffer), self._length - self._at), 0)
        self._stream.seek(self._start + self._at)
        content = self._stream.readinto(memoryview(buffer)[:wanted])
        self._at += content
        return content


def _joined(
    parts: list[tuple[tuple[int, ...], Tensor]], shape: tuple[int, ...], dtype: torch.dtype
) -> Tensor:
    if len(parts) == 1:
        return parts[0][1]
    full = torch.empty(shape, dtype=dtype)
    for offset, part in parts:
        target = full
        for dim, (start, length) in enumerate(zip(offset, part.shape, strict=True)):
            target = target.narrow(dim, start, length)
        target.copy_(part)
    return full


def _fits(found: tuple[int, ...], wanted: tuple[int, ...], *, more_rows: bool) -> bool:
    if more_rows:
        return found[0] >= wanted[0] and found[1:] == wanted[1:]
    return found == wanted


def _verify_small_files(folder: Path, manifest: Manifest) -> None:
    small = [name for name in manifest.files if not name.endswith(".distcp")]
    for name, found in hash_files(folder, small).items():
        if found != manifest.files[name].sha256:
            raise CheckpointError(
                f"{folder / name} has another SHA-256 than when it was saved: it is damaged or was "
                "edited."
            )


def _refuse_other_kinds(folder: Path) -> None:
    if not folder.is_dir():
        raise ConversionError(f"{folder} is no folder: give a checkpoint, such as step_00000100.")
    if (folder / MARKER).exists():
        return
    legacy = folder.resolve().name.startswith("mp_rank_")
    if legacy or any(folder.glob("mp_rank_*")) or any(folder.glob("*/mp_rank_*")):
        raise ConversionError(
            f"{folder} is a legacy Megatron-LM checkpoint (mp_rank_* folders: pickled, and cut for "
            "one layout). It is not read. Load it in Megatron-LM with --use-checkpoint-args and "
            "save it with --ckpt-convert-format torch_dist, or take the Hugging Face original."
        )
    inside = sorted(path.parent.name for path in folder.glob(f"*/{MARKER}"))
    if inside:
        raise ConversionError(
            f"{folder} holds checkpoints and is none itself: give one of them, such as "
            f"{folder / inside[-1]}."
        )
    if (folder / ".metadata").exists():
        raise ConversionError(
            f"{folder} is a distributed checkpoint without a {MARKER}: either saving it was "
            "interrupted, or another program wrote it. Only complete checkpoints of this trainer "
            "are converted."
        )
