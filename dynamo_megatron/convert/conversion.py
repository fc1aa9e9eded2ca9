"""The two conversions, each followed by its check before the result appears."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from dynamo_megatron.checkpoint.export import write_companions
from dynamo_megatron.checkpoint.manifest import MARKER, different_keys
from dynamo_megatron.checkpoint.megatron import HF_FOLDER
from dynamo_megatron.convert.companions import check_written_hf, check_written_megatron
from dynamo_megatron.convert.dtypes import dtype_to_write
from dynamo_megatron.convert.errors import ConversionError
from dynamo_megatron.convert.folder import new_folder, require_new
from dynamo_megatron.convert.probe import one_layer_config
from dynamo_megatron.convert.reading import CheckpointWeights
from dynamo_megatron.convert.self_check import CheckReport, check_pair, require_hf
from dynamo_megatron.convert.writing import CheckpointWriter
from dynamo_megatron.hf.architecture import Architecture, padded_vocab_size, read_architecture
from dynamo_megatron.hf.files import CONFIG, check_companions, companion_files, has_tokenizer
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
    require_new(out, checkpoint, *([source] if source else []))
    source, arch = _source_of(weights, source)
    _require_usable(source, arch)
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
        check_written_hf(partial, source, dtype)
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
    if (model_dir / MARKER).is_file():
        raise ConversionError(
            f"{model_dir} is a checkpoint already: to-hf makes a Hugging Face folder of it."
        )
    arch = read_architecture(model_dir)
    require_new(out, model_dir)
    _require_usable(model_dir, arch)
    with SafetensorsReader(model_dir) as reader:
        require_hf(reader, arch)
        dtype = dtype_to_write(reader, dtype)
        num_bytes = _num_bytes(arch, dtype)
        with new_folder(out, num_bytes=num_bytes) as partial:
            started = time.perf_counter()
            with CheckpointWriter(partial, dtype=dtype) as writer:
                _stream_to_megatron(reader, writer, arch, progress)
                writer.complete(arch, model_dir)
            written = time.perf_counter()
            weights = CheckpointWeights(partial)
            check_written_megatron(weights, model_dir, dtype)
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
    written: Literal["hf", "megatron"],
    source: Path | None = None,
    dtype: torch.dtype | None = None,
    progress: Progress = iter,
) -> CheckReport:
    """Compare an existing pair: tensors and logits, and what stands beside them.

    Args:
        checkpoint: one of the pair.
        model_dir: the other.
        written: which of the two came out of a conversion.
        source: where a written folder's configuration and tokenizer came from; the checkpoint's
            own by default.
        dtype: what the written weights must have, if it matters.
        progress: wraps iterations.

    Raises:
        ValueError, CheckpointError: they are not the same model, what was written is not what a
            conversion writes, or one cannot be read.
    """
    weights = CheckpointWeights(checkpoint)
    arch = read_architecture(model_dir)
    _require_architecture(weights, arch, model_dir)
    if written == "hf":
        source, _ = _source_of(weights, source)
        check_written_hf(model_dir, source, dtype)
    else:
        check_written_megatron(weights, model_dir, dtype)
    _require_usable(model_dir, arch)
    report = check_pair(model_dir, weights, arch, written=written, progress=progress)
    weights.close()
    return report


def _require_usable(source: Path, arch: Architecture) -> None:
    """Refuse, before any work, what would fail the check or not load in transformers."""
    check_companions(source, arch)
    one_layer_config(source)
    if not has_tokenizer(source):
        logger.warning(
            "%s has no tokenizer: the result has none either, and cannot be trained or sampled "
            "from until one is put into it.",
            source,
        )


def _source_of(weights: CheckpointWeights, source: Path | None) -> tuple[Path, Architecture]:
    inside = weights.folder / HF_FOLDER
    if source is None and not inside.is_dir():
        raise ConversionError(
            f"{weights.folder} does not hold its model's configuration and tokenizer (an older "
            "version saved it). Name the Hugging Face folder that the run started from: --source "
            "DIR."
        )
    if source is None:
        names = [f"{HF_FOLDER}/{name}" for name in (CONFIG, *companion_files(inside))]
        if strangers := sorted(set(names) - weights.manifest.files.keys()):
            raise ConversionError(
                f"{weights.folder} was saved without {', '.join(strangers)}: it was changed. "
                "Delete what was added, or name a folder with what you want: --source DIR."
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


def _num_bytes(arch: Architecture, dtype: torch.dtype) -> int:
    return sum(torch.Size(shape).numel() for shape in hf_shapes(arch).values()) * dtype.itemsize
