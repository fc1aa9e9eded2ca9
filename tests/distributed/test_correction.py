"""Loss weights change an update in the same way on every layout; metrics count tokens once."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from dynamo_megatron.batching.split import RowLimits, plan_mini_batches
from dynamo_megatron.config import AlgorithmConfig, CorrectionConfig
from dynamo_megatron.stages.correction import corrected_inputs, loss_weights
from dynamo_megatron.stages.metrics import token_metrics
from dynamo_megatron.stages.modulation import ModulatedBatch
from dynamo_megatron.types import OwnedStats, TokenStats
from tests.policies import (
    Layout,
    hf_gradients,
    plan_for,
    policy_on,
    prepared,
    random_batch,
    relative_distance,
    write_qwen3,
)
from tests.ranks import run_on_ranks

# Each kind drops or caps some of the tokens and leaves others (asserted below).
CORRECTIONS = {
    "truncated": CorrectionConfig(kind="truncated", cap=1.2),
    "masked": CorrectionConfig(kind="masked", low=0.7, high=1.5),
    "sequence": CorrectionConfig(kind="sequence", cap=1.5),
    "geometric": CorrectionConfig(kind="sequence_masked", low=0.9, high=1.1),
    "product": CorrectionConfig(kind="sequence_masked", sequence_ratio="product", low=0.4),
    "veto": CorrectionConfig(kind="truncated", cap=1.5, veto=0.4),
}
TOLERANCE = 1e-5
KL = 0.1


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return write_qwen3(tmp_path_factory.mktemp("qwen3"))


@pytest.fixture(scope="module")
def mismatched(model_dir):
    """A batch that a sampler drew whose log-probabilities are off by some noise."""
    batch = random_batch()

    def work():
        with policy_on(model_dir, Layout()) as policy:
            return policy.token_stats(batch, plan_for(policy, batch)).stats.logp

    (logp,) = run_on_ranks(work, 1)
    noise = 0.4 * torch.randn(len(logp), generator=torch.Generator().manual_seed(4))
    return replace(batch, sampler_logp=logp + noise)


def updates(model_dir, batch, layout: Layout) -> dict:
    """For each correction the loss, the gradients and the weights of this rank's tokens."""
    results = {}
    with policy_on(model_dir, layout, kl_coefficient=KL) as policy:
        plan = plan_for(policy, batch, micro_batch_sequences=2)
        _, modulated, old = prepared(policy, batch, plan, dynamo=True)
        # A penalty that pulls: the reference is not the policy.
        reference = old.stats.logp - 0.5
        for name, correction in CORRECTIONS.items():
            config = AlgorithmConfig(correction=correction)
            inputs = corrected_inputs(batch, old, modulated, reference, config)
            reports = policy.accumulate_gradients(plan[0], inputs)
            sums, _ = policy._reduce(reports)
            results[name] = (
                float(sums[0] / sums[-1]),
                hf_gradients(policy),
                inputs.loss_weights,
                old.owned,
            )
    return results


@pytest.fixture(scope="module")
def references(model_dir, mismatched):
    return run_on_ranks(lambda: updates(model_dir, mismatched, Layout()), 1)[0]


@pytest.mark.parametrize(
    "layout",
    [
        Layout(tensor=2),
        Layout(data=2),
        Layout(pipeline=2),
        Layout(tensor=2, data=2),
    ],
    ids=["tp2", "dp2", "pp2", "tp2xdp2"],
)
def test_a_weighted_update_does_not_depend_on_the_layout(model_dir, mismatched, references, layout):
    by_rank = run_on_ranks(lambda: updates(model_dir, mismatched, layout), layout.world_size)
    for name, (loss, gradients, weights, _) in references.items():
        for results in by_rank:
            got_loss, got_gradients, got_weights, owned = results[name]
            assert got_loss == pytest.approx(loss, abs=TOLERANCE)
            assert relative_distance(got_gradients, gradients) < TOLERANCE
            torch.testing.assert_close(
                got_weights[owned], weights[owned], rtol=TOLERANCE, atol=TOLERANCE
            )
            assert got_weights[~owned].isnan().all()


def test_each_correction_of_these_tests_does_something_of_its_own(references):
    weights = {name: tuple(result[2].tolist()) for name, result in references.items()}
    assert len(set(weights.values())) == len(CORRECTIONS)
    for name in ("masked", "geometric", "product", "veto"):
        assert 0 < weights[name].count(0.0) < len(weights[name]), name
    for name, correction in CORRECTIONS.items():
        if correction.cap is not None:
            at_cap = sum(w == pytest.approx(correction.cap) for w in weights[name])
            assert 0 < at_cap < len(weights[name]), name


def test_weights_act_on_the_loss_as_on_the_advantages(model_dir, mismatched, references):
    """On-policy the loss is linear in the advantages: what is divided by is the tokens, dropped
    ones included, and the penalty is whole."""

    def work():
        results = {}
        with policy_on(model_dir, Layout(), kl_coefficient=KL) as policy:
            plan = plan_for(policy, mismatched, micro_batch_sequences=2)
            inputs, _, old = prepared(policy, mismatched, plan, dynamo=True)
            inputs = replace(inputs, reference_logp=old.stats.logp - 0.5)
            for name, result in references.items():
                weighted = replace(inputs, advantages=inputs.advantages * result[2])
                policy.accumulate_gradients(plan[0], weighted)
                results[name] = hf_gradients(policy)
        return results

    for name, want in run_on_ranks(work, 1)[0].items():
        assert relative_distance(references[name][1], want) < 1e-6


def step_metrics(tensor: int, data: int) -> list[dict[str, float]]:
    """Token metrics of a made-up step, where ``tensor`` ranks each own the same tokens."""

    def work():
        batch, rank = random_batch(), dist.get_rank()
        plan = plan_mini_batches(
            batch,
            num_groups=4,
            groups_per_mini_batch=4,
            data_parallel=data,
            limits=RowLimits(tokens=40),
        )
        owned = torch.zeros(batch.num_response_tokens, dtype=torch.bool)
        for row in plan[0].micro_batches[rank // tensor]:
            owned[row.token_index] = True
        delta = made_up_gaps(batch.num_response_tokens)
        logp = torch.where(owned, batch.sampler_logp + delta, torch.nan)
        old = OwnedStats(stats=TokenStats(logp, logp, logp, logp, logp), owned=owned)
        ones = torch.ones_like(logp, dtype=torch.float64)
        correction = CORRECTIONS["geometric"]
        return token_metrics(
            batch,
            old,
            ModulatedBatch(batch=batch, compensation=ones, stabilization=ones, ranges=()),
            loss_weights(batch, old, correction),
            correction,
            counts_here=rank % tensor == 0,
            group=dist.group.WORLD,
        )

    return run_on_ranks(work, tensor * data)


def made_up_gaps(count: int) -> torch.Tensor:
    return 0.3 * torch.randn(count, generator=torch.Generator().manual_seed(7))


@pytest.mark.parametrize(("tensor", "data"), [(1, 2), (2, 1), (2, 2), (1, 4)])
def test_metrics_of_a_step_do_not_depend_on_the_ranks(tensor, data):
    (want,) = step_metrics(1, 1)
    for got in step_metrics(tensor, data):
        assert got == pytest.approx(want, rel=1e-12)
        # counts, not sums of fractions: no rounding at all
        for name in want:
            if "ratio" in name or "dropped" in name:
                assert got[name] == want[name]


def test_metrics_of_a_step_are_those_of_its_gathered_tokens():
    (got,) = step_metrics(1, 1)
    count = random_batch().num_response_tokens
    delta = made_up_gaps(count).double()
    ratio = delta.exp()
    assert got["rollout/logp_gap_mean"] == pytest.approx(float(delta.abs().mean()))
    assert got["rollout/logp_gap_max"] == pytest.approx(float(delta.abs().max()))
    assert got["rollout/effective_sample_size"] == pytest.approx(
        float(ratio.sum() ** 2 / ratio.square().sum() / count)
    )
    ordered = ratio.sort().values
    for name, quantile in [("q01", 0.01), ("q50", 0.5), ("q99", 0.99)]:
        exact = float(ordered[round(quantile * (count - 1))])
        # 2 % of |log q|, itself below 1 here
        assert got[f"rollout/ratio_{name}"] == pytest.approx(exact, rel=0.02)
    lengths = [6, 2, 8, 4, 11, 1, 5, 9]
    means = [float(part.mean().exp()) for part in delta.split(lengths)]
    dropped = [not 0.9 <= mean <= 1.1 for mean in means]
    assert 0 < sum(dropped) < len(lengths)
    assert got["correction/dropped_sequences"] == sum(dropped)
    tokens = sum(n for n, out in zip(lengths, dropped, strict=True) if out)
    assert got["correction/dropped_share"] == pytest.approx(tokens / count)
