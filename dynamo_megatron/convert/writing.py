"""Writes a weights-only checkpoint in Megatron-Core's ``torch_dist`` format, tensor by tensor.

Megatron-Core's own ``save`` wants the whole state dict in memory. The files are the same: each
tensor stands in a ``*.distcp`` file as ``torch.save`` writes it, and ``.metadata`` says where.
"""

from __future__ import annotations

import hashlib
import os
import pickle
import time
from collections import defaultdict
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from types import TracebackType
from typing import IO

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    STORAGE_TYPES,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from dynamo_megatron.checkpoint.errors import os_error_behind
from dynamo_megatron.checkpoint.manifest import (
    FORMAT_VERSION,
    WEIGHTS_ONLY,
    Manifest,
    model_fingerprint,
    record_files,
    write_file,
    write_manifest,
)
from dynamo_megatron.checkpoint.megatron import HF_FOLDER, STATE_FILE, copy_hf_files
from dynamo_megatron.checkpoint.shards import write_common
from dynamo_megatron.checkpoint.trusted import METADATA
from dynamo_megatron.convert.errors import ConversionError
from dynamo_megatron.hf.architecture import Architecture

FILE_BYTES = 256 << 20
"""Size from which a new file is begun, so that several ranks have files to read and to hash."""


class CheckpointWriter:
    """Adds tensors to a checkpoint; ``complete`` finishes it.

    Closed files are synced and hashed in a thread, while the next one is being written.

    Args:
        folder: exists, and is empty.
        dtype: of all tensors.
        file_bytes: size from which a new file is begun.
    """

    def __init__(self, folder: Path, *, dtype: torch.dtype, file_bytes: int = FILE_BYTES) -> None:
        self._folder, self._dtype, self._limit = folder, dtype, file_bytes
        self._chunks: dict[str, list[tuple[torch.Size, torch.Size]]] = defaultdict(list)
        self._sizes: dict[str, torch.Size] = {}
        self._storage: dict[MetadataIndex, _StorageInfo] = {}
        self._stream: IO[bytes] | None = None
        self._hashes: dict[str, Future[str]] = {}
        self._thread = ThreadPoolExecutor(max_workers=1)

    def add(
        self, key: str, tensor: Tensor, *, layer: int | None = None, num_layers: int = 0
    ) -> None:
        """Append one full tensor.

        Args:
            key: name in the checkpoint.
            tensor: a full Megatron tensor, converted to the writer's dtype.
            layer: for tensors of a decoder layer, which share a key.
            num_layers: likewise.

        Raises:
            ConversionError: it has been added before.
            OSError: it cannot be written.
        """
        stored = tensor.detach().to(self._dtype).contiguous()
        if stored.untyped_storage().nbytes() != stored.numel() * stored.element_size():
            stored = stored.clone()  # torch.save writes whole storages
        offset, size = [0] * stored.dim(), stored.shape
        if layer is not None:
            stored, offset, size = stored[None], [layer, *offset], (num_layers, *size)
        index = MetadataIndex(key, torch.Size(offset), len(self._chunks[key]))
        if index in self._storage:
            raise ConversionError(f"{key} (layer {layer}) is written a second time.")
        name, stream = self._file()
        begin = stream.tell()
        try:
            torch.save(stored, stream)
        except RuntimeError as failure:
            raise os_error_behind(failure) or failure from failure
        self._storage[index] = _StorageInfo(name, begin, stream.tell() - begin)
        self._chunks[key].append((torch.Size(offset), stored.shape))
        self._sizes[key] = torch.Size(size)

    def _file(self) -> tuple[str, IO[bytes]]:
        if self._stream is not None and self._stream.tell() >= self._limit:
            self._close_file()
        if self._stream is None:
            self._stream = (self._folder / f"__0_{len(self._hashes)}.distcp").open("wb")
        return Path(self._stream.name).name, self._stream

    def _close_file(self) -> None:
        assert self._stream is not None, "called with an open file"
        path = Path(self._stream.name)
        self._stream.close()
        self._stream = None
        self._hashes[path.name] = self._thread.submit(_sync_and_hash, path)

    def complete(self, arch: Architecture, source: Path) -> None:
        """Write everything else, the completion marker last, and wait until it is on disk.

        Args:
            arch: the model.
            source: its Hugging Face folder, whose small files go along.
        """
        if self._stream is not None:
            self._close_file()
        write_file(self._folder / METADATA, pickle.dumps(self._metadata()))
        write_common(self._folder)
        write_file(self._folder / STATE_FILE, b"{}")
        copy_hf_files(source, self._folder / HF_FOLDER)
        hashes = {name: future.result() for name, future in self._hashes.items()}
        manifest = Manifest(
            format_version=FORMAT_VERSION,
            step=0,
            saved_at=time.time(),
            megatron_core=version("megatron-core"),
            torch=torch.__version__,
            fingerprint=model_fingerprint(arch, self._dtype),
            layout={"tensor": 1, "pipeline": 1, "data": 1, "cuda": 0},
            optimizer=WEIGHTS_ONLY,
            optimizer_state=False,
            scheduler_steps=0,
            files=record_files(self._folder, hashes),
        )
        write_manifest(self._folder, manifest)

    def _metadata(self) -> Metadata:
        described: dict[str, STORAGE_TYPES] = {
            key: TensorStorageMetadata(
                properties=TensorProperties(dtype=self._dtype),
                size=self._sizes[key],
                chunks=[ChunkStorageMetadata(offset, size) for offset, size in chunks],
            )
            for key, chunks in self._chunks.items()
        }
        return Metadata(described, storage_data=self._storage, storage_meta=StorageMeta())

    def __enter__(self) -> CheckpointWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._thread.shutdown(cancel_futures=True)
        if self._stream is not None:
            # What is buffered does not matter any more.
            with suppress(OSError):
                self._stream.close()


def _sync_and_hash(path: Path) -> str:
    with path.open("rb") as stream:
        os.fsync(stream.fileno())
        return hashlib.file_digest(stream, "sha256").hexdigest()
