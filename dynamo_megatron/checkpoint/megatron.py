"""``MegatronCheckpointer``: the whole run to disk and back, at any layout.

A checkpoint is a folder ``step_00000012``::

    *.distcp, .metadata, common.pt, metadata.json   Megatron-Core's torch_dist format
    rng/rank_00000.safetensors                      random states of each rank
    trainer.json                                    the trainer's own state
    rollouts.safetensors                            those sampled ahead, where there are any
    config.yaml                                     the resolved configuration, for people
    hf/                                             config.json, tokenizer, chat template
    complete.json                                   the completion marker, written last

It grows under ``step_00000012.tmp-<hex>``, and is renamed when the marker is on disk.
"""

from __future__ import annotations

import json
import logging
import secrets
import shutil
import time
from collections.abc import Callable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
import torch.distributed as dist

from dynamo_megatron.checkpoint.errors import CheckpointError, together
from dynamo_megatron.checkpoint.folders import (
    fallback_advice,
    final_name,
    newest_complete,
    prune,
    publish,
    temporary_name,
)
from dynamo_megatron.checkpoint.manifest import (
    FORMAT_VERSION,
    MARKER,
    WEIGHTS_ONLY,
    FileRecord,
    Manifest,
    decode_manifest,
    different_keys,
    encode_manifest,
    hash_files,
    read_manifest,
    record_files,
    tell_other_version,
    verify_hashes,
    verify_sizes,
    write_file,
    write_manifest,
)
from dynamo_megatron.checkpoint.optimizer_state import (
    clear_optimizer,
    has_state,
    optimizer_kind,
    set_schedule,
)
from dynamo_megatron.checkpoint.parts import TrainedPolicy
from dynamo_megatron.checkpoint.random_state import (
    capture_random_state,
    reseed_from,
    restore_random_state,
)
from dynamo_megatron.checkpoint.shards import read_shards, write_shards
from dynamo_megatron.checkpoint.trainer_state import encode_state
from dynamo_megatron.checkpoint.trusted import read_common, read_index
from dynamo_megatron.hf.files import CONFIG, companion_files
from dynamo_megatron.parallel.broadcast import broadcast_bytes, gather_bytes
from dynamo_megatron.parallel.reduce import any_rank

logger = logging.getLogger(__name__)

STATE_FILE, CONFIG_FILE, HF_FOLDER = "trainer.json", "config.yaml", "hf"
ROLLOUTS_FILE = "rollouts.safetensors"


class MegatronCheckpointer:
    """Saves and restores the whole run. Every method is collective: all ranks call it together.

    Args:
        directory: holds the checkpoints; on a file system that all ranks share.
        policy: what is saved and restored.
        keep: complete checkpoints that stay, the newest.
        fingerprint: the model in JSON-able values (architecture, dtype); a checkpoint of another
            one is refused.
        hf_source: Hugging Face folder that the run started from; its small files go along, so that
            a checkpoint can be converted on its own.
    """

    def __init__(
        self,
        directory: Path,
        policy: TrainedPolicy,
        *,
        keep: int,
        fingerprint: Mapping[str, Any],
        hf_source: Path | None = None,
    ) -> None:
        if keep < 1:
            raise ValueError(f"keep={keep}: at least the checkpoint just written must stay.")
        self.directory = directory
        self.policy = policy
        self.keep = keep
        # As it will be read back, so that tuples compare equal to lists.
        self.fingerprint: Mapping[str, Any] = json.loads(json.dumps(fingerprint))
        self._hf_source = hf_source
        self._group = policy.topology.world_group
        self._zero = dist.get_global_rank(self._group, 0)
        self._first = policy.topology.rank == self._zero

    def save(
        self,
        step: int,
        state: Mapping[str, Any],
        resolved_config: str | None = None,
        *,
        rollouts: Callable[[], bytes] | None = None,
    ) -> Path:
        """Write a checkpoint; the completion marker comes last, then older ones are removed.

        Args:
            step: training steps done.
            state: the trainer's own state: JSON values with text keys. Floats come back exactly,
                tuples as lists. Rank 0's is written.
            resolved_config: the run's configuration as YAML, kept for people.
            rollouts: gives those that were sampled ahead, encoded; called on rank 0, when there is
                a folder to write them to. ``load_rollouts`` returns them.

        Returns:
            The checkpoint's folder.

        Raises:
            CheckpointError: a rank could not write. The same on every rank; older checkpoints are
                as they were, and the unfinished folder is removed as far as possible.
            ValueError: ``state`` is not JSON.
        """
        trainer = encode_state(state)
        token = broadcast_bytes(secrets.token_hex(4).encode(), src=self._zero, group=self._group)
        folder = self.directory / temporary_name(step, token.decode())
        final = self.directory / final_name(step)
        try:
            self._write(folder, step, trainer, resolved_config, rollouts)
            with together(f"completing {final}", self._group):
                if self._first:
                    publish(folder, final)
                    prune(self.directory, keep=self.keep, written=final)
        except CheckpointError:
            if self._first and not (folder / MARKER).exists():
                shutil.rmtree(folder, ignore_errors=True)
            raise
        return final

    def _write(
        self,
        folder: Path,
        step: int,
        trainer: bytes,
        config: str | None,
        rollouts: Callable[[], bytes] | None,
    ) -> None:
        doing = f"writing {folder}"
        rank = self.policy.topology.rank
        with together(doing, self._group):
            if self._first:
                folder.mkdir(parents=True)
        with_optimizer = self._optimizer_has_state()
        write_shards(self.policy, folder, with_optimizer=with_optimizer)
        hashes: dict[str, str] = {}
        with together(doing, self._group):
            # By the rank that wrote it, while the file is still in its memory.
            own = folder.glob(f"__{rank}_*.distcp")
            hashes = hash_files(folder, sorted(path.name for path in own))
            random_state = safetensors.torch.save(capture_random_state())
            write_file(folder / _random_file(rank), random_state)
            if self._first:
                write_file(folder / STATE_FILE, trainer)
                if config is not None:
                    write_file(folder / CONFIG_FILE, config.encode())
                if rollouts is not None:
                    write_file(folder / ROLLOUTS_FILE, rollouts())
                if self._hf_source is not None:
                    copy_hf_files(self._hf_source, folder / HF_FOLDER)
        gathered = gather_bytes(json.dumps(hashes).encode(), group=self._group)
        with together(doing, self._group):
            if self._first:
                for part in gathered:
                    hashes |= json.loads(part)
                records = record_files(folder, hashes)
                write_manifest(folder, self._manifest(folder, step, records, with_optimizer))

    def _optimizer_has_state(self) -> bool:
        optimizer, scheduler = self.policy.optimizer, self.policy.scheduler
        if any_rank(has_state(optimizer), group=self._group):
            return True
        reduced = next(self.policy.module.parameters()).dtype is not torch.float32
        if reduced and scheduler.num_steps > 1:
            raise CheckpointError(
                "this optimizer keeps no state that Megatron-Core saves, so the float32 master "
                "copy of the bfloat16 weights would be lost. Use optimizer.name=adam, or "
                "model.dtype=float32."
            )
        return False

    def _manifest(
        self, folder: Path, step: int, records: Mapping[str, FileRecord], with_optimizer: bool
    ) -> Manifest:
        world = dist.get_world_size(self._group)
        written = {info.relative_path for info in read_index(folder, records).storage_data.values()}
        absent = ({_random_file(rank) for rank in range(world)} | written) - records.keys()
        if absent:
            raise CheckpointError(
                f"rank 0 does not see {sorted(absent)[:3]} in {folder}, which another rank wrote: "
                "the folder is not on a file system that all ranks share. Point run.dir to one."
            )
        return Manifest(
            format_version=FORMAT_VERSION,
            step=step,
            saved_at=time.time(),
            megatron_core=version("megatron-core"),
            torch=torch.__version__,
            fingerprint=self.fingerprint,
            layout=self._layout(),
            optimizer=optimizer_kind(self.policy.optimizer),
            optimizer_state=with_optimizer,
            scheduler_steps=self.policy.scheduler.num_steps,
            files=records,
        )

    def latest(self) -> Path | None:
        """The newest complete checkpoint, or None; rank 0 looks, all get its answer.

        Half-written folders are skipped with a warning. Nothing but the marker counts.
        """
        found = b""
        with together(f"looking for checkpoints in {self.directory}", self._group):
            if self._first and (newest := newest_complete(self.directory)):
                found = newest.name.encode()
        name = broadcast_bytes(found, src=self._zero, group=self._group).decode()
        return self.directory / name if name else None

    def load(self, path: Path) -> Mapping[str, Any]:
        """Restore the run from a checkpoint that was saved at any layout.

        Weights, optimizer moments and update counts and the position of the learning-rate
        schedule are restored exactly. The numbers of optimizer and schedule are those of the
        present configuration. Random states continue when the layout is the same; else the
        generators are seeded from the saved state, which is logged.

        Returns:
            The trainer's own state, equal on every rank.

        Raises:
            CheckpointError: the checkpoint is incomplete, damaged, of another model, or not
                trustworthy. The same on every rank. It says what to do. Policy and optimizer are
                untouched unless a file of tensors turned out to be unreadable.
        """
        manifest, trainer = self._open(path, weights_only=False)
        self._read(path, with_optimizer=manifest.optimizer_state)
        if not manifest.optimizer_state:
            clear_optimizer(self.policy.optimizer)
        set_schedule(self.policy.scheduler, manifest.scheduler_steps)
        self._restore_random_state(path, manifest)
        return json.loads(trainer)

    def load_rollouts(self, path: Path) -> bytes | None:
        """The encoded rollouts that were sampled ahead, or None; equal on every rank.

        Of a checkpoint that ``load`` has read: that has compared the file's hash.

        Raises:
            CheckpointError: the file cannot be read. The same on every rank.
        """
        content: bytes | None = None
        with together(f"reading {path / ROLLOUTS_FILE}", self._group):
            if self._first and ROLLOUTS_FILE in read_manifest(path).files:
                content = (path / ROLLOUTS_FILE).read_bytes()
        # An encoding is never empty.
        return broadcast_bytes(content or b"", src=self._zero, group=self._group) or None

    def load_weights(self, path: Path) -> int:
        """Restore the weights alone; optimizers may differ.

        Afterwards the optimizer may hold copies of the old weights: before training with it, call
        ``MegatronPolicy.start_from_present_weights``.

        Returns:
            The training steps done at ``path``.

        Raises:
            CheckpointError: as ``load``.
        """
        manifest, _ = self._open(path, weights_only=True)
        self._read(path, with_optimizer=False)
        return manifest.step

    def _read(self, path: Path, *, with_optimizer: bool) -> None:
        try:
            with together(f"reading {path}", self._group):
                common = read_common(path)
            read_shards(self.policy, path, common, with_optimizer=with_optimizer)
        except CheckpointError as error:
            raise CheckpointError(f"{error}{fallback_advice(path)}") from error

    def _open(self, path: Path, *, weights_only: bool) -> tuple[Manifest, bytes]:
        """Check everything that can be checked before anything changes."""
        marker = trainer = b""
        with together(f"opening {path}", self._group):
            if self._first:
                marker = encode_manifest(manifest := read_manifest(path))
                self._require_same_model(path, manifest, weights_only=weights_only)
                tell_other_version(path, manifest)
        marker = broadcast_bytes(marker, src=self._zero, group=self._group)
        manifest = decode_manifest(marker, path / MARKER)
        rank, world = dist.get_rank(self._group), dist.get_world_size(self._group)
        try:
            with together(f"checking {path}", self._group):
                if self._first:
                    verify_sizes(path, manifest)
                verify_hashes(path, manifest, rank=rank, world_size=world)
                if self._first:
                    read_index(path, manifest.files)
                    read_common(path)
                    trainer = (path / STATE_FILE).read_bytes()
        except CheckpointError as error:
            raise CheckpointError(f"{error}{fallback_advice(path)}") from error
        trainer = broadcast_bytes(trainer, src=self._zero, group=self._group)
        return manifest, trainer

    def _require_same_model(self, path: Path, manifest: Manifest, *, weights_only: bool) -> None:
        if differences := different_keys(manifest.fingerprint, self.fingerprint):
            advice = "Set model.* as it was, or point run.dir to a new folder."
            if weights_only:
                advice = "Set model.path and model.dtype to those of its model."
            raise CheckpointError(
                f"{path} is a checkpoint of another model. {'; '.join(differences)}. {advice}"
            )
        if manifest.optimizer == WEIGHTS_ONLY and not weights_only:
            raise CheckpointError(
                f"{path} was converted from Hugging Face format and holds weights only: there is "
                "no run in it to go on with. Start a new run in another run.dir, with "
                "model.weights set to it."
            )
        kind = optimizer_kind(self.policy.optimizer)
        if manifest.optimizer != kind and not weights_only:
            raise CheckpointError(
                f"{path} was saved with Megatron-Core's {manifest.optimizer}, this run has "
                f"{kind}, whose state is laid out differently. Set optimizer.distributed and "
                "model.dtype as they were."
            )

    def _restore_random_state(self, path: Path, manifest: Manifest) -> None:
        layout = self._layout()
        same = manifest.layout == layout
        with together(f"reading random states of {path}", self._group):
            file = path / _random_file(self.policy.topology.rank if same else 0)
            states = safetensors.torch.load(file.read_bytes())
        if same:
            restore_random_state(states)
            return
        seed = reseed_from(states, manifest.step)
        if self._first:
            logger.warning(
                "%s was saved at the layout %s and this run has %s: random states cannot continue "
                "and are seeded with %d, derived from the saved one.",
                path,
                dict(manifest.layout),
                layout,
                seed,
            )

    def _layout(self) -> dict[str, int]:
        """What decides how many random states there are, and of which kind."""
        topology = self.policy.topology
        return {
            "tensor": topology.tensor_size,
            "pipeline": topology.pipeline_size,
            "data": topology.data_size,
            "cuda": int(torch.cuda.is_available()),
        }


def copy_hf_files(source: Path, folder: Path) -> None:
    """Copy configuration, tokenizer, chat template and generation settings as they are."""
    for name in (Path(CONFIG), *companion_files(source)):
        write_file(folder / name, (source / name).read_bytes())


def _random_file(rank: int) -> str:
    return f"rng/rank_{rank:05d}.safetensors"
