"""A run that goes on, after a kill, a stop or a change of mode, is the uninterrupted one."""

from __future__ import annotations

import shutil
import threading
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch.distributed as dist
from torch import Tensor

from dynamo_megatron.config import Config
from dynamo_megatron.loop import train
from dynamo_megatron.signals import StopSignal
from dynamo_megatron.state import LoopState
from dynamo_megatron.types import DataCursor
from tests.ranks import run_on_ranks
from tests.schedules import (
    EVALUATED,
    Trained,
    Watched,
    assert_equal_weights,
    config_at,
    parts_of,
    rows_of,
    run,
)


@dataclass(frozen=True)
class Whole:
    """A run that was never interrupted, with a checkpoint of step 2 among its own."""

    folder: Path
    options: dict
    states: list[tuple[LoopState, dict[str, Tensor]]]

    def config(self, name: str, **overrides) -> Config:
        return config_at(self.folder, name, mode="one_step_off", **(self.options | overrides))

    def assert_equal(self, name: str, ends: list[tuple[LoopState, dict[str, Tensor]]]) -> None:
        """Weights, history, counters, evaluations and metrics, bit for bit."""
        assert rows_of(self.folder / name) == rows_of(self.folder / "whole")
        for (state, weights), (want_state, want_weights) in zip(ends, self.states, strict=True):
            assert state == want_state
            assert_equal_weights(weights, want_weights)


@pytest.fixture(scope="module", params=[1, 2], ids=["tp1", "tp2"])
def whole(request, tmp_path_factory) -> Whole:
    options = {
        "base": EVALUATED,
        "parallel__tensor": request.param,
        "checkpoint__every": 2,
        "checkpoint__keep": 9,
        "evaluation__every": 2,
        "algorithm__allocation__decay": 0.5,
        "algorithm__allocation__refresh": "epoch",
    }
    folder = tmp_path_factory.mktemp("schedule")
    config = config_at(folder, "whole", mode="one_step_off", **options)
    return Whole(folder, options, run_on_ranks(run, request.param, config, timeout=180))


def test_a_run_that_goes_on_from_a_checkpoint_is_the_uninterrupted_one(whole):
    # the run as a kill in step 3 leaves it: nothing newer than the checkpoint of step 2
    name = "step_00000002"
    shutil.copytree(
        whole.folder / "whole" / "checkpoints" / name, whole.folder / "killed/checkpoints" / name
    )
    shutil.copy(whole.folder / "whole" / "metrics.jsonl", whole.folder / "killed")
    config = whole.config("killed")
    ends = run_on_ranks(lambda: run(config, resume=True), len(whole.states), timeout=180)
    whole.assert_equal("killed", ends)


def test_the_mode_may_change_when_a_run_goes_on(tmp_path):
    """Rollouts that were sampled ahead are used in either mode, and every step trains once."""
    options = {"checkpoint__every": 2, "checkpoint__keep": 9}
    first = config_at(tmp_path, "run", mode="one_step_off", **options)
    run_on_ranks(run, 1, first, timeout=180)
    want = rows_of(tmp_path / "run")
    (tmp_path / "run" / "checkpoints" / "step_00000005").rename(tmp_path / "five")
    (tmp_path / "run" / "checkpoints" / "step_00000004").rename(tmp_path / "four")
    second = config_at(tmp_path, "run", mode="sync", **options)
    run_on_ranks(lambda: run(second, resume=True), 1, timeout=180)
    rows = rows_of(tmp_path / "run")
    assert rows[:3] == want[:3], "step 2 was sampled before the change"
    assert [row["rollout/staleness"] for row in rows] == [0, 1, 1, 0, 0]
    assert rows[3]["rollout/logp_gap_max"] < 1e-4, "by the present weights again"
    # and back: a checkpoint of sync has nothing ahead
    (tmp_path / "run" / "checkpoints" / "step_00000005").rename(tmp_path / "five-again")
    run_on_ranks(lambda: run(first, resume=True), 1, timeout=180)
    back = rows_of(tmp_path / "run")
    assert [row["rollout/staleness"] for row in back] == [0, 1, 1, 0, 0]
    assert back == rows, "one step is left, and it starts like a first one"


def _stop_in_step_2(config: Config, *, before_update: bool):
    """Signal rank 0 within step 2, while the rollouts of step 3 are held up."""
    saving, calls = threading.Event(), []
    signals: list[StopSignal] = []
    engines: list[Watched] = []

    def signal_at(number: int) -> None:
        calls.append(None)
        if len(calls) == number and dist.get_rank() == 0:
            signals[0]._requested = True

    def watched(engine):
        hold = {3: lambda: saving.wait(30.0)} if before_update else {}
        engines.append(Watched(engine, before=hold))
        return engines[0]

    def trained(policy):
        hook = {"before_stats" if before_update else "before_update": lambda: signal_at(3)}
        return Trained(policy, **hook)

    with parts_of(config, engine=watched, policy=trained) as (parts, start):
        signals.append(parts.stop)
        real = parts.checkpointer

        class Saving:
            def save(self, *arguments, **options):
                saving.set()
                return real.save(*arguments, **options)

        state = train(replace(parts, checkpointer=Saving()), start)
    ended = not engines or "end step 3" in engines[0].events
    return state.step, state.ahead is not None, ended


@pytest.mark.parametrize("before_update", [True, False], ids=["before", "within"])
def test_a_stop_around_the_update_saves_what_a_resume_needs(before_update, whole):
    name, ranks = f"stopped-{before_update}", len(whole.states)
    config = whole.config(name, checkpoint__every=0)
    ends = run_on_ranks(
        lambda: _stop_in_step_2(config, before_update=before_update), ranks, timeout=180
    )
    if before_update:
        # step 2 is undone, and its own rollouts saved; those of step 3 are given up
        assert ends[0] == (2, True, False)
    else:
        assert ends[0] == (3, True, True)
    whole.assert_equal(name, run_on_ranks(lambda: run(config, resume=True), ranks, timeout=180))


def test_a_state_with_rollouts_ahead_comes_back_and_mixed_files_are_refused(tmp_path):
    config = config_at(tmp_path, "run", mode="one_step_off", run__num_steps=3, checkpoint__every=1)
    saved = []

    class Keeping:
        def save(self, step, state, resolved_config, *, rollouts):
            saved.append((state, rollouts and rollouts()))

    def work():
        with parts_of(config) as (parts, start):
            train(replace(parts, checkpointer=Keeping()), start)
        return saved

    (((one, first), (_, second), (three, none)),) = run_on_ranks(work, 1, timeout=120)
    assert none is None and three["ahead"] is None
    state = LoopState.from_json(one, first)
    assert state.to_json() == one and state.encoded_rollouts() == first
    assert state.ahead is not None and state.ahead.draw.step == 1
    assert state.cursor == DataCursor(epoch=0, position=4)
    assert state.ahead.draw.cursor == DataCursor(epoch=0, position=8)
    with pytest.raises(ValueError, match="two checkpoints were mixed"):
        LoopState.from_json(one, second)
    for data, rollouts in ((one, None), (three, first)):
        with pytest.raises(ValueError, match="do not agree"):
            LoopState.from_json(data, rollouts)
