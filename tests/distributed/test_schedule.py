"""``rollout.mode=one_step_off`` against the same schedule written out by hand, without threads."""

from __future__ import annotations

import logging
import shutil
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from dynamo_megatron.actor.policy import MegatronPolicy
from dynamo_megatron.algo.history import SuccessHistory
from dynamo_megatron.batching.pack import pack
from dynamo_megatron.batching.split import plan_mini_batches
from dynamo_megatron.config import Config
from dynamo_megatron.loop import train
from dynamo_megatron.parallel.broadcast import broadcast_bytes
from dynamo_megatron.parallel.codec import decode_groups, encode_groups
from dynamo_megatron.parallel.errors import PeerError
from dynamo_megatron.protocols import RolloutEngine
from dynamo_megatron.rollout.errors import RolloutError, SamplerMismatchError
from dynamo_megatron.signals import StopSignal
from dynamo_megatron.stages.advantages import rollout_advantages
from dynamo_megatron.stages.allocation import allocate
from dynamo_megatron.stages.modulation import modulate_batch
from dynamo_megatron.state import LoopState
from dynamo_megatron.types import DataCursor, RolloutGroup, TokenInputs
from tests.ranks import run_on_ranks
from tests.schedules import config_for, parts_of, rows_of, run, weights_of

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


def config_at(tmp_path: Path, name: str, *, mode: str, base: str = BASE, **overrides) -> Config:
    return config_for(tmp_path, tmp_path / name, base, mode=mode, **(OPTIONS | overrides))


def _by_hand(config: Config):
    """The schedule, step by step. Returns (weights, history, one record a step)."""
    with parts_of(config) as (parts, _):
        engine, reward = parts.tier.engine, parts.tier.reward
        algorithm, zero = config.algorithm, dist.get_rank() == 0

        def hand_over(version: int) -> None:
            stream = parts.policy.weights()
            if zero:
                engine.load_weights(stream, version=version)
            for _ in stream:
                pass

        def sampled(step: int, cursor: DataCursor, history: SuccessHistory):
            prompts, cursor = parts.prompts.take(config.data.prompts_per_step, cursor)
            sizes = allocate(prompts, history, algorithm.allocation)
            payload = None
            if zero:
                rollouts = engine.generate(
                    prompts, sizes, step=step, temperature=1.0, seed=config.run.seed
                )
                groups = []
                for prompt in prompts:
                    own = tuple(r for r in rollouts if r.prompt_id == prompt.id)
                    verdicts = tuple(reward.score([(prompt, r) for r in own]))
                    groups.append(RolloutGroup(prompt=prompt, rollouts=own, verdicts=verdicts))
                payload = encode_groups(groups)
            return decode_groups(broadcast_bytes(payload, src=0, group=parts.group)), cursor

        def learn(groups: list[RolloutGroup]):
            advantages = rollout_advantages(groups, algorithm)
            batch = pack(groups, advantages)
            plan = plan_mini_batches(
                batch,
                num_groups=len(groups),
                groups_per_mini_batch=2,
                data_parallel=1,
                limits=parts.row_limits,
            )
            old = parts.policy.token_stats(batch, plan)
            modulated = modulate_batch(
                batch, plan, old, algorithm.modulation, algorithm.clip, group=parts.group
            )
            inputs = TokenInputs(advantages=modulated.batch.advantages, old_logp=old.stats.logp)
            return parts.policy.update(plan, inputs)

        history, cursor, records = SuccessHistory(), DataCursor(), []
        hand_over(0)
        groups, cursor = sampled(0, cursor, history)
        for step in range(config.run.num_steps):
            verdicts = [[v.reward for v in group.verdicts] for group in groups]
            history = history.updated(
                (group.prompt.id, sum(r >= 0.5 for r in rewards), len(rewards))
                for group, rewards in zip(groups, verdicts, strict=True)
            )
            following = None
            if step + 1 < config.run.num_steps:
                following, cursor = sampled(step + 1, cursor, history)  # by the present weights
            updates = learn(groups)
            hand_over(step + 1)
            versions = {r.weight_version for group in groups for r in group.rollouts}
            records.append(
                {
                    "step": step,
                    "rollout/staleness": float(step - versions.pop()),
                    "rollout/num": sum(map(len, verdicts)),
                    "rollout/tokens": sum(len(r.token_ids) for g in groups for r in g.rollouts),
                    "reward/mean": sum(map(sum, verdicts)) / sum(map(len, verdicts)),
                    "allocation/size_max": max(map(len, verdicts)),
                    "train/grad_norm": (updates[0].grad_norm + updates[1].grad_norm) / 2,
                    "train/lr": updates[1].learning_rate,
                }
            )
            assert not versions
            groups = following
        return weights_of(parts), history, records


def assert_equal_weights(got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    assert got.keys() == want.keys()
    assert [name for name in want if not torch.equal(got[name], want[name])] == []


@pytest.mark.parametrize("tensor", [1, 2])
def test_one_step_off_is_the_schedule_written_by_hand_bit_for_bit(tensor, tmp_path):
    layout = {"parallel__tensor": tensor}
    config = config_at(tmp_path, "loop", mode="one_step_off", **layout)
    by_hand = config_at(tmp_path, "hand", mode="one_step_off", **layout)
    want = run_on_ranks(_by_hand, tensor, by_hand, timeout=180)
    got = run_on_ranks(run, tensor, config, timeout=180)
    rows = rows_of(tmp_path / "loop")
    for (state, weights), (hand_weights, history, records) in zip(got, want, strict=True):
        assert_equal_weights(weights, hand_weights)
        assert state.history == history and state.step == 5 and state.ahead is None
        assert [{name: row[name] for name in records[0]} for row in rows] == records
    assert [row["rollout/staleness"] for row in rows] == [0, 1, 1, 1, 1]
    assert max(row["allocation/size_max"] for row in rows) > 3, "sizes follow the history"
    assert 0.0 < max(row["reward/mean"] for row in rows) < 1.0

    sync = config_at(tmp_path, "sync", mode="sync", **layout)
    (_, other), *_ = run_on_ranks(run, tensor, sync, timeout=180)
    assert any(not torch.equal(other[name], weights[name]) for name in weights)
    sync_rows = rows_of(tmp_path / "sync")
    assert sync_rows[0] == rows[0], "the first step is the same"
    assert [row["rollout/staleness"] for row in sync_rows] == [0] * 5


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


def test_the_next_rollouts_are_sampled_while_the_present_ones_are_trained_on(tmp_path):
    """Each side waits for the other to be in the middle of its work."""
    config = config_at(tmp_path, "run", mode="one_step_off", run__num_steps=2)

    def work():
        generating, updating = threading.Event(), threading.Event()

        def meet(mine: threading.Event, other: threading.Event) -> None:
            mine.set()
            assert other.wait(30.0), "generation and update do not overlap"

        def before_update() -> None:
            if not updating.is_set():
                meet(updating, generating)

        state, _ = run(
            config,
            engine=lambda engine: Watched(engine, before={1: lambda: meet(generating, updating)}),
            policy=lambda policy: Trained(policy, before_update=before_update),
        )
        return state.step

    assert run_on_ranks(work, 1, timeout=120) == [2]


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
        *("load 0", "begin step 0", "end step 0"),
        *("begin step 1 beside training", "end step 1"),
        *("load 1", *evaluation),
        *("load 1", "begin step 2 beside training", "end step 2"),
        *("load 2", *evaluation),
        "load 2",  # the last step samples nothing ahead
        *("load 3", *evaluation),
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


def test_a_failure_in_the_background_ends_every_rank(tmp_path):
    config = config_at(tmp_path, "run", mode="one_step_off", parallel__tensor=2)

    def fail() -> None:
        raise RolloutError("a replica is lost")

    def work():
        try:
            run(config, engine=lambda engine: Watched(engine, before={2: fail}))
        except RolloutError as error:
            return "RolloutError", str(error)
        except PeerError as error:
            return error.error_type, error.error_text
        return None

    assert run_on_ranks(work, 2, timeout=120) == [("RolloutError", "a replica is lost")] * 2
    assert len(rows_of(tmp_path / "run")) == 1, "step 0 is done, step 1 is not reported"


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
