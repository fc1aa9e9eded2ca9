"""Writes safetensors files tensor by tensor: no more than the tensor at hand is in memory."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import torch
from torch import Tensor

from dynamo_megatron.hf.reader import INDEX_NAME, WeightsError

SHARD_BYTES = 5 << 30
"""A file of weights is no larger, unless one tensor is; transformers' own limit too."""

_DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a tensor goes."""

    file: str
    offset: int
    shape: tuple[int, ...]


class SafetensorsWriter:
    """One model in files of about equal size, with an index if there are several.

    The files are laid out when the writer is made, from the shapes alone, so tensors may come in
    any order and are on their way to the disk as soon as they come.

    Args:
        folder: exists, and is empty.
        shapes: of every tensor of the model, by name, in the order in which files hold them.
        dtype: what tensors are converted to.
        shard_bytes: size from which a new file is begun.
    """

    def __init__(
        self,
        folder: Path,
        shapes: Mapping[str, tuple[int, ...]],
        *,
        dtype: torch.dtype,
        shard_bytes: int = SHARD_BYTES,
    ) -> None:
        self.dtype = dtype
        self._folder = folder
        self._places: dict[str, _Place] = {}
        self._added: Counter[str] = Counter()
        self._descriptors: dict[str, int] = {}
        shards = _shards(shapes, dtype.itemsize, shard_bytes)
        for number, names in enumerate(shards, start=1):
            file = "model.safetensors"
            if len(shards) > 1:
                file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
            self._begin(file, {name: shapes[name] for name in names})

    def _begin(self, file: str, shapes: Mapping[str, tuple[int, ...]]) -> None:
        # transformers refuses a file whose metadata does not name the framework.
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        end = 0
        for name, shape in shapes.items():
            begin, end = end, end + _num_bytes(shape, self.dtype.itemsize)
            header[name] = {
                "dtype": _DTYPES[self.dtype],
                "shape": list(shape),
                "data_offsets": [begin, end],
            }
            self._places[name] = _Place(file, begin, shape)
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        start = len(text) + 8
        for name, shape in shapes.items():
            self._places[name] = _Place(file, start + self._places[name].offset, shape)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        self._descriptors[file] = os.open(self._folder / file, flags, 0o644)
        _write_at(self._descriptors[file], memoryview(len(text).to_bytes(8, "little") + text), 0)

    def add(self, name: str, tensor: Tensor) -> None:
        """Write one tensor. Unknown and repeated ones are only counted: ``close`` names them.

        Raises:
            WeightsError: it has another shape than planned.
            OSError: it cannot be written.
        """
        self._added[name] += 1
        place = self._places.get(name)
        if place is None or self._added[name] > 1:
            return
        if tuple(tensor.shape) != place.shape:
            raise WeightsError(
                f"{name} has the shape {tuple(tensor.shape)} and config.json gives {place.shape}: "
                "weights and configuration are of different models."
            )
        stored = tensor.detach().to("cpu", self.dtype).contiguous()
        content = stored.flatten().view(torch.uint8).numpy().data
        _write_at(self._descriptors[place.file], content, place.offset)

    def close(self) -> None:
        """Wait until everything is on disk, and write the index.

        Raises:
            WeightsError: a tensor of the model was not added, was added twice, or is none of it.
        """
        wanted = Counter(dict.fromkeys(self._places, 1))
        if self._added != wanted:
            raise WeightsError(
                f"the weights stream lacks {sorted((wanted - self._added).elements())} and has too "
                f"often or beyond the table {sorted((self._added - wanted).elements())}: "
                "hf.mapping.parameter_table and the model disagree. Nothing was exported."
            )
        for descriptor in self._descriptors.values():
            os.fsync(descriptor)
        if len(self._descriptors) > 1:
            self._write_index()
        self.release()

    def _write_index(self) -> None:
        sizes = [_num_bytes(place.shape, self.dtype.itemsize) for place in self._places.values()]
        index = {
            "metadata": {"total_size": sum(sizes)},
            "weight_map": {name: place.file for name, place in self._places.items()},
        }
        with (self._folder / INDEX_NAME).open("w", encoding="utf-8") as stream:
            json.dump(index, stream, indent=2)
            stream.write("\n")
            stream.flush()
            os.fsync(stream.fileno())

    def release(self) -> None:
        """Close the files; what was not synced stays as it is."""
        while self._descriptors:
            os.close(self._descriptors.popitem()[1])

    def __enter__(self) -> SafetensorsWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()


def _shards(
    shapes: Mapping[str, tuple[int, ...]], itemsize: int, shard_bytes: int
) -> list[list[str]]:
    """Names of each file's tensors."""
    shards: list[list[str]] = [[]]
    filled = 0
    for name, shape in shapes.items():
        size = _num_bytes(shape, itemsize)
        if shards[-1] and filled + size > shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += size
    return shards


def _num_bytes(shape: tuple[int, ...], itemsize: int) -> int:
    size = itemsize
    for length in shape:
        size *= length
    return size


def _write_at(descriptor: int, content: memoryview, offset: int) -> None:
    # One call writes at most 2 GiB.
    while content:
        written = os.pwrite(descriptor, content, offset)
        content, offset = content[written:], offset + written
