"""Whole runs inside forked ranks, with an engine and a policy that tests can look into."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from dynamo_megatron import build
from dynamo_megatron.actor.topology import init_topology
from dynamo_megatron.cli import config_from_arguments
from dynamo_megatron.config import Config
from dynamo_megatron.loop import Parts, train
from dynamo_megatron.parallel.control import ControlPlane
from dynamo_megatron.signals import StopSignal
from dynamo_megatron.state import LoopState
from tests.launch import arguments, metrics_of

WALL = ("time/", "perf/", "memory/")
"""Beginnings of the metrics that two equal runs do not share."""


def config_for(folder: Path, run_dir: Path, base: str, *, mode: str, **overrides) -> Config:
    """A small run; the embedded engine serves in any mode here, which a user's run refuses."""
    config = config_from_arguments(arguments(folder, run_dir, base, **overrides))
    return config.model_copy(update={"rollout": config.rollout.model_copy(update={"mode": mode})})


@contextmanager
def parts_of(
    config: Config,
    *,
    resume: bool = False,
    engine: Callable[[Any], Any] = lambda engine: engine,
    policy: Callable[[Any], Any] = lambda policy: policy,
) -> Iterator[tuple[Parts, LoopState]]:
    """Everything of a run on this rank, and the state it starts from.

    Args:
        config: of the run.
        resume: start from the newest checkpoint.
        engine: wraps rank 0's engine.
        policy: wraps the policy that the loop trains; checkpoints have the real one.
    """
    world = dist.group.WORLD
    assert world is not None
    store = dist.distributed_c10d._get_default_store()
    stop = StopSignal()
    with ExitStack() as closing:
        control = closing.enter_context(ControlPlane(store, group=world, timeout_s=10.0))
        closing.callback(parallel_state.destroy_model_parallel)
        inputs = build.read_inputs(config)
        topology = init_topology(tensor=config.parallel.tensor, pipeline=1, seed=config.run.seed)
        real = build.build_policy(config, inputs, topology)
        checkpointer = build.build_checkpointer(config, inputs, real)
        state = LoopState()
        if resume:
            latest = checkpointer.latest()
            assert latest is not None
            state = LoopState.from_json(
                checkpointer.load(latest), checkpointer.load_rollouts(latest)
            )
        tier = build.build_tier(config, inputs, topology, control)
        if tier.engine is not None:
            tier = replace(tier, engine=engine(tier.engine))
        closing.callback(tier.close)
        parts = build.build_parts(config, inputs, real, checkpointer, tier, state, stop)
        closing.callback(parts.recorder.close)
        yield replace(parts, policy=policy(real)), state


def weights_of(parts: Parts) -> dict[str, Tensor]:
    """The policy's weights; collective."""
    return {name: tensor.clone() for name, tensor in parts.policy.weights()}


def run(config: Config, **options) -> tuple[LoopState, dict[str, Tensor]]:
    """Train to the end: the last state and the weights."""
    with parts_of(config, **options) as (parts, start):
        saved = start.step if options.get("resume") else None
        state = train(parts, start, saved_step=saved)
        return state, weights_of(parts)


def rows_of(run_dir: Path) -> list[dict]:
    """The metrics that do not depend on the clock."""
    return [
        {name: value for name, value in row.items() if not name.startswith(WALL)}
        for row in metrics_of(run_dir)
    ]
