"""The stages between rollouts and update, on values by hand."""

from __future__ import annotations

import pytest
import torch

from dynamo_megatron.algo.history import SuccessHistory
from dynamo_megatron.config import AlgorithmConfig, AllocationConfig
from dynamo_megatron.evaluate.heldout import HeldoutResult
from dynamo_megatron.stages.advantages import num_zero_groups, rollout_advantages
from dynamo_megatron.stages.allocation import allocate, check_allocation, num_cold, observed
from dynamo_megatron.stages.metrics import rollout_metrics, update_metrics
from dynamo_megatron.state import LoopState
from dynamo_megatron.summary import summarize
from dynamo_megatron.types import (
    Counters,
    DataCursor,
    FinishReason,
    GroupSizes,
    Prompt,
    Rollout,
    RolloutGroup,
    UpdateStats,
    Verdict,
    VerdictStatus,
)


def prompt(name: str, source: str = "s") -> Prompt:
    return Prompt(id=name, text=name, token_ids=(1,), answer="", source=source)


def group(name: str, rewards: list[float | None], source: str = "s") -> RolloutGroup:
    """None stands for a failed verification."""
    rollouts = tuple(
        Rollout(
            prompt_id=name,
            index=k,
            token_ids=(1,) * (k + 1),
            logprobs=(0.0,) * (k + 1),
            finish_reason=FinishReason.LENGTH if k == 2 else FinishReason.STOP,
            weight_version=0,
            seed=k,
            text="",
        )
        for k in range(len(rewards))
    )
    verdicts = tuple(
        Verdict(reward=0.0, status=VerdictStatus.ERROR)
        if reward is None
        else Verdict(reward=reward, formatted=True)
        for reward in rewards
    )
    return RolloutGroup(prompt=prompt(name, source), rollouts=rollouts, verdicts=verdicts)


BOUNDS = {"n_low": 8, "n_high": 24, "n_mean": 16, "init": 8}


def test_allocation_by_hand():
    # k of 16: 8 -> P .2667, 2 -> .1167, 15 -> mastered, 0 -> floor; square roots .5164, .3416
    history = SuccessHistory({"a": (8, 16), "b": (2, 16), "c": (15, 16), "d": (0, 16)})
    prompts = [prompt(name) for name in "abcd"]
    config = AllocationConfig(**BOUNDS)
    # 32 above the floor of 8 each; weights .5164, .3416, .01, .01: a is full at 24, the 16 left
    # go to b, c, d in proportion: 15.11, .44, .44
    assert allocate(prompts, history, config).sizes == (24, 23, 9, 8)
    assert num_cold(prompts, history, config) == 0


def test_unknown_prompts_share_evenly_and_count_as_cold():
    prompts = [prompt(name) for name in "abc"]
    config = AllocationConfig(**BOUNDS)
    assert allocate(prompts, SuccessHistory(), config).sizes == (16, 16, 16)
    assert num_cold(prompts, SuccessHistory(), config) == 3


def test_uniform_allocation_looks_at_no_history():
    history = SuccessHistory({"a": (8, 16)})
    config = AllocationConfig(policy="uniform", n_mean=5)
    sizes = allocate([prompt("a"), prompt("b")], history, config)
    assert sizes.sizes == (5, 5)


def test_a_budget_that_some_step_could_not_spend_is_refused():
    # pydantic refuses it in a file; this guards code that builds the section itself
    config = AllocationConfig.model_construct(policy="dynamo", **(BOUNDS | {"init": 20}))
    with pytest.raises(ValueError, match="init = 20"):
        check_allocation(config, 4)


def test_failed_verifications_are_not_in_the_history():
    groups = [group("a", [1.0, None, 0.0]), group("b", [None, None])]
    history = observed(SuccessHistory({"a": (1, 2)}), groups, threshold=0.5)
    assert dict(history.counts) == {"a": (2.0, 4.0)}


def test_success_is_a_reward_at_the_threshold():
    history = observed(SuccessHistory(), [group("a", [0.4, 0.5, 0.9])], threshold=0.5)
    assert dict(history.counts) == {"a": (2.0, 3.0)}


def test_advantages_of_ragged_groups_by_hand():
    # a: mean .5, std .7071; b: one verified -> 0; c: all equal -> 0
    groups = [group("a", [1.0, 0.0]), group("b", [1.0, None]), group("c", [1.0, 1.0, 1.0])]
    a, b, c = rollout_advantages(groups, AlgorithmConfig())
    torch.testing.assert_close(a, torch.tensor([0.70710578, -0.70710578]))
    assert b.tolist() == [0.0, 0.0]
    assert c.tolist() == [0.0, 0.0, 0.0]
    assert num_zero_groups((a, b, c)) == 2


def test_prompt_weighting_gives_prompts_equal_weight():
    config = AlgorithmConfig.model_validate(
        {"advantage": {"normalize": "none"}, "allocation": {"weighting": "prompt"}}
    )
    # 6 rollouts, 2 prompts: weights (6/2)/2 = 1.5 and (6/2)/4 = .75
    a, b = rollout_advantages([group("a", [1.0, 0.0]), group("b", [1.0, 0.0, 0.0, 1.0])], config)
    torch.testing.assert_close(a, torch.tensor([0.75, -0.75]))
    torch.testing.assert_close(b, torch.tensor([0.375, -0.375, -0.375, 0.375]))


def test_rollout_metrics_by_hand():
    groups = [group("a", [1.0, None, 0.0], "x"), group("b", [1.0], "y")]
    sizes = GroupSizes(prompt_ids=("a", "b"), sizes=(3, 1))
    metrics = rollout_metrics(groups, sizes, threshold=0.5)
    assert metrics["rollout/num"] == 4
    assert metrics["rollout/tokens"] == 1 + 2 + 3 + 1
    assert metrics["rollout/truncated"] == 1
    assert metrics["reward/failures"] == 1
    assert metrics["reward/pass_rate"] == pytest.approx(2 / 3)
    assert metrics["reward/x/mean"] == 0.5 and metrics["reward/y/mean"] == 1.0
    assert metrics["allocation/hist"] == {"1": 1, "3": 1}
    assert metrics["allocation/nonuniform"] == 1.0


def update(**changes) -> UpdateStats:
    values = {
        "loss": 1.0,
        "entropy": 0.5,
        "clip_fraction": 0.0,
        "ratio_max": 1.0,
        "approx_kl": 0.0,
        "reference_kl": 0.0,
        "grad_norm": 2.0,
        "learning_rate": 1e-3,
        "skipped": False,
        "num_tokens": 10,
    }
    return UpdateStats(**(values | changes))


def test_update_metrics_weigh_by_tokens():
    metrics = update_metrics(
        [update(), update(loss=4.0, num_tokens=30, ratio_max=1.5, learning_rate=2e-3, skipped=True)]
    )
    assert metrics["train/loss"] == pytest.approx((1.0 * 10 + 4.0 * 30) / 40)
    assert metrics["train/ratio_max"] == 1.5
    assert metrics["train/lr"] == 2e-3
    assert metrics["train/skipped"] == 1.0


def result(step: int, rate: float) -> HeldoutResult:
    return HeldoutResult(
        step=step,
        num_problems=8,
        pass_at_1=rate,
        low=0.1,
        high=0.9,
        format_rate=1.0,
        failures=0,
    )


def test_the_state_survives_json_exactly():
    state = LoopState(
        step=7,
        cursor=DataCursor(epoch=2, position=5),
        history=SuccessHistory({"a": (1 / 3, 2 / 3)}),
        epoch_history=SuccessHistory({"a": (0.1, 0.2)}),
        counters=Counters(truncated=3, skipped_steps=1),
        evaluations=(result(0, 0.1 + 0.2),),
    )
    assert LoopState.from_json(state.to_json()) == state


def test_the_summary_says_before_after_where_and_what_next(tmp_path):
    state = LoopState(step=5, evaluations=(result(0, 0.25), result(5, 0.5)))
    (tmp_path / "hf" / "step_000005").mkdir(parents=True)
    text = summarize(tmp_path, state, 5)
    assert "25.0 %" in text and "50.0 %" in text
    assert str(tmp_path / "hf" / "step_000005") in text
    assert "run.num_steps=10" in text
    stopped = summarize(tmp_path, LoopState(step=3), 5)
    assert "3 of 5 steps done" in stopped and "run.resume=if_present" in stopped
