"""The policy as a Hugging Face model folder."""

from __future__ import annotations

import hashlib
import json
import logging
import secrets
import shutil
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from dynamo_megatron.checkpoint.errors import CheckpointError, together
from dynamo_megatron.checkpoint.manifest import MARKER, sync_folder, write_file
from dynamo_megatron.checkpoint.parts import TrainedPolicy
from dynamo_megatron.hf.files import CONFIG, companion_files, config_with_dtype
from dynamo_megatron.hf.mapping import hf_shapes
from dynamo_megatron.hf.reader import WeightsError
from dynamo_megatron.hf.writer import SHARD_BYTES, SafetensorsWriter
from dynamo_megatron.parallel.broadcast import broadcast_bytes
from dynamo_megatron.parallel.reduce import any_rank

logger = logging.getLogger(__name__)

STAMP = "exported_from.json"
"""Beside the weights: the checkpoint that they are of."""


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
    becomes ``out`` when it is complete; no more than one tensor is in its memory.

    Args:
        policy: what is exported.
        tokenizer_source_dir: the model folder that the run started from.
        out: the new folder; must not exist, or be empty.
        shard_bytes: size from which a new file of weights is begun.

    Raises:
        CheckpointError: ``out`` has files in it, the source has no config.json, a tensor is
            missing or came twice, or writing failed. The same on every rank; ``out`` is then as it
            was.

    Collectives: those of ``policy.weights()``, and on all ranks 2 MAX and 2 broadcasts.
    """
    group = policy.topology.world_group
    zero = dist.get_global_rank(group, 0)
    first = policy.topology.rank == zero
    token = broadcast_bytes(secrets.token_hex(4).encode(), src=zero, group=group).decode()
    partial = out.with_name(f"{out.name}.tmp-{token}")
    doing = f"exporting the policy to {out}"
    failure = writer = None
    try:
        with together(doing, group):
            if first:
                _require_config(tokenizer_source_dir)
                prepare_folder(out, partial)
                dtype = next(policy.module.parameters()).dtype
                shapes = hf_shapes(policy.arch)
                writer = SafetensorsWriter(partial, shapes, dtype=dtype, shard_bytes=shard_bytes)
        for name, tensor in policy.weights():
            # Every rank must exhaust the stream, so a failed write is kept for afterwards.
            if writer is not None and failure is None:
                failure = _attempt(writer, name, tensor)
        with together(doing, group):
            if failure is not None:
                raise failure
            if writer is not None:
                try:
                    writer.close()
                except WeightsError as error:
                    raise CheckpointError(str(error)) from error
                write_companions(tokenizer_source_dir, partial, writer.dtype)
                partial.rename(out)
                sync_folder(out.parent)
    except CheckpointError:
        if first:
            shutil.rmtree(partial, ignore_errors=True)
        raise
    finally:
        if writer is not None:
            writer.release()


def _require_config(source: Path) -> None:
    if not (source / CONFIG).is_file():
        raise CheckpointError(
            f"{source} has no config.json: the export needs the folder of the model that the run "
            "started from, for its configuration and tokenizer."
        )


def prepare_folder(out: Path, partial: Path) -> None:
    """Make ``partial``, which is to become ``out``, and remove what killed exports left.

    Raises:
        CheckpointError: ``out`` has files in it.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise CheckpointError(
            f"{out} exists and is not an empty folder: an export there would mix two models. "
            "Choose another folder, or delete it first."
        )
    for leftover in out.parent.glob(f"{out.name}.tmp-????????"):
        shutil.rmtree(leftover)
    partial.mkdir(parents=True)


def _attempt(writer: SafetensorsWriter, name: str, tensor: Tensor) -> Exception | None:
    try:
        writer.add(name, tensor)
    except Exception as error:  # reported to all ranks once the stream is exhausted
        return error
    return None


def write_companions(source: Path, folder: Path, dtype: torch.dtype) -> None:
    """Write configuration, tokenizer, chat template and generation settings.

    Args:
        source: a Hugging Face model folder (its weights are not looked at).
        folder: exists; receives the files.
        dtype: what ``config.json`` is to say.
    """
    config = config_with_dtype(source, str(dtype).removeprefix("torch."))
    write_file(folder / CONFIG, config)
    for name in companion_files(source):
        write_file(folder / name, (source / name).read_bytes())
    sync_folder(folder)


def export_once(
    policy: TrainedPolicy, tokenizer_source_dir: Path, out: Path, *, source: Path | None
) -> None:
    """``export_hf``, unless ``out`` is the export of this very checkpoint. Collective.

    An export of anything else, left by an earlier run, is renamed; nothing is deleted.

    Args:
        policy: what is exported.
        tokenizer_source_dir: the model folder that the run started from.
        out: the new folder.
        source: the checkpoint that holds the policy as it is; None exports in any case.

    Raises:
        CheckpointError: as ``export_hf``, or an old export could not be renamed.
    """
    group = policy.topology.world_group
    first = policy.topology.rank == dist.get_global_rank(group, 0)
    stamp = _stamp(source) if first and source is not None else None
    current = first and stamp is not None and _read_stamp(out) == stamp
    if any_rank(current, group=group):
        return
    with together(f"setting an earlier {out} aside", group):
        if first and out.exists():
            aside = out.with_name(f"{out.name}.old-{secrets.token_hex(4)}")
            out.rename(aside)
            logger.warning("%s is of another run and is now %s", out, aside)
    export_hf(policy, tokenizer_source_dir, out)
    with together(f"marking {out}", group):
        if first and stamp is not None:
            write_file(out / STAMP, stamp.encode())


def _stamp(checkpoint: Path) -> str:
    """Says which checkpoint an export is of: its marker holds the digests of all its files."""
    digest = hashlib.sha256((checkpoint / MARKER).read_bytes()).hexdigest()
    return json.dumps({"checkpoint": checkpoint.name, "sha256": digest})


def _read_stamp(export: Path) -> str | None:
    try:
        return (export / STAMP).read_text(encoding="utf-8")
    except OSError:
        return None
