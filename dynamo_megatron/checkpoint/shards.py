"""Weights and optimizer state to and from Megatron-Core's ``torch_dist`` format."""

from __future__ import annotations

import io
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess
from megatron.core.dist_checkpointing.strategies.common import TorchCommonLoadStrategy
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict_saver import save as save_together
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from dynamo_megatron.checkpoint.errors import CheckpointError, os_error_behind, together
from dynamo_megatron.checkpoint.manifest import write_file
from dynamo_megatron.checkpoint.optimizer_state import load_optimizer
from dynamo_megatron.checkpoint.parts import TrainedPolicy
from dynamo_megatron.checkpoint.trusted import COMMON, name_unreadable_tensor

# The one format of the distributed optimizer that can be resharded over tensor and pipeline ranks
# too, and is right with torch's AdamW (megatron-core 0.16.1).
_CONTENT = {"distrib_optim_sharding_type": "fully_reshardable", "chained_optim_avoid_prefix": True}
_CONTENT_KEY = "content_metadata"
_EXTRA_STATE = "_extra_state"


def sharded_state(
    policy: TrainedPolicy, *, with_optimizer: bool, is_loading: bool
) -> dict[str, Any]:
    """Megatron-Core's description of this rank's tensors.

    Layers' ``_extra_state`` is left out: it holds scales for fp8, which is not offered, and it
    would be the only pickled object of the checkpoint.

    Collectives: those of the distributed optimizer (data-parallel group).
    """
    metadata = {
        **_CONTENT,
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
    }
    described = policy.module.sharded_state_dict(metadata=metadata)
    model = {
        name: value
        for name, value in described.items()
        if not (isinstance(value, ShardedObject) and name.endswith(_EXTRA_STATE))
    }
    state: dict[str, Any] = {"model": model}
    if with_optimizer:
        state["optimizer"] = policy.optimizer.sharded_state_dict(
            model, is_loading=is_loading, metadata=metadata
        )
    return state


def write_shards(policy: TrainedPolicy, folder: Path, *, with_optimizer: bool) -> None:
    """Write weights, and the optimizer's state, into an existing empty folder.

    The files are those of ``megatron.core.dist_checkpointing.save``. That function is not called
    because it spawns a process for a queue (seconds each save, it imports ``__main__`` again) and
    forks one for each file, which outlive a killed trainer; and because a full disk on rank 0
    leaves the others waiting. Here torch's writer works in this process, and syncs its files.

    Raises:
        CheckpointError: a rank could not write; on every rank.

    Collectives: Megatron-Core's check that every shard is written once, torch's gathering of the
    write plan and of its results.
    """
    group = policy.topology.world_group
    state = sharded_state(policy, with_optimizer=with_optimizer, is_loading=False)
    state[_CONTENT_KEY] = dict(_CONTENT)
    doing = f"writing {folder}"
    with together(doing, group):
        sharded, common = save_preprocess(state)
        assert isinstance(sharded, dict), "the state is one"
    with together(doing, group):
        if policy.topology.rank == 0:
            write_common(folder, common)
    with together(doing, group):
        by_key, _, _ = _replace_state_dict_keys_with_sharded_keys(
            sharded, keep_only_main_replica=True
        )
        save_together(
            mcore_to_pyt_state_dict(by_key),
            storage_writer=_Writer(str(folder), thread_count=1, overwrite=False),
            planner=MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False),
        )


def write_common(folder: Path, common: Mapping[str, Any] | None = None) -> None:
    """Write what Megatron-Core wants beside the tensors: the rest of the state, and its format.

    Args:
        folder: the checkpoint.
        common: everything that is no sharded tensor; for weights alone nothing but the format's
            own description.
    """
    serialised = io.BytesIO()
    torch.save(common or {_CONTENT_KEY: dict(_CONTENT)}, serialised)
    write_file(folder / COMMON, serialised.getvalue())
    save_config(CheckpointingConfig("torch_dist"), str(folder))


class _Writer(FileSystemWriter):
    """Torch's writer, saying why it could not write."""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        try:
            return super().write_data(plan, planner)
        except RuntimeError as error:
            # The context does not travel to other ranks.
            raise os_error_behind(error) or error from error


def read_shards(
    policy: TrainedPolicy, folder: Path, common: dict[str, Any], *, with_optimizer: bool
) -> None:
    """Load weights, and the optimizer's state, saved at any layout.

    Args:
        policy: receives them in place.
        folder: a checkpoint whose ``.metadata`` has been checked.
        common: the content of its ``common.pt``.
        with_optimizer: the checkpoint has optimizer state.

    Raises:
        CheckpointError: a tensor is missing, has another shape, or cannot be read; on every rank.

    Collectives: Megatron-Core's and torch's.
    """
    state = sharded_state(policy, with_optimizer=with_optimizer, is_loading=True)
    with together(f"reading {folder}", policy.topology.world_group):
        try:
            loaded = _read(state, folder, common)
        except CheckpointException:  # raised on every rank; rank 0 finds out which file
            if policy.topology.rank == 0:
                name_unreadable_tensor(folder)
            raise
        _load_module(policy.module, loaded["model"])
        if with_optimizer:
            load_optimizer(policy.optimizer, loaded["optimizer"])


def _read(state: dict[str, Any], folder: Path, common: dict[str, Any]) -> dict[str, Any]:
    with warnings.catch_warnings():
        # megatron-core calls names that torch has deprecated; its users can do nothing about it.
        warnings.filterwarnings("ignore", "`load_state_dict` is deprecated", FutureWarning)
        warnings.filterwarnings("ignore", "Please use DTensor instead", FutureWarning)
        loaded = dist_checkpointing.load(state, str(folder), common_strategy=_AlreadyRead(common))
    assert isinstance(loaded, dict), "only other values of `strict` return more than the state"
    return loaded


class _AlreadyRead(TorchCommonLoadStrategy):
    """Hands megatron-core a ``common.pt`` that was read with the allow-list."""

    def __init__(self, common: dict[str, Any]) -> None:
        self._common = common

    def load_common(self, checkpoint_dir: str | Path) -> dict[str, Any]:
        return self._common


def _load_module(module: torch.nn.Module, tensors: Mapping[str, Any]) -> None:
    outcome = module.load_state_dict(tensors, strict=False)
    missing = [name for name in outcome.missing_keys if not name.endswith(_EXTRA_STATE)]
    if missing or outcome.unexpected_keys:
        raise CheckpointError(
            f"the checkpoint lacks the parameters {missing or 'none'} and has beyond the model "
            f"{outcome.unexpected_keys or 'none'}: it is of another model."
        )
