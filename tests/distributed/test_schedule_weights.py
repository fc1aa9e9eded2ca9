"""Rollouts and evaluations use the weights that they say, and other weights are noticed."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from dynamo_megatron.rollout.errors import RolloutError, SamplerMismatchError
from tests.ranks import run_on_ranks
from tests.schedules import EVALUATED, Watched, config_at, run


def test_evaluations_and_rollouts_use_the_weights_that_they_say(tmp_path):
    config = config_at(
        tmp_path, "run", mode="one_step_off", base=EVALUATED, run__num_steps=3, evaluation__every=1
    )

    def work():
        watched = []

        def watch(engine):
            watched.append(Watched(engine))
            return watched[0]

        run(config, engine=watch)
        return watched[0].events

    (events,) = run_on_ranks(work, 1, timeout=120)
    evaluation = ["begin held-out", "end held-out"]
    assert events == [
        *("load 0", *evaluation),
        *("begin step 0", "end step 0"),  # by the weights that were evaluated
        *("begin step 1 beside training", "end step 1"),
        *("load 1", *evaluation),
        *("begin step 2 beside training", "end step 2"),
        *("load 2", *evaluation),
        *("load 3", *evaluation),  # the last step samples nothing ahead
        "close",
    ]


@dataclass
class Skewed(Watched):
    """Reports other logprobs than it sampled with, in one step."""

    at: int = 0

    def generate(self, prompts, sizes, *, step, on_rollout, **options):
        def changed(rollout):
            if step != self.at:
                return rollout
            return replace(rollout, logprobs=tuple(p - 0.5 for p in rollout.logprobs))

        return [
            changed(rollout)
            for rollout in self.inner.generate(
                prompts,
                sizes,
                step=step,
                on_rollout=lambda rollout: on_rollout(changed(rollout)),
                **options,
            )
        ]


def test_sampler_and_trainer_are_compared_where_they_must_agree(tmp_path, caplog):
    """In the first rollouts of their own weights after a start, and in no stale ones."""
    options = {"run__num_steps": 3, "checkpoint__every": 1, "checkpoint__keep": 9}
    ahead = config_at(tmp_path, "run", mode="one_step_off", **options)
    sync = config_at(tmp_path, "run", mode="sync", **options)

    def outcome(config, at: int, *, resume: bool = False) -> str:
        try:
            with caplog.at_level(logging.INFO):
                run(config, resume=resume, engine=lambda engine: Skewed(engine, at=at))
        except SamplerMismatchError:
            return "refused"
        return f"trained, {caplog.text.count('are not compared')} notes"

    assert run_on_ranks(outcome, 1, ahead, 0, timeout=120) == ["refused"]
    shutil.rmtree(tmp_path / "run")
    assert run_on_ranks(outcome, 1, ahead, 1, timeout=120) == ["trained, 0 notes"]
    # Go on from step 1, which trains on what was sampled ahead. Step 2 is stale too, or its own.
    assert _from_step_1(lambda: outcome(ahead, 2, resume=True), tmp_path) == "trained, 1 notes"
    assert _from_step_1(lambda: outcome(sync, 2, resume=True), tmp_path) == "refused"


def _from_step_1(work: Callable[[], str], tmp_path: Path) -> str:
    for step in (2, 3):
        shutil.rmtree(tmp_path / "run" / "checkpoints" / f"step_0000000{step}")
    return run_on_ranks(work, 1, timeout=120)[0]


def test_rollouts_of_other_weights_are_refused_on_every_rank(tmp_path):
    config = config_at(tmp_path, "run", mode="one_step_off", parallel__tensor=2)

    class Late(Watched):
        """Keeps the first weights."""

        def load_weights(self, weights, *, version):
            if version == 0:
                self.inner.load_weights(weights, version=0)

    def work():
        with pytest.raises(RolloutError, match=r"step 2 .* weights after 1 .* after \[0\]"):
            run(config, engine=Late)
        return True

    assert run_on_ranks(work, 2, timeout=120) == [True, True]
