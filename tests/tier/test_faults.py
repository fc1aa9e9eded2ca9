"""Replicas that die, freeze, or run out of memory: the step's rollouts are what they were."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import psutil
import pytest
import torch
from torch import Tensor

from dynamo_megatron.assets import TINY_POLICY
from dynamo_megatron.hf.reader import SafetensorsReader
from dynamo_megatron.rollout.errors import RequestRefusedError, RolloutError
from dynamo_megatron.rollout.vllm.engine import VllmEngine
from dynamo_megatron.rollout.vllm.transport import ObjectStoreTransport
from dynamo_megatron.types import Prompt, Rollout
from tests.problems import tiny_prompts
from tests.tier.conftest import sizes_of, tier
from tests.tier.faults import frozen, killed, out_of_memory, pid_of, same_samples, wait_for

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

SEED, HANG_S, WITHIN_S = 17, 8.0, 60.0
COUNTS = tuple((12, 3, 8, 1)[place % 4] for place in range(40))
Weights = dict[str, Tensor]


@pytest.fixture(scope="module")
def prompts() -> tuple[Prompt, ...]:
    return tiny_prompts(len(COUNTS))


@pytest.fixture(scope="module")
def weights() -> tuple[Weights, Weights]:
    """The shipped policy, and one that samples otherwise."""
    with SafetensorsReader(TINY_POLICY) as reader:
        first = {name: reader.tensor(name) for name in reader.names()}
    noise = torch.Generator().manual_seed(3)
    second = {
        name: tensor + 0.02 * torch.randn(tensor.shape, generator=noise)
        for name, tensor in first.items()
    }
    return first, second


class Tier:
    """Two replicas, and what they sample from either set of weights when nothing happens."""

    def __init__(self, engine: VllmEngine, prompts, weights) -> None:
        self.engine = engine
        self.fleet = engine._fleet
        self.prompts = prompts
        self.weights = weights
        self.version = 0
        self.undisturbed: list[list[Rollout]] = []
        for choice in (0, 1):
            self.load(choice)
            self.undisturbed.append(self.sample())

    def load(self, choice: int, on_tensor=lambda place: None) -> None:
        def stream() -> Iterator[tuple[str, Tensor]]:
            for place, (name, tensor) in enumerate(self.weights[choice].items()):
                on_tensor(place)
                yield name, tensor

        self.version += 1
        self.engine.load_weights(stream(), version=self.version)

    def sample(self, **more) -> list[Rollout]:
        sizes = sizes_of(self.prompts, COUNTS)
        rollouts = self.engine.generate(
            self.prompts, sizes, step=2, temperature=1.0, seed=SEED, **more
        )
        assert {rollout.weight_version for rollout in rollouts} == {self.version}
        return rollouts

    def used(self) -> set[int]:
        """Replicas that answered in the last sampling."""
        return {timing.replica for timing in self.engine.timings}

    def pid(self, place: int) -> int:
        return pid_of(self.fleet.ready[place])

    def whole_again(self, count: int) -> None:
        def back() -> bool:
            self.fleet.adopt()
            return len(self.fleet.ready) == count

        wait_for(back, 240, "the restart of a replica")


@pytest.fixture(scope="module")
def pair(prompts, weights) -> Iterator[Tier]:
    with tier(
        TINY_POLICY, replicas=2, max_num_seqs=4, hang_timeout_s=HANG_S, max_restarts=4
    ) as engine:
        yield Tier(engine, prompts, weights)


def disturbed(tier: Tier, fault, caplog) -> list[Rollout]:
    """A sampling in which a process is broken after a tenth of the responses."""
    at: list[float] = []

    def listen(rollout: Rollout) -> None:
        at.append(time.time())
        if len(at) == sum(COUNTS) // 10:
            fault()

    with caplog.at_level(logging.WARNING):
        rollouts = tier.sample(on_rollout=listen)
    noticed = next(r.created for r in caplog.records if "It is started again" in r.getMessage())
    assert noticed - at[sum(COUNTS) // 10 - 1] < WITHIN_S
    return rollouts


def test_the_two_sets_of_weights_sample_differently(pair):
    first, second = pair.undisturbed
    assert [r.token_ids for r in first] != [r.token_ids for r in second]


@pytest.mark.parametrize("fault", [killed, frozen, out_of_memory])
def test_a_replica_lost_in_a_step_changes_nothing_and_comes_back(pair, caplog, fault):
    pair.load(0)
    before = pair.pid(1)
    same_samples(disturbed(pair, partial(fault, pair.fleet.ready[1]), caplog), pair.undisturbed[0])
    assert "replica 1: " in caplog.text
    pair.whole_again(2)
    assert not psutil.pid_exists(before) or not psutil.Process(before).is_running()
    assert pair.pid(1) != before
    same_samples(pair.sample(), pair.undisturbed[0])
    assert pair.used() == {0, 1}


def test_a_request_that_vllm_refuses_ends_the_step_and_no_replica(pair, caplog):
    pair.load(0)
    before = pair.pid(0), pair.pid(1)
    beyond = replace(pair.prompts[0], token_ids=(1, 10_000))
    prompts = (beyond, *pair.prompts[1:])
    with pytest.raises(RequestRefusedError, match=rf"request {beyond.id}/\d+ with 2 prompt tokens"):
        pair.engine.generate(prompts, sizes_of(prompts, COUNTS), step=2, temperature=1.0, seed=SEED)
    same_samples(pair.sample(), pair.undisturbed[0])
    assert (pair.pid(0), pair.pid(1)) == before
    assert "started again" not in caplog.text


def test_a_replica_lost_between_update_and_step_changes_nothing(pair):
    pair.load(1)
    killed(pair.fleet.ready[0])
    same_samples(pair.sample(), pair.undisturbed[1])
    pair.whole_again(2)


def test_a_replica_lost_before_its_probe_is_probed_when_it_is_back(pair):
    pair.load(0)
    frozen(pair.fleet.ready[1])
    rollouts = pair.engine.probe(pair.prompts[:2], temperature=1.0, seed=SEED)
    assert sorted((r.prompt_id, r.index) for r in rollouts) == sorted(
        (prompt.id, place) for prompt in pair.prompts[:2] for place in (0, 1)
    )
    same_samples(pair.sample(), pair.undisturbed[0])
    assert pair.used() == {0, 1}


@pytest.mark.parametrize(
    ("transport", "fault"),
    [("gloo", killed), ("gloo", frozen), ("gloo", out_of_memory), ("object_store", killed)],
)
def test_a_replica_lost_in_an_update_samples_from_the_new_weights(
    pair, monkeypatch, caplog, transport, fault
):
    if transport == "object_store":
        collect = partial(pair.fleet.cluster.wait, timeout_s=HANG_S)
        monkeypatch.setattr(pair.fleet, "_transport", ObjectStoreTransport(collect))
    pair.load(0)
    replica, half = pair.fleet.ready[1], len(pair.weights[1]) // 2
    started = time.monotonic()
    pair.load(1, on_tensor=lambda place: fault(replica) if place == half else None)
    assert time.monotonic() - started < 4 * WITHIN_S  # with the restart
    assert len(pair.fleet.ready) == 2 and pair.fleet.ready[1] is not replica
    assert "a weight update broke (replica 1 is lost): " in caplog.text
    same_samples(pair.sample(), pair.undisturbed[1])
    assert pair.used() == {0, 1}


@pytest.fixture(scope="module")
def single(pair, prompts, weights) -> Iterator[Tier]:
    """One replica of two processes. A process is connected to one Ray at a time."""
    pair.engine.close()
    with tier(
        TINY_POLICY, replicas=1, tensor=2, max_num_seqs=8, hang_timeout_s=HANG_S, max_restarts=2
    ) as engine:
        yield Tier(engine, prompts, weights)


def test_the_only_replica_hangs_while_its_process_answers(single, caplog):
    """One of its two workers is frozen: the engine waits for it for ever."""
    single.load(0)
    before = single.pid(0)
    workers = psutil.Process(before).children(recursive=True)
    worker = next(process for process in workers if "Worker" in " ".join(process.cmdline()))
    same_samples(disturbed(single, worker.suspend, caplog), single.undisturbed[0])
    assert single.pid(0) != before
    wait_for(lambda: not any(w.is_running() for w in workers), 20, "the end of the workers")


def test_more_losses_than_allowed_end_the_run(single):
    single.load(0)
    lost: list[int] = []

    def listen(rollout: Rollout) -> None:
        if single.fleet.ready and single.pid(0) not in lost:
            lost.append(single.pid(0))
            killed(single.fleet.ready[0])

    with pytest.raises(RolloutError, match=r"3 .*lost.*max_restarts=2"):
        single.sample(on_rollout=listen)
    assert len(lost) == 3
