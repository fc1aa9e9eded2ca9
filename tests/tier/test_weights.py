"""Weights that reach the replicas: after every update they are the trainer's, all of them."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from dynamo_megatron.checkpoint.export import export_hf
from dynamo_megatron.rollout.errors import RolloutError
from dynamo_megatron.rollout.vllm.engine import VllmEngine
from dynamo_megatron.rollout.vllm.wire import SampleRequest, Sampling
from dynamo_megatron.types import Prompt, Rollout
from tests.policies import (
    VOCAB,
    Layout,
    optimizer_settings,
    plan_for,
    policy_on,
    prepared,
    random_batch,
)
from tests.ranks import run_on_ranks
from tests.tier.conftest import (
    BLOCK,
    MAX_LEN,
    ROUNDING,
    Round,
    fresh_answers,
    gaps_of,
    lead_over,
    prompt_of,
    reference_model,
    sizes_of,
    teacher_forced,
    tier,
    write_policy,
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

MAX_TOKENS = 16
LAYOUTS = (Layout(), Layout(tensor=2), Layout(pipeline=2))
MODELS = {
    "qwen2": {"intermediate_size": 2400},  # matrices of 1.2 MB, larger than a bucket
    "qwen3": {},
    "llama3": {},
    "smollm2": {"tied": True},
}
UPDATES = {"qwen2": 2, "qwen3": 20, "llama3": 2, "smollm2": 20}
"""Each spread over LAYOUTS, those of the trainer."""
SEED = 7


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """What a trainer sent, version by version.

    Attributes:
        start: the folder that it started from.
        streams: names and tensors in the order in which ``weights()`` gave them.
        exports: Hugging Face folders of the same versions.
    """

    start: Path
    streams: list[list[tuple[str, Tensor]]]
    exports: list[Path]


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> dict[str, Trained]:
    """All families, trained before any Ray is started: ranks are forked from this process."""
    return {name: _train(tmp_path_factory.mktemp(name), name) for name in MODELS}


def _train(folder: Path, name: str) -> Trained:
    start = write_policy(folder / "start", name, **MODELS[name])
    versions = range(UPDATES[name])
    shares = [versions[place :: len(LAYOUTS)] for place in range(len(LAYOUTS))]

    def work(layout: Layout, share: range) -> None:
        with policy_on(start, layout, optimizer=optimizer_settings(lr=0.05)) as policy:
            for version in share:
                batch = random_batch(version)
                plan = plan_for(policy, batch)
                inputs, _, _ = prepared(policy, batch, plan, dynamo=False)
                policy.update(plan, inputs)
                stream = [(name, tensor.clone()) for name, tensor in policy.weights()]
                if dist.get_rank() == 0:
                    torch.save(stream, folder / f"{version}.pt")
                export_hf(policy, start, folder / f"{version}")

    for layout, share in zip(LAYOUTS, shares, strict=True):
        if share:
            run_on_ranks(work, layout.world_size, layout, share)
    return Trained(
        start=start,
        streams=[torch.load(folder / f"{version}.pt") for version in versions],
        exports=[folder / f"{version}" for version in versions],
    )


@pytest.fixture(scope="module")
def prompts() -> tuple[Prompt, ...]:
    """Short ones, and one that fills a block of the prefix cache."""
    draw = random.Random(5)
    lengths = (3, 9, 20, 40, BLOCK + 22)
    return tuple(
        prompt_of(f"{length} tokens", [draw.randrange(3, VOCAB) for _ in range(length)])
        for length in lengths
    )


def policy_tier(trained: Trained, **spec):
    settings = {"max_tokens": MAX_TOKENS, "max_model_len": MAX_LEN}
    return tier(trained.start, **(settings | spec))


@dataclass(frozen=True, slots=True)
class Answers:
    """Of one version: five prompts, two drawn from each and one greedy."""

    drawn: list[Rollout]
    greedy: list[Rollout]


def ask(engine: VllmEngine, prompts: tuple[Prompt, ...]) -> Answers:
    drawn = engine.generate(
        prompts, sizes_of(prompts, [2] * len(prompts)), step=0, temperature=1.0, seed=SEED
    )
    greedy = engine.generate(
        prompts, sizes_of(prompts, [1] * len(prompts)), step=0, temperature=None, seed=SEED
    )
    return Answers(drawn, greedy)


def gaps_from(model, answers: Answers, prompts: tuple[Prompt, ...]) -> tuple[float, float]:
    """Against transformers: the largest gap of a logprob, and of a greedy token to the best one."""
    rollouts = [*answers.drawn, *answers.greedy]
    by_id = {prompt.id: prompt for prompt in prompts}
    logits = teacher_forced(model, [(by_id[r.prompt_id], r) for r in rollouts])
    greedy = zip(logits[len(answers.drawn) :], answers.greedy, strict=True)
    behind = [float(lead_over(s_TV, torch.tensor(r.token_ids)).max()) for s_TV, r in greedy]
    return float(gaps_of(logits, rollouts).max()), max(behind)


def check_versions(engine: VllmEngine, trained: Trained, prompts) -> list[Answers]:
    """Load all versions in turn; the engine must be each of them, and not the one before."""
    found, before = [], reference_model(trained.start)
    for version, (stream, export) in enumerate(zip(trained.streams, trained.exports, strict=True)):
        engine.load_weights(iter(stream), version=version)
        answers = ask(engine, prompts)
        model = reference_model(export)
        gap, behind = gaps_from(model, answers, prompts)
        assert gap <= ROUNDING, f"version {version}"
        assert behind < ROUNDING, f"version {version}"
        assert {r.weight_version for r in (*answers.drawn, *answers.greedy)} == {version}
        assert gaps_from(before, answers, prompts)[0] > 0.1, "the update would not be seen"
        found.append(answers)
        before = model
    return found


@pytest.fixture(scope="class", params=["qwen3-gloo", "smollm2-object_store"])
def twenty(request, trained, prompts) -> tuple[Trained, list[Answers]]:
    name, _, transport = request.param.partition("-")
    with policy_tier(trained[name], transport=transport) as engine:
        return trained[name], check_versions(engine, trained[name], prompts)


class TestTwentyUpdates:
    """Of an untied and a tied model, from trainers on TP1, TP2 and PP2, on two transports."""

    def test_the_engine_is_the_trainers_policy_after_each(self, twenty):
        assert len(twenty[1]) == 20

    def test_the_engine_is_a_fresh_one_of_each_versions_export(self, twenty, prompts):
        trained, answers = twenty
        asked = [
            (export, rounds_of(found, prompts))
            for export, found in zip(trained.exports, answers, strict=True)
        ]
        for found, fresh in zip(answers, fresh_answers(asked), strict=True):
            for key, rollout in keyed(found):
                assert fresh[key].token_ids == rollout.token_ids
                assert fresh[key].logprobs == pytest.approx(rollout.logprobs, abs=ROUNDING)


def keyed(answers: Answers) -> list[tuple[str, Rollout]]:
    return [
        *((f"drawn/{r.prompt_id}/{r.index}", r) for r in answers.drawn),
        *((f"greedy/{r.prompt_id}", r) for r in answers.greedy),
    ]


def rounds_of(answers: Answers, prompts: tuple[Prompt, ...]) -> list[Round]:
    """The same requests for an engine of the version's own folder."""
    by_id = {prompt.id: prompt.token_ids for prompt in prompts}
    requests = {
        key: SampleRequest(key=key, token_ids=by_id[r.prompt_id], seed=r.seed)
        for key, r in keyed(answers)
    }
    return [
        (
            tuple(r for key, r in requests.items() if key.startswith(kind)),
            Sampling(temperature=temperature, max_tokens=MAX_TOKENS, version=0),
        )
        for kind, temperature in (("drawn", 1.0), ("greedy", None))
    ]


@pytest.fixture(scope="class", params=["qwen2-gloo", "llama3-object_store"])
def case(request, trained) -> Iterator[tuple[VllmEngine, Trained]]:
    name, _, transport = request.param.partition("-")
    with policy_tier(trained[name], transport=transport) as engine:
        yield engine, trained[name]


class TestOtherFamilies:
    """Biases in buckets smaller than a tensor; scaled rotary frequencies."""

    def test_the_engine_is_the_trainers_policy_after_each_update(self, case, prompts):
        engine, trained = case
        largest = max(t.numel() * t.element_size() for _, t in trained.streams[0])
        assert (largest > 1 << 20) == ("qwen2" in str(trained.start))
        check_versions(engine, trained, prompts)

    def test_tensors_of_several_dtypes_give_the_policy_of_their_values(self, case, prompts):
        engine, trained = case
        kinds = (torch.float32, torch.bfloat16, torch.float16)
        stream = [(n, t.to(kinds[place % 3])) for place, (n, t) in enumerate(trained.streams[0])]
        engine.load_weights(iter(stream), version=50)
        model = reference_model(trained.start)
        model.load_state_dict({name: tensor.double() for name, tensor in stream})
        _require_policy(engine, model, prompts)

    @pytest.mark.parametrize("fault", ["missing", "part", "twice", "unknown", "shape"])
    def test_a_stream_that_does_not_fit_is_refused_until_a_good_one_comes(
        self, case, prompts, fault
    ):
        engine, trained = case
        bad, named = _spoilt(trained.streams[0], fault)
        with pytest.raises(RolloutError, match=named) as refusal:
            engine.load_weights(iter(bad), version=60)
        assert "config.json" in str(refusal.value)
        with pytest.raises(RolloutError, match="no complete set of weights"):
            ask(engine, prompts)
        engine.load_weights(iter(trained.streams[1]), version=61)
        _require_policy(engine, reference_model(trained.exports[1]), prompts)

    def test_an_update_that_broke_midway_leaves_nothing_to_the_next(self, case, prompts):
        engine, trained = case

        def broken() -> Iterator[tuple[str, Tensor]]:
            yield from trained.streams[0][: len(trained.streams[0]) // 2]
            raise OSError("the trainer's disk is full")

        with pytest.raises(OSError, match="disk is full"):
            engine.load_weights(broken(), version=65)
        with pytest.raises(RolloutError, match="no complete set of weights"):
            ask(engine, prompts)
        engine.load_weights(iter(trained.streams[1]), version=66)
        _require_policy(engine, reference_model(trained.exports[1]), prompts)

    def test_a_replica_refuses_to_sample_from_a_version_that_it_does_not_hold(self, case):
        engine, trained = case
        engine.load_weights(iter(trained.streams[0]), version=70)
        (replica,) = engine._fleet.ready
        stale = Sampling(temperature=1.0, max_tokens=2, version=69)
        request = SampleRequest(key="a", token_ids=(3,), seed=1)
        with pytest.raises(RolloutError, match=r"version 69, but this replica holds 70"):
            engine._fleet.cluster.wait([replica.call("exchange", [request], stale, 1.0)])

    def test_a_prompt_longer_than_the_model_is_refused(self, case):
        engine, trained = case
        engine.load_weights(iter(trained.streams[0]), version=80)
        long = prompt_of("long", [3] * (MAX_LEN - MAX_TOKENS + 1))
        with pytest.raises(RolloutError, match=f"prompt long has {len(long.token_ids)} tokens"):
            ask(engine, (long,))


def _spoilt(stream: list[tuple[str, Tensor]], fault: str) -> tuple[list[tuple[str, Tensor]], str]:
    """A stream with one fault, and what the refusal must say."""
    names = [name for name, _ in stream]
    whole = names.index("model.layers.1.mlp.down_proj.weight")
    part = names.index("model.layers.1.self_attn.k_proj.weight")
    name, tensor = stream[whole]
    faults = {
        "missing": ([*stream[:whole], *stream[whole + 1 :]], f"never came: {name}"),
        "part": ([*stream[:part], *stream[part + 1 :]], f"never came: {names[part]}"),
        "twice": ([*stream, (name, tensor.clone())], f"more than once: {name}"),
        "unknown": (
            [*stream, ("model.layers.9.mlp.down_proj.weight", tensor.clone())],
            "layers.9.mlp",
        ),
        "shape": (
            [*stream[:whole], (name, tensor[:, 1:]), *stream[whole + 1 :]],
            rf"another shape: {name} \({tensor.shape[0]}, {tensor.shape[1] - 1}\) for",
        ),
    }
    return faults[fault]


def _require_policy(engine: VllmEngine, model, prompts) -> None:
    gap, behind = gaps_from(model, ask(engine, prompts), prompts)
    assert gap <= ROUNDING
    assert behind < ROUNDING


@pytest.fixture(scope="class")
def pair(trained) -> Iterator[VllmEngine]:
    with policy_tier(trained["smollm2"], tensor=2, transport="gloo") as engine:
        yield engine


class TestTensorParallelEngine:
    """Two processes, a tied output layer split over both."""

    def test_the_engine_is_the_trainers_policy_after_each_update(
        self, pair, trained, prompts, monkeypatch
    ):
        answered, audits = pair._fleet._call_all, []

        def heard(replicas, method, *args):
            results = answered(replicas, method, *args)
            audits.extend(results if method == "end_update" else [])
            return results

        monkeypatch.setattr(pair._fleet, "_call_all", heard)
        first = _first(trained["smollm2"], 3)
        check_versions(pair, first, prompts)
        counts = [(audit.tensors, audit.problems) for audit in audits]
        assert counts == [(len(stream), ()) for stream in first.streams]

    def test_a_missing_part_is_refused(self, pair, trained):
        bad, named = _spoilt(trained["smollm2"].streams[0], "part")
        with pytest.raises(RolloutError, match=named):
            pair.load_weights(iter(bad), version=60)


def _first(trained: Trained, count: int) -> Trained:
    return Trained(
        start=trained.start, streams=trained.streams[:count], exports=trained.exports[:count]
    )


def test_too_small_a_kv_cache_is_refused_and_nothing_is_left(tmp_path):
    folder = write_policy(tmp_path / "long", "qwen3", max_position_embeddings=8192)
    with (
        pytest.raises(RolloutError, match=r"KV cache.*raise rollout\.vllm\.kv_cache_mib"),
        tier(folder, kv_cache_mib=1, max_model_len=8192),
    ):
        pass
    assert _rays() == []


def _rays() -> list[str]:
    """Ray's processes below this one, but for those that are dead already."""
    dead = psutil.STATUS_ZOMBIE
    children = psutil.Process().children(recursive=True)
    return [p.name() for p in children if "ray" in p.name() and p.status() != dead]
