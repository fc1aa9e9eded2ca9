"""Whole runs inside forked ranks, with an engine and a policy that tests can look into."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from dynamo_megatron import build
from dynamo_megatron.actor.policy import MegatronPolicy
from dynamo_megatron.actor.topology import init_topology
from dynamo_megatron.cli import config_from_arguments
from dynamo_megatron.config import Config
from dynamo_megatron.loop import Parts, train
from dynamo_megatron.parallel.control import ControlPlane
from dynamo_megatron.protocols import RolloutEngine
from dynamo_megatron.signals import StopSignal
from dynamo_megatron.state import LoopState
from tests.launch import arguments, metrics_of

WALL = ("time/", "perf/", "memory/")
"""Beginnings of the metrics that two equal runs do not share."""
BASE = """\
run: {num_steps: 5}
data:
  train:
    - {kind: arithmetic, split: train, num_problems: 10, seed: 1}
"""
EVALUATED = (
    BASE
    + """\
  heldout:
    - {kind: arithmetic, split: heldout, num_problems: 3, seed: 2}
"""
)
# Two optimizer steps a step, epochs that end within a step, and rewards that vary.
OPTIONS = {
    "run__num_steps": 5,
    "rollout__max_tokens": 32,
    "batch__mini_batch_prompts": 2,
    "optimizer__decay_style": "cosine",
}


def config_for(folder: Path, run_dir: Path, base: str, *, mode: str, **overrides) -> Config:
    """A small run; the embedded engine serves in any mode here, which a user's run refuses."""
    config = config_from_arguments(arguments(folder, run_dir, base, **overrides))
    return config.model_copy(update={"rollout": config.rollout.model_copy(update={"mode": mode})})


def config_at(tmp_path: Path, name: str, *, mode: str, base: str = BASE, **overrides) -> Config:
    return config_for(tmp_path, tmp_path / name, base, mode=mode, **(OPTIONS | overrides))


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


def assert_equal_weights(got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    assert got.keys() == want.keys()
    assert [name for name in want if not torch.equal(got[name], want[name])] == []


@dataclass
class Watched:
    """An engine that notes what is asked of it, and can be held up before a step's rollouts."""

    inner: RolloutEngine
    events: list[str] = field(default_factory=list)
    before: Mapping[int, Callable[[], object]] = field(default_factory=dict)

    def load_weights(self, weights: Iterable, *, version: int) -> None:
        self.inner.load_weights(weights, version=version)
        self.events.append(f"load {version}")

    def generate(self, prompts, sizes, *, step, **options):
        beside = threading.current_thread() is not threading.main_thread()
        name = "held-out" if len(prompts) == 3 else f"step {step}"
        self.events.append(f"begin {name}" + " beside training" * beside)
        if step in self.before:
            self.before[step]()
        rollouts = self.inner.generate(prompts, sizes, step=step, **options)
        self.events.append(f"end {name}")
        return rollouts

    def probe(self, prompts, *, temperature, seed):
        return self.inner.probe(prompts, temperature=temperature, seed=seed)

    def close(self) -> None:
        self.events.append("close")
        self.inner.close()


def nothing() -> None:
    """Happens at most moments."""


@dataclass
class Trained:
    """A policy that tells when a step's statistics and when an update begin."""

    inner: MegatronPolicy
    before_stats: Callable[[], None] = nothing
    before_update: Callable[[], None] = nothing

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def token_stats(self, *arguments):
        self.before_stats()
        return self.inner.token_stats(*arguments)

    def update(self, *arguments):
        self.before_update()
        return self.inner.update(*arguments)
