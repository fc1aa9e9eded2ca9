"""The two conversions, each followed by its check before the result appears."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from dynamo_megatron.checkpoint.export import write_companions
from dynamo_megatron.checkpoint.manifest import different_keys
from dynamo_megatron.checkpoint.megatron import HF_FOLDER
from dynamo_megatron.convert.errors import ConversionError
from dynamo_megatron.convert.folder import new_folder
from dynamo_megatron.convert.reading import CheckpointWeights
from dynamo_megatron.convert.self_check import CheckReport, check_pair, require_hf
from dynamo_megatron.convert.writing import CheckpointWriter
from dynamo_megatron.hf.architecture import Architecture, padded_vocab_size, read_architecture
from dynamo_megatron.hf.files import check_tokenizer
from dynamo_megatron.hf.mapping import (
    Kind,
    checkpoint_key,
    fuse,
    hf_shapes,
    parameter_table,
    unfuse,
)
from dynamo_megatron.hf.reader import SafetensorsReader
from dynamo_megatron.hf.writer import SHARD_BYTES, SafetensorsWriter

logger = logging.getLogger(__name__)

_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
# Of one tensor-parallel rank; other layouts make their own padding rows when they load.
_VOCAB_MULTIPLE = 128

Progress = Callable[[Iterable], Iterator]


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversion:
    """A conversion that passed its check.

    Attributes:
        out: the new folder.
        num_bytes: of its weights.
        seconds: for reading and writing, until everything was on disk.
        check_seconds: for the check.
        check: what it found.
    """

    out: Path
    num_bytes: int
    seconds: float
    check_seconds: float
    check: CheckReport


def to_hf(
    checkpoint: Path,
    out: Path,
    *,
    source: Path | None = None,
    dtype: torch.dtype | None = None,
    shard_bytes: int = SHARD_BYTES,
    progress: Progress = iter,
) -> Conversion:
    """Convert a distributed checkpoint, saved at any layout, to a Hugging Face folder.

    Args:
        checkpoint: a complete checkpoint; it is not changed.
        out: new folder; must not exist, or be empty. It appears when its check has passed.
        source: Hugging Face folder with configuration and tokenizer; that in the checkpoint by
            default.
        dtype: of the weights; the checkpoint's by default.
        shard_bytes: size from which a new file of weights is begun.
        progress: wraps iterations.

    Raises:
        ValueError: the checkpoint cannot be converted or the result failed its check.
        CheckpointError: it is incomplete or damaged, or ``out`` has files in it.
        OSError: writing failed.
    """
    weights = CheckpointWeights(checkpoint)
    source, arch = _source_of(weights, source)
    check_tokenizer(source, arch)
    dtype = dtype or weights.dtype
    num_bytes = _num_bytes(arch, dtype)
    with new_folder(out, num_bytes=num_bytes) as partial:
        started = time.perf_counter()
        shapes = hf_shapes(arch)
        with SafetensorsWriter(partial, shapes, dtype=dtype, shard_bytes=shard_bytes) as writer:
            for entry in progress(list(parameter_table(arch))):
                parts = unfuse(entry.kind, weights.tensor(entry), arch)
                for name, part in zip(entry.hf, parts, strict=True):
                    writer.add(name, part)
            writer.close()
        write_companions(source, partial, dtype)
        written = time.perf_counter()
        check = check_pair(partial, weights, arch, written="hf", progress=progress)
        checked = time.perf_counter()
    weights.close()
    return Conversion(
        out=out,
        num_bytes=num_bytes,
        seconds=written - started,
        check_seconds=checked - written,
        check=check,
    )


def to_megatron(
    model_dir: Path, out: Path, *, dtype: torch.dtype | None = None, progress: Progress = iter
) -> Conversion:
    """Convert a Hugging Face folder to a weights-only distributed checkpoint.

    It loads at any layout: as ``model.weights`` of a run.

    Args:
        model_dir: Hugging Face folder; it is not changed.
        out: new folder; must not exist, or be empty. It appears when its check has passed.
        dtype: of the weights; the folder's by default.
        progress: wraps iterations.

    Raises:
        ValueError: the folder cannot be converted or the result failed its check.
        CheckpointError: ``out`` has files in it.
        OSError: writing failed.
    """
    arch = read_architecture(model_dir)
    check_tokenizer(model_dir, arch)
    with SafetensorsReader(model_dir) as reader:
        require_hf(reader, arch)
        dtype = dtype or _dtype_of(reader)
        num_bytes = _num_bytes(arch, dtype)
        with new_folder(out, num_bytes=num_bytes) as partial:
            started = time.perf_counter()
            with CheckpointWriter(partial, dtype=dtype) as writer:
                _stream_to_megatron(reader, writer, arch, progress)
                writer.complete(arch, model_dir)
            written = time.perf_counter()
            weights = CheckpointWeights(partial)
            check = check_pair(model_dir, weights, arch, written="megatron", progress=progress)
            weights.close()
            checked = time.perf_counter()
    return Conversion(
        out=out,
        num_bytes=num_bytes,
        seconds=written - started,
        check_seconds=checked - written,
        check=check,
    )


def _stream_to_megatron(
    reader: SafetensorsReader, writer: CheckpointWriter, arch: Architecture, progress: Progress
) -> None:
    rows = padded_vocab_size(arch.vocab_size, multiple=_VOCAB_MULTIPLE, tensor_parallel=1)
    for entry in progress(list(parameter_table(arch))):
        full = fuse(entry.kind, [reader.tensor(name) for name in entry.hf], arch)
        if entry.kind is Kind.VOCAB:
            full = _padded(full, rows)
        writer.add(checkpoint_key(entry), full, layer=entry.layer, num_layers=arch.num_layers)
        del full
        reader.forget()


def _padded(table: Tensor, rows: int) -> Tensor:
    padded = table.new_zeros(rows, *table.shape[1:])
    padded[: table.shape[0]] = table
    return padded


def check(
    checkpoint: Path,
    model_dir: Path,
    *,
    written: str,
    source: Path | None = None,
    progress: Progress = iter,
) -> CheckReport:
    """Compare an existing pair (see ``self_check.check_pair``).

    Raises:
        ValueError, CheckpointError: they are not the same model, or one cannot be read.
    """
    weights = CheckpointWeights(checkpoint)
    arch = read_architecture(model_dir)
    _require_architecture(weights, arch, model_dir)
    if source is not None:
        _require_architecture(weights, read_architecture(source), source)
    check_tokenizer(model_dir, arch)
    direction = "hf" if written == "hf" else "megatron"
    report = check_pair(model_dir, weights, arch, written=direction, progress=progress)
    weights.close()
    return report


def _source_of(weights: CheckpointWeights, source: Path | None) -> tuple[Path, Architecture]:
    inside = weights.folder / HF_FOLDER
    if source is None and not inside.is_dir():
        raise ConversionError(
            f"{weights.folder} does not hold its model's configuration and tokenizer (an older "
            "version saved it). Name the Hugging Face folder that the run started from: --source "
            "DIR."
        )
    source = source or inside
    arch = read_architecture(source)
    _require_architecture(weights, arch, source)
    weights.require(arch)
    return source, arch


def _require_architecture(weights: CheckpointWeights, arch: Architecture, source: Path) -> None:
    saved = weights.manifest.fingerprint.get("architecture", {})
    if differences := different_keys(saved, asdict(arch)):
        raise ConversionError(
            f"{source}/config.json describes another model than {weights.folder} was saved from. "
            f"{'; '.join(differences)}. Name the folder that the run started from."
        )


def _dtype_of(reader: SafetensorsReader) -> torch.dtype:
    found = sorted({reader.dtype(name) for name in reader.names()})
    if len(found) != 1 or found[0] not in _DTYPES:
        raise ConversionError(
            f"{reader.model_dir} has weights of the dtypes {', '.join(found)}; a checkpoint has "
            "one, and conversion is exact only where it is the same. Choose one: --dtype bfloat16."
        )
    return _DTYPES[found[0]]


def _num_bytes(arch: Architecture, dtype: torch.dtype) -> int:
    return sum(torch.Size(shape).numel() for shape in hf_shapes(arch).values()) * dtype.itemsize
