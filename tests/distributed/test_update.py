"""What an update does besides the gradient: refusing, sharing, penalising, packing."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from dynamo_megatron.config import ClipConfig, ModulationConfig
from dynamo_megatron.stages.modulation import current_modulation
from dynamo_megatron.types import TokenInputs
from tests.policies import (
    Layout,
    hf_gradients,
    hf_weights,
    optimizer_settings,
    plan_for,
    policy_on,
    prepared,
    random_batch,
    relative_distance,
    write_qwen3,
)
from tests.ranks import run_on_ranks


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return write_qwen3(tmp_path_factory.mktemp("qwen3"))


@pytest.mark.parametrize("layout", [Layout(data=2), Layout(tensor=2, pipeline=2)], ids=str)
@pytest.mark.parametrize("distributed", [False, True], ids=["plain", "distributed"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")], ids=str)
def test_a_non_finite_gradient_on_one_rank_skips_the_update_on_all(
    model_dir, layout, distributed, bad
):
    batch = random_batch()

    def work():
        settings = optimizer_settings("adam", distributed=distributed)
        with policy_on(model_dir, layout, optimizer=settings) as policy:
            plan = plan_for(policy, batch, micro_batch_sequences=2)
            inputs, _, _ = prepared(policy, batch, plan, dynamo=False)
            before = hf_weights(policy)
            poisoned = replace(inputs, advantages=inputs.advantages.clone())
            poisoned.advantages[-1] = bad  # one token, owned by one data-parallel rank
            (skipped,) = policy.update(plan, poisoned)
            unchanged = all(torch.equal(before[k], v) for k, v in hf_weights(policy).items())
            (applied,) = policy.update(plan, inputs)
            moved = any(not torch.equal(before[k], v) for k, v in hf_weights(policy).items())
            return skipped.skipped, unchanged, applied.skipped, moved, applied.learning_rate

    for skipped, unchanged, applied_skipped, moved, lr in run_on_ranks(work, layout.world_size):
        assert skipped and unchanged
        assert not applied_skipped and moved
        assert lr == pytest.approx(1e-3)


@pytest.mark.parametrize("layout", [Layout(data=2), Layout(tensor=2, data=2)], ids=str)
def test_the_distributed_optimizer_gives_the_plain_ones_weights(model_dir, layout):
    batch = random_batch()

    def work(distributed: bool):
        settings = optimizer_settings("adam", distributed=distributed)
        with policy_on(model_dir, layout, optimizer=settings) as policy:
            for _ in range(3):
                plan = plan_for(policy, batch, micro_batch_sequences=2)
                inputs, _, _ = prepared(policy, batch, plan, dynamo=True)
                policy.update(plan, inputs)
            return hf_weights(policy)

    plain = run_on_ranks(work, layout.world_size, False)[0]
    for sharded in run_on_ranks(work, layout.world_size, True):
        assert relative_distance(sharded, plain) < 1e-6


def test_a_rank_without_sequences_joins_in_with_dummies(model_dir):
    """One sequence over two data-parallel ranks: the other rank's rows are empty."""
    whole = random_batch()
    one = replace(
        whole,
        tokens=whole.tokens[:11],
        token_offsets=torch.tensor([0, 11]),
        prompt_lengths=torch.tensor([5]),
        response_offsets=torch.tensor([0, 6]),
        group_index=torch.tensor([0]),
        sampler_logp=whole.sampler_logp[:6],
        advantages=whole.advantages[:6],
    )

    def work(layout: Layout):
        with policy_on(model_dir, layout) as policy:
            plan = plan_for(policy, one)
            inputs, _, _ = prepared(policy, one, plan, dynamo=True)
            policy.accumulate_gradients(plan[0], inputs)
            return hf_gradients(policy)

    want = run_on_ranks(work, 1, Layout())[0]
    for layout in (Layout(data=2), Layout(tensor=2, data=2), Layout(pipeline=2, data=2)):
        for got in run_on_ranks(work, layout.world_size, layout):
            assert relative_distance(got, want) < 1e-5


def test_reference_penalty_is_zero_at_the_start_and_pulls_back_afterwards(model_dir):
    batch = random_batch()

    def work():
        with policy_on(model_dir, Layout(tensor=2), kl_coefficient=0.1) as policy:
            plan = plan_for(policy, batch)
            inputs, _, old = prepared(policy, batch, plan, dynamo=False)
            first = policy.reference_logp(batch, plan)
            policy.update(plan, replace(inputs, reference_logp=first))
            weights = hf_weights(policy)
            second = policy.reference_logp(batch, plan)
            untouched = all(torch.equal(weights[k], v) for k, v in hf_weights(policy).items())
            zero = replace(inputs, advantages=torch.zeros_like(inputs.advantages))
            (update,) = policy.update(plan, replace(zero, reference_logp=second))
            return old.stats.logp, first, second, untouched, update

    for logp, first, second, untouched, update in run_on_ranks(work, 2):
        assert torch.equal(first, logp), "at the start the policy is its own reference"
        assert torch.equal(second, first), "the reference does not move"
        assert untouched
        assert update.reference_kl > 0
        assert update.loss == pytest.approx(0.1 * update.reference_kl, rel=1e-5)


def test_current_statistics_equal_old_ones_at_the_first_update(model_dir):
    batch = random_batch()

    def work(stats: str):
        config = ModulationConfig(tau=0.5, gamma=10.0, stats=stats)
        with policy_on(model_dir, Layout(tensor=2)) as policy:
            plan = plan_for(policy, batch, micro_batch_sequences=2)
            inputs, modulated, old = prepared(policy, batch, plan, dynamo=True)
            rule = current_modulation(modulated.ranges, config, ClipConfig())
            if rule is not None:
                inputs = TokenInputs(advantages=batch.advantages, old_logp=old.stats.logp)
            policy.accumulate_gradients(plan[0], inputs, rule(plan[0]) if rule else None)
            return hf_gradients(policy)

    old, current = run_on_ranks(work, 2, "old")[0], run_on_ranks(work, 2, "current")[0]
    assert relative_distance(current, old) < 1e-6


def test_recomputing_activations_changes_nothing(model_dir):
    batch = random_batch()

    def work(recompute: bool):
        with policy_on(model_dir, Layout(tensor=2), recompute=recompute) as policy:
            plan = plan_for(policy, batch)
            inputs, _, _ = prepared(policy, batch, plan, dynamo=True)
            policy.accumulate_gradients(plan[0], inputs)
            return hf_gradients(policy)

    kept, recomputed = run_on_ranks(work, 2, False)[0], run_on_ranks(work, 2, True)[0]
    assert relative_distance(recomputed, kept) < 1e-6


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize(
    "layout",
    [Layout(), Layout(tensor=2), Layout(tensor=2, sequence=True), Layout(tensor=2, pipeline=2)],
    ids=["tp1", "tp2", "tp2+sp", "tp2xpp2"],
)
def test_the_fused_head_gives_the_same_statistics_and_gradients(tmp_path, layout, tied):
    model_dir, batch = write_qwen3(tmp_path, tied=tied), random_batch()

    def work(head: str):
        with policy_on(model_dir, layout, head=head) as policy:
            plan = plan_for(policy, batch, micro_batch_sequences=3)
            inputs, _, old = prepared(policy, batch, plan, dynamo=True)
            policy.accumulate_gradients(plan[0], inputs)
            return old, hf_gradients(policy)

    logits = run_on_ranks(work, layout.world_size, "logits")
    fused = run_on_ranks(work, layout.world_size, "fused")
    for (old, gradients), (fused_old, fused_gradients) in zip(logits, fused, strict=True):
        owned = old.owned
        assert torch.equal(owned, fused_old.owned)
        for name in ("logp", "entropy", "q"):
            got, want = getattr(fused_old.stats, name), getattr(old.stats, name)
            torch.testing.assert_close(got[owned], want[owned], rtol=0, atol=1e-5)
        assert relative_distance(fused_gradients, gradients) < 1e-5


def test_auto_takes_the_fused_head_above_the_budget(model_dir, monkeypatch):
    from dynamo_megatron.actor import model as actor_model

    batch = random_batch()

    def work(budget: int):
        calls = []
        linear = actor_model.token_stats_linear
        monkeypatch.setattr(
            actor_model, "token_stats_linear", lambda *a, **k: calls.append(1) or linear(*a, **k)
        )
        with policy_on(model_dir, Layout()) as policy:
            policy.module.head = replace(policy.module.head, logits_budget_bytes=budget)
            plan = plan_for(policy, batch, row_tokens=512)
            policy.token_stats(batch, plan)
        return len(calls)

    logits_bytes = batch.num_response_tokens * 104 * 4  # 101 columns padded to 104, float32
    assert run_on_ranks(work, 1, logits_bytes) == [0]
    assert run_on_ranks(work, 1, logits_bytes - 1) == [1]


@pytest.mark.parametrize("decay_updates", [1, 2, 3])
def test_a_run_shorter_than_its_warm_up_ends_in_the_middle_of_it(model_dir, decay_updates):
    batch = random_batch()

    def work():
        settings = optimizer_settings("adam", warmup_updates=4, decay_updates=decay_updates)
        with policy_on(model_dir, Layout(), optimizer=settings) as policy:
            plan = plan_for(policy, batch)
            inputs, _, _ = prepared(policy, batch, plan, dynamo=False)
            return [policy.update(plan, inputs)[0].learning_rate for _ in range(4)]

    assert run_on_ranks(work, 1)[0] == pytest.approx([0.25e-3, 0.5e-3, 0.75e-3, 1e-3])


@pytest.mark.parametrize(
    ("style", "want"),
    [
        ("constant", [0.5e-3, 1e-3, 1e-3, 1e-3, 1e-3]),
        # decay over updates 2 to 4, the last of which is at the minimum
        ("linear", [0.5e-3, 1e-3, 0.55e-3, 0.1e-3, 0.1e-3]),
    ],
)
def test_learning_rate_of_each_update(model_dir, style, want):
    batch = random_batch()

    def work():
        settings = optimizer_settings(
            "adam", warmup_updates=2, decay_style=style, decay_updates=4, min_lr=1e-4
        )
        with policy_on(model_dir, Layout(), optimizer=settings) as policy:
            plan = plan_for(policy, batch)
            inputs, _, _ = prepared(policy, batch, plan, dynamo=False)
            return [policy.update(plan, inputs)[0].learning_rate for _ in want]

    assert run_on_ranks(work, 1)[0] == pytest.approx(want)


def test_bfloat16_logits_are_never_copied_to_float32(model_dir, monkeypatch):
    """Megatron-Core's wrapper upcasts what a model returns; the head returns [T] statistics."""
    from dynamo_megatron.actor import model as actor_model

    batch = random_batch()

    def work():
        seen = []
        plain = actor_model.token_stats
        monkeypatch.setattr(
            actor_model,
            "token_stats",
            lambda logits, *a, **k: (
                seen.append((logits.dtype, len(logits))) or plain(logits, *a, **k)
            ),
        )
        with policy_on(model_dir, Layout(tensor=2), dtype=torch.bfloat16) as policy:
            plan = plan_for(policy, batch)
            inputs, _, old = prepared(policy, batch, plan, dynamo=True)
            (update,) = policy.update(plan, inputs)
            return seen, old.stats, update.skipped

    def exact():
        with policy_on(model_dir, Layout()) as policy:
            return policy.token_stats(batch, plan_for(policy, batch)).stats

    want = run_on_ranks(exact, 1)[0]
    for seen, stats, skipped in run_on_ranks(work, 2):
        assert {dtype for dtype, _ in seen} == {torch.bfloat16}
        # two passes over the response tokens, and nothing of prompts or padding
        assert sum(rows for _, rows in seen) == 2 * batch.num_response_tokens
        assert stats.logp.dtype == torch.float32
        # bfloat16 activations; a wrong position or temperature would be off by nats
        assert (stats.logp - want.logp).abs().mean() < 0.1
        assert not skipped
