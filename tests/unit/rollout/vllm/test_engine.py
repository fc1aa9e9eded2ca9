"""Groups as they were allocated, from replicas that are not always there."""

import math

import pytest

from dynamo_megatron.assets import TINY_POLICY
from dynamo_megatron.rollout.errors import RolloutError
from dynamo_megatron.rollout.seeds import rollout_seed
from dynamo_megatron.rollout.vllm import dispatch
from dynamo_megatron.rollout.vllm.engine import EngineSettings, VllmEngine
from dynamo_megatron.types import GroupSizes, Prompt
from tests.unit.rollout.vllm.scripted import ScriptedFleet, answer, die, endlessly, healthy

PROMPTS = [
    Prompt(id=name, text=name, token_ids=(3, 4, 5), answer="7", source="test")
    for name in ("a", "b", "c")
]
STEP, SEED = 4, 17


@pytest.fixture(autouse=True)
def no_idle_waits(monkeypatch):
    monkeypatch.setattr(dispatch, "ANSWER_WITHIN_S", 0.01)


def engine_on(fleet: ScriptedFleet, **changes) -> VllmEngine:
    values = {
        "max_tokens": 8,
        "max_model_len": 16,
        "window": 4,
        "probe_tokens": 4,
        "hang_timeout_s": 1.0,
    }
    return VllmEngine(fleet, EngineSettings(**(values | changes)), model_dir=str(TINY_POLICY))


def generate(engine: VllmEngine, *counts: int, prompts=PROMPTS, **changes):
    sizes = GroupSizes(prompt_ids=tuple(p.id for p in prompts), sizes=counts)
    values = {"step": STEP, "temperature": 1.0, "seed": SEED}
    return engine.generate(prompts, sizes, **(values | changes))


def places(rollouts) -> list[tuple[str, int]]:
    return [(rollout.prompt_id, rollout.index) for rollout in rollouts]


@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_each_prompt_gets_exactly_its_number_in_order(replicas):
    rollouts = generate(engine_on(healthy(replicas)), 2, 0, 5)
    assert places(rollouts) == [("a", 0), ("a", 1), *(("c", k) for k in range(5))]


def test_seeds_are_those_of_run_step_prompt_and_number_whatever_the_replicas():
    results = []
    for fleet in (healthy(1), healthy(3), ScriptedFleet({0: [(answer(1), die), ()], 1: [()]})):
        results.append([(r.seed, r.token_ids) for r in generate(engine_on(fleet), 4, 4, 4)])
    wanted = [rollout_seed(SEED, STEP, name, k) for name in "abc" for k in range(4)]
    assert results == [[(seed, (seed % 97, 2)) for seed in wanted]] * 3


def test_a_later_round_goes_on_where_the_one_before_ended():
    engine = engine_on(healthy(2))
    assert places(generate(engine, 2, 1, 0)) == [("a", 0), ("a", 1), ("b", 0)]
    later = generate(engine, 1, 2, 0, first_index=[2, 1, 0])
    assert places(later) == [("a", 2), ("b", 1), ("b", 2)]
    assert later[0].seed == rollout_seed(SEED, STEP, "a", 2)


def test_rollouts_are_told_one_by_one_as_they_come():
    told = []
    rollouts = generate(engine_on(healthy(2)), 3, 3, 3, on_rollout=told.append)
    assert sorted(places(told)) == sorted(places(rollouts))


def test_every_rollout_has_the_version_of_the_weights_and_its_text():
    fleet = healthy(1)
    fleet.version = 9
    engine = engine_on(fleet)
    (rollout,) = generate(engine, 1, prompts=PROMPTS[:1])
    assert rollout.weight_version == 9
    assert rollout.text == engine._tokenizer.decode(rollout.token_ids, skip_special_tokens=True)
    assert rollout.logprobs == (-0.5, -0.5)


def test_timings_say_which_replica_sampled_what_when():
    engine = engine_on(healthy(2))
    generate(engine, 3, 3, 3)
    assert len(engine.timings) == 9
    assert {timing.replica for timing in engine.timings} == {0, 1}
    assert {(t.started_s, t.finished_s, t.tokens) for t in engine.timings} == {(1.0, 2.0, 2)}
    generate(engine, 1, 0, 0)
    assert len(engine.timings) == 1


def test_the_longest_prompt_so_far_goes_first():
    fleet = healthy(1)
    engine = engine_on(fleet, window=1)
    engine._lengths.observe([("a", 2), ("b", 8), ("c", 5)])
    generate(engine, 1, 1, 1)
    assert fleet.history[0].given == ["b/0", "c/0", "a/0"]


def test_nothing_is_sampled_before_weights_are_loaded():
    fleet = healthy(1)
    fleet.version = None
    with pytest.raises(RolloutError, match="Call load_weights before generate"):
        generate(engine_on(fleet), 1, 1, 1)


def test_a_prompt_longer_than_the_model_is_refused_before_anything_is_sent():
    fleet = healthy(1)
    with pytest.raises(RolloutError):
        generate(engine_on(fleet, max_model_len=10), 1, 1, 1)
    assert fleet.history[0].given == []


@pytest.mark.parametrize("temperature", [0.001, 2.5])
def test_a_temperature_that_vllm_would_change_or_refuse_is_refused_at_once(temperature):
    fleet = healthy(1)
    with pytest.raises(RolloutError, match=r"samples at 0\.01 to 2 only"):
        generate(engine_on(fleet), 1, 1, 1, temperature=temperature)
    assert fleet.history[0].given == []


@pytest.mark.parametrize("logprob", [math.nan, -math.inf, math.inf])
def test_logprobs_that_are_not_finite_end_the_run_and_name_the_rollout(logprob):
    fleet = ScriptedFleet({0: [endlessly(answer(logprob=logprob))]})
    with pytest.raises(RolloutError, match="rollout 0 of prompt a are not finite"):
        generate(engine_on(fleet), 1, 1, 1)


def test_what_a_listener_raises_comes_through_and_the_rest_is_given_up():
    fleet = healthy(2)

    def refuse(rollout):
        raise KeyError(rollout.prompt_id)

    with pytest.raises(KeyError):
        generate(engine_on(fleet), 3, 3, 3, on_rollout=refuse)
    assert fleet.cancelled == 1
