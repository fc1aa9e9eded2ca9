"""What replicas sample: what was asked for, on any number of them, as transformers has it."""

from __future__ import annotations

import os
import random
import time
from collections import Counter
from dataclasses import dataclass, field, replace

import pytest
import torch

from dynamo_megatron.assets import TINY_POLICY
from dynamo_megatron.hf.reader import SafetensorsReader
from dynamo_megatron.rollout.errors import RolloutError
from dynamo_megatron.rollout.hf_engine import HfEngine
from dynamo_megatron.rollout.seeds import rollout_seed
from dynamo_megatron.rollout.vllm.engine import VllmEngine
from dynamo_megatron.types import FinishReason, Prompt, Rollout
from tests.problems import tiny_prompts
from tests.tier.conftest import (
    ROUNDING,
    STOP,
    copy_with_defaults,
    gaps_of,
    gumbel_noise,
    lead_over,
    logprobs_of,
    reference_model,
    sizes_of,
    teacher_forced,
    tier,
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]  # three tiers in one fixture

REPLICAS = (1, 2, 3)
STEP, SEED, VERSION = 5, 17, 4
NUM_PROMPTS = 64
# 0 and 1 are sizes too; the largest is more than a replica decodes together.
COUNTS = tuple((0, 1, 2, 3, 40, 1, 2, 1)[place % 8] for place in range(NUM_PROMPTS))
LATER = tuple((2, 0, 1, 4)[place % 4] for place in range(NUM_PROMPTS))
TEMPERATURES = (0.6, 0.7)


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """What a listener heard, and when (seconds since the epoch)."""

    rollout: Rollout
    at_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """What a tier of some number of replicas answered.

    Attributes:
        early: the message of a request before any weights.
        first: rollouts of COUNTS.
        told: what the listener heard of ``first``.
        finished_s: when each of ``first`` was complete.
        replicas: which of them sampled.
        later: LATER more of each prompt, numbered on.
        whole: both rounds in one.
        permuted: as ``first``, the prompts in another order.
        greedy: one of each prompt.
        at: two of each prompt by temperature.
        top_k_1: as ``first``, from the most likely token only.
        top_p: two of each prompt, from half of the mass.
        pids: processes of the replicas.
    """

    early: str
    first: list[Rollout]
    told: list[Told]
    finished_s: list[float]
    replicas: set[int]
    later: list[Rollout]
    whole: list[Rollout]
    permuted: list[Rollout]
    greedy: list[Rollout]
    at: dict[float, list[Rollout]]
    top_k_1: list[Rollout]
    top_p: list[Rollout]
    pids: list[int] = field(default_factory=list)


@pytest.fixture(scope="module")
def prompts() -> tuple[Prompt, ...]:
    return tiny_prompts(NUM_PROMPTS)


@pytest.fixture(scope="module")
def model():
    return reference_model(TINY_POLICY)


@pytest.fixture(scope="module")
def model32():
    return reference_model(TINY_POLICY, torch.float32)


@pytest.fixture(scope="module")
def sessions(prompts, tmp_path_factory) -> dict[int, Session]:
    """A tier of each size in turn.

    That of two replicas is given a folder whose generation_config.json would change everything.
    """
    misleading = copy_with_defaults(
        tmp_path_factory.mktemp("defaults") / "policy",
        temperature=0.05,
        top_k=1,
        top_p=0.1,
        repetition_penalty=3.0,
        eos_token_id=[STOP, 20],
        max_new_tokens=3,
    )
    found = {}
    for replicas in REPLICAS:
        folder = misleading if replicas == 2 else TINY_POLICY
        with tier(folder, replicas=replicas) as engine:
            found[replicas] = _session(engine, prompts)
    return found


def _session(engine: VllmEngine, prompts: tuple[Prompt, ...]) -> Session:
    def sample(counts, *, at=1.0, engine=engine, prompts=prompts, **more) -> list[Rollout]:
        sizes = sizes_of(prompts, counts)
        return engine.generate(prompts, sizes, step=STEP, temperature=at, seed=SEED, **more)

    with pytest.raises(RolloutError) as early:
        sample(COUNTS)
    with SafetensorsReader(TINY_POLICY) as reader:
        engine.load_weights(((n, reader.tensor(n)) for n in reader.names()), version=VERSION)
    told: list[Told] = []
    first = sample(COUNTS, on_rollout=lambda r: told.append(Told(rollout=r, at_s=time.time())))
    timings = engine.timings
    shuffled = list(zip(prompts, COUNTS, strict=True))
    random.Random(3).shuffle(shuffled)
    return Session(
        early=str(early.value),
        first=first,
        told=told,
        finished_s=[timing.finished_s for timing in timings],
        replicas={timing.replica for timing in timings},
        later=sample(LATER, first_index=COUNTS),
        whole=sample([a + b for a, b in zip(COUNTS, LATER, strict=True)]),
        permuted=sample(
            [count for _, count in shuffled], prompts=tuple(prompt for prompt, _ in shuffled)
        ),
        greedy=sample([1] * NUM_PROMPTS, at=None),
        at={temperature: sample([2] * NUM_PROMPTS, at=temperature) for temperature in TEMPERATURES},
        top_k_1=sample(COUNTS, engine=_changed(engine, top_k=1)),
        top_p=sample([2] * NUM_PROMPTS, engine=_changed(engine, top_p=0.5)),
        pids=[replica.facts.process.pid for replica in engine._fleet.ready],
    )


def _changed(engine: VllmEngine, **changes) -> VllmEngine:
    """Another engine over the same replicas."""
    settings = replace(engine._settings, **changes)
    return VllmEngine(engine._fleet, settings, model_dir=str(TINY_POLICY))


@pytest.fixture(params=REPLICAS, ids=lambda replicas: f"{replicas}-replicas")
def session(request, sessions) -> Session:
    return sessions[request.param]


def _pairs(prompts, rollouts) -> list[tuple[Prompt, Rollout]]:
    by_id = {prompt.id: prompt for prompt in prompts}
    return [(by_id[rollout.prompt_id], rollout) for rollout in rollouts]


def _keys(rollouts) -> list[tuple[str, int]]:
    return [(rollout.prompt_id, rollout.index) for rollout in rollouts]


class TestWhatWasAskedFor:
    def test_every_prompt_gets_as_many_responses_as_it_was_allocated(self, session, prompts):
        rows = zip(prompts, COUNTS, strict=True)
        want = [(prompt.id, k) for prompt, count in rows for k in range(count)]
        assert _keys(session.first) == want

    def test_the_work_is_shared_by_all_replicas(self, sessions):
        assert {n: session.replicas for n, session in sessions.items()} == {
            n: set(range(n)) for n in REPLICAS
        }

    def test_a_later_round_continues_the_numbers_of_the_first(self, session, prompts):
        rows = zip(prompts, COUNTS, LATER, strict=True)
        want = [(prompt.id, k) for prompt, a, b in rows for k in range(a, a + b)]
        assert _keys(session.later) == want

    def test_two_rounds_are_one_round_of_their_sum(self, session, model, prompts):
        rounds = {(r.prompt_id, r.index): r for r in (*session.first, *session.later)}
        assert len(rounds) == len(session.whole)
        for rollout in session.whole:
            assert rollout.seed == rounds[rollout.prompt_id, rollout.index].seed
        _assert_same_up_to_ties(session.whole, list(rounds.values()), model, prompts)

    def test_the_order_of_the_prompts_changes_nothing_but_the_order(self, session, model, prompts):
        assert Counter(_keys(session.permuted)) == Counter(_keys(session.first))
        _assert_same_up_to_ties(session.permuted, session.first, model, prompts)

    def test_every_seed_is_that_of_run_step_prompt_and_number(self, session):
        for rollout in (*session.first, *session.later):
            want = rollout_seed(SEED, STEP, rollout.prompt_id, rollout.index)
            assert rollout.seed == want

    def test_the_listener_hears_of_each_response_once_and_before_the_last_is_there(self, session):
        assert Counter(_keys(told.rollout for told in session.told)) == Counter(
            _keys(session.first)
        )
        by_key = {(r.prompt_id, r.index): r for r in session.first}
        assert all(by_key[t.rollout.prompt_id, t.rollout.index] is t.rollout for t in session.told)
        early = sum(told.at_s < max(session.finished_s) for told in session.told)
        assert early > len(session.told) / 2

    def test_every_response_says_which_weights_it_came_from(self, session):
        assert {rollout.weight_version for rollout in session.first} == {VERSION}

    def test_nothing_is_sampled_before_weights_came(self, session):
        assert "no complete set of weights is loaded" in session.early

    def test_no_replica_is_left(self, session):
        assert session.pids
        for pid in session.pids:
            with pytest.raises(ProcessLookupError):
                os.kill(pid, 0)


class TestTokens:
    def test_every_token_is_the_draw_that_its_seed_makes_from_the_policy(
        self, session, model, prompts
    ):
        pairs = _pairs(prompts, session.first)
        assert sum(len(rollout.token_ids) for rollout in session.first) >= 5000
        for (_, rollout), logits_TV in zip(pairs, teacher_forced(model, pairs), strict=True):
            noise_TV = gumbel_noise(rollout.seed, *logits_TV.shape)
            lead_T = lead_over(logits_TV.double() + noise_TV, torch.tensor(rollout.token_ids))
            assert lead_T.max() < ROUNDING, f"{rollout} at token {int(lead_T.argmax())}"

    @pytest.mark.parametrize("replicas", REPLICAS[1:])
    def test_the_number_of_replicas_changes_no_token(self, sessions, model, prompts, replicas):
        _assert_same_up_to_ties(sessions[replicas].first, sessions[1].first, model, prompts)

    def test_responses_end_at_their_stop_token_or_at_the_limit(self, session):
        reasons = Counter(rollout.finish_reason for rollout in session.first)
        assert min(reasons[FinishReason.STOP], reasons[FinishReason.LENGTH]) >= 10
        for rollout in session.first:
            assert STOP not in rollout.token_ids[:-1]
            stopped = rollout.token_ids[-1] == STOP
            assert stopped == (rollout.finish_reason is FinishReason.STOP)
            assert stopped or len(rollout.token_ids) == 24

    def test_greedy_responses_are_those_of_the_embedded_engine(self, session, prompts):
        engine = HfEngine(
            TINY_POLICY,
            max_tokens=24,
            batch_size=256,
            stop_token_ids=(STOP,),
            pad_token_id=0,
            version=VERSION,
        )
        want = engine.generate(
            prompts, sizes_of(prompts, [1] * NUM_PROMPTS), step=STEP, temperature=None, seed=SEED
        )
        assert [r.token_ids for r in session.greedy] == [r.token_ids for r in want]
        assert [r.finish_reason for r in session.greedy] == [r.finish_reason for r in want]
        assert [r.text for r in session.greedy] == [r.text for r in want]
        for ours, theirs in zip(session.greedy, want, strict=True):
            assert ours.logprobs == pytest.approx(theirs.logprobs, abs=ROUNDING)


class TestLogprobs:
    @pytest.mark.parametrize("temperature", [1.0, *TEMPERATURES])
    def test_they_are_the_policys_at_the_sampling_temperature(
        self, session, model, model32, prompts, temperature
    ):
        rollouts = session.first if temperature == 1.0 else session.at[temperature]
        pairs = _pairs(prompts, rollouts)
        exact, single = teacher_forced(model, pairs), teacher_forced(model32, pairs)
        gaps_T = gaps_of(exact, rollouts, temperature)
        # A few tokens in ten thousand are ill-conditioned: there float32 itself is no better.
        own = logprobs_of(exact, rollouts, temperature) - logprobs_of(single, rollouts, temperature)
        assert (gaps_T <= ROUNDING).double().mean() > 0.999
        assert gaps_T.max() <= max(ROUNDING, 2 * float(own.abs().max()))
        if temperature != 1.0:  # logprobs before the temperature would be far away
            assert gaps_of(exact, rollouts).max() > 0.1

    def test_greedy_ones_are_those_at_temperature_1(self, session, model, prompts):
        logits = teacher_forced(model, _pairs(prompts, session.greedy))
        assert gaps_of(logits, session.greedy).max() <= ROUNDING
        for scores_TV, rollout in zip(logits, session.greedy, strict=True):
            assert lead_over(scores_TV, torch.tensor(rollout.token_ids)).max() < ROUNDING


class TestCutDistributions:
    def test_from_the_one_most_likely_token_sampling_is_greedy(self, session):
        greedy = {rollout.prompt_id: rollout.token_ids for rollout in session.greedy}
        assert all(rollout.token_ids == greedy[rollout.prompt_id] for rollout in session.top_k_1)
        assert all(logp == 0.0 for rollout in session.top_k_1 for logp in rollout.logprobs)

    def test_from_half_of_the_mass_no_token_outside_of_it_is_drawn(self, session, model, prompts):
        outside = 0
        logits = teacher_forced(model, _pairs(prompts, session.top_p))
        for scores_TV, rollout in zip(logits, session.top_p, strict=True):
            tokens_T = torch.tensor(rollout.token_ids)
            probs_TV = scores_TV.double().softmax(-1)
            own_T1 = probs_TV.gather(1, tokens_T[:, None])
            # Mass of what is more likely: the nucleus ends where it reaches a half.
            before_T = (probs_TV * (probs_TV > own_T1)).sum(1)
            assert before_T.max() < 0.5 + ROUNDING
            kept_T1 = own_T1 / torch.tensor(rollout.logprobs).double().exp()[:, None]
            outside += int((kept_T1 < 0.99).sum())
        assert outside > 50, "logprobs are those of the cut distribution"


def _assert_same_up_to_ties(rollouts, others, model, prompts) -> None:
    """The same tokens; where a response first differs, either token was within rounding."""
    theirs = {(r.prompt_id, r.index): r for r in others}
    for rollout in rollouts:
        other = theirs[rollout.prompt_id, rollout.index]
        if rollout.token_ids == other.token_ids:
            continue
        rows = zip(rollout.token_ids, other.token_ids, strict=False)
        place = next(place for place, (a, b) in enumerate(rows) if a != b)
        ((logits_TV),) = teacher_forced(model, _pairs(prompts, [rollout]))
        scores_TV = logits_TV.double() + gumbel_noise(rollout.seed, *logits_TV.shape)
        tokens = torch.tensor([rollout.token_ids[place], other.token_ids[place]])
        behind = scores_TV[place].max() - scores_TV[place, tokens]
        assert behind.max() < ROUNDING, f"{rollout} and {other} at token {place}"
