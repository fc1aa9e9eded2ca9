"""The policy as a Hugging Face model folder."""

from __future__ import annotations

import json
import os
import secrets
import shutil
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import safetensors.torch
import torch
import torch.distributed as dist
from torch import Tensor

from dynamo_megatron.checkpoint.errors import CheckpointError, together
from dynamo_megatron.checkpoint.manifest import sync_folder, write_file
from dynamo_megatron.checkpoint.parts import TrainedPolicy
from dynamo_megatron.hf.architecture import Architecture
from dynamo_megatron.hf.mapping import parameter_table
from dynamo_megatron.hf.reader import INDEX_NAME
from dynamo_megatron.parallel.broadcast import broadcast_bytes

SHARD_BYTES = 5 << 30
"""A file of weights is closed when it has reached this size; transformers' own limit too."""

COPIED_FILES = (
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "tokenizer.model",
    "spiece.model",
)
"""Files that go along as they are; ``additional_chat_templates/*.jinja`` too."""


def export_hf(
    policy: TrainedPolicy,
    tokenizer_source_dir: Path,
    out: Path,
    *,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write the policy as a Hugging Face model folder. Collective: all ranks call it together.

    Weights are safetensors in the policy's dtype, named as the source model names them, each
    exactly once. ``config.json`` is the source's with ``dtype`` set; tokenizer, chat template and
    generation settings are copied byte for byte. Rank 0 writes, into a temporary folder that
    becomes ``out`` when it is complete; no more than ``shard_bytes`` and one tensor of weights are
    in its memory.

    Args:
        policy: what is exported.
        tokenizer_source_dir: the model folder that the run started from.
        out: the new folder; must not exist, or be empty.
        shard_bytes: size from which a new file of weights is begun.

    Raises:
        CheckpointError: ``out`` has files in it, the source has no config.json, a tensor is
            missing or came twice, or writing failed. The same on every rank; ``out`` is then as it
            was.

    Collectives: those of ``policy.weights()``, and on all ranks 3 MAX and 2 broadcasts.
    """
    group = policy.topology.world_group
    zero = dist.get_global_rank(group, 0)
    first = policy.topology.rank == zero
    token = broadcast_bytes(secrets.token_hex(4).encode(), src=zero, group=group).decode()
    partial = out.with_name(f"{out.name}.tmp-{token}")
    doing = f"exporting the policy to {out}"
    try:
        with together(doing, group):
            if first:
                _prepare(tokenizer_source_dir, out, partial)
        failure = None
        writer = _ShardWriter(partial, shard_bytes) if first else None
        for name, tensor in policy.weights():
            # Every rank must exhaust the stream, so a failed write is kept for afterwards.
            if writer is not None and failure is None:
                failure = _attempt(writer, name, tensor)
        with together(doing, group):
            if failure is not None:
                raise failure
            if writer is not None:
                writer.close(expected=_expected_names(policy.arch))
                dtype = next(policy.module.parameters()).dtype
                _write_other_files(tokenizer_source_dir, partial, dtype)
                partial.rename(out)
                sync_folder(out.parent)
    except CheckpointError:
        if first:
            shutil.rmtree(partial, ignore_errors=True)
        raise


def _prepare(source: Path, out: Path, partial: Path) -> None:
    if not (source / "config.json").is_file():
        raise CheckpointError(
            f"{source} has no config.json: the export needs the folder of the model that the run "
            "started from, for its configuration and tokenizer."
        )
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise CheckpointError(
            f"{out} exists and is not an empty folder: an export there would mix two models. "
            "Choose another folder, or delete it first."
        )
    for leftover in out.parent.glob(f"{out.name}.tmp-????????"):
        shutil.rmtree(leftover)
    partial.mkdir(parents=True)


def _attempt(writer: _ShardWriter, name: str, tensor: Tensor) -> Exception | None:
    try:
        writer.add(name, tensor)
    except Exception as error:  # reported to all ranks once the stream is exhausted
        return error
    return None


def _expected_names(arch: Architecture) -> list[str]:
    return [name for entry in parameter_table(arch) for name in entry.hf]


class _ShardWriter:
    """Collects tensors and writes them in files of about equal size, plus an index if several."""

    def __init__(self, folder: Path, shard_bytes: int) -> None:
        self._folder, self._limit = folder, shard_bytes
        self._pending: dict[str, Tensor] = {}
        self._pending_bytes = self._total_bytes = 0
        self._names: list[str] = []
        self._files: list[tuple[Path, list[str]]] = []

    def add(self, name: str, tensor: Tensor) -> None:
        size = tensor.numel() * tensor.element_size()
        if self._pending and self._pending_bytes + size > self._limit:
            self._flush()
        # A copy where it is already on the CPU: the next one may be received into its memory.
        self._pending[name] = tensor.detach().to("cpu", copy=True).contiguous()
        self._pending_bytes += size
        self._total_bytes += size
        self._names.append(name)

    def close(self, *, expected: Iterable[str]) -> None:
        """Write the rest, give the files their names, and compare what was written."""
        written, wanted = Counter(self._names), Counter(expected)
        if written != wanted:
            raise CheckpointError(
                f"the weights stream lacks {sorted((wanted - written).elements())} and has too "
                f"often or beyond the table {sorted((written - wanted).elements())}: "
                "hf.mapping.parameter_table and the model disagree. Nothing was exported."
            )
        self._flush()
        if len(self._files) == 1:
            self._files[0][0].rename(self._folder / "model.safetensors")
            return
        weight_map = {}
        for number, (path, names) in enumerate(self._files, start=1):
            final = f"model-{number:05d}-of-{len(self._files):05d}.safetensors"
            path.rename(self._folder / final)
            weight_map |= dict.fromkeys(names, final)
        index = {"metadata": {"total_size": self._total_bytes}, "weight_map": weight_map}
        write_file(self._folder / INDEX_NAME, _json(index))

    def _flush(self) -> None:
        path = self._folder / f"part-{len(self._files):05d}.safetensors"
        # transformers refuses a file whose metadata does not name the framework.
        safetensors.torch.save_file(self._pending, path, metadata={"format": "pt"})
        _sync_file(path)
        self._files.append((path, list(self._pending)))
        self._pending, self._pending_bytes = {}, 0


def _write_other_files(source: Path, folder: Path, dtype: torch.dtype) -> None:
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    # transformers 5 writes "dtype", 4 wrote "torch_dtype"; whichever is there is kept.
    keys = [key for key in ("dtype", "torch_dtype") if key in config] or ["dtype"]
    config.update(dict.fromkeys(keys, str(dtype).removeprefix("torch.")))
    write_file(folder / "config.json", _json(config))
    templates = source.glob("additional_chat_templates/*.jinja")
    for path in [*(source / name for name in COPIED_FILES), *templates]:
        if path.is_file():
            write_file(folder / path.relative_to(source), path.read_bytes())
    sync_folder(folder)


def _json(value: object) -> bytes:
    return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode()


def _sync_file(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
