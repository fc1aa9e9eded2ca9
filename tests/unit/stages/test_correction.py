"""Old policy and loss weights of a step, on values by hand."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dynamo_megatron.config import AlgorithmConfig, CorrectionConfig
from dynamo_megatron.stages.correction import (
    corrected_inputs,
    correction_metrics,
    correction_sums,
    loss_weights,
)
from dynamo_megatron.stages.modulation import ModulatedBatch
from dynamo_megatron.types import OwnedStats, TokenStats, TrainBatch

# Sequences of 2, 1, 0 and 3 response tokens after a prompt of one.
OFFSETS = torch.tensor([0, 2, 3, 3, 6])
RATIOS = (0.25, 8.0, 3.0, 1.0, 0.5, 0.5)
SAMPLER = torch.full((6,), -2.0)
ALL = torch.ones(6, dtype=torch.bool)
# Rank-local statistics of the last sequence belong to somebody else.
MINE = torch.tensor([True, True, True, False, False, False])


def batch() -> TrainBatch:
    return TrainBatch(
        tokens=torch.zeros(10, dtype=torch.int64),
        token_offsets=torch.tensor([0, 3, 5, 6, 10]),
        prompt_lengths=torch.ones(4, dtype=torch.int64),
        response_offsets=OFFSETS,
        group_index=torch.zeros(4, dtype=torch.int64),
        sampler_logp=SAMPLER,
        advantages=torch.arange(6.0),
    )


def statistics(owned: Tensor = ALL) -> OwnedStats:
    logp = torch.where(owned, SAMPLER + torch.tensor(RATIOS).log(), 0.0)
    return OwnedStats(stats=TokenStats(logp, logp, logp, logp, logp), owned=owned)


def weights_of(owned: Tensor = ALL, **values) -> Tensor:
    weights = loss_weights(batch(), statistics(owned), CorrectionConfig(**values))
    assert weights is not None and weights.dtype == torch.float32
    return weights


@pytest.mark.parametrize(
    ("values", "want"),
    [
        ({"kind": "truncated"}, [0.25, 2, 2, 1, 0.5, 0.5]),
        ({"kind": "truncated", "cap": 5.0}, [0.25, 5, 3, 1, 0.5, 0.5]),
        ({"kind": "masked"}, [0, 0, 3, 1, 0.5, 0.5]),
        ({"kind": "masked", "low": 0.0, "high": 2.0}, [0.25, 0, 0, 1, 0.5, 0.5]),
        # products 2, 3 and 0.25
        ({"kind": "sequence", "cap": 2.5}, [2, 2, 2.5, 0.25, 0.25, 0.25]),
        ({"kind": "sequence_masked", "sequence_ratio": "product", "high": 2.5}, [2, 2, 0, 0, 0, 0]),
        # geometric means 1.414, 3 and 0.63
        ({"kind": "sequence_masked", "low": 0.6, "high": 2.0}, [1, 1, 0, 1, 1, 1]),
        ({"kind": "sequence_masked"}, [0] * 6),
        ({"kind": "truncated", "veto": 0.3}, [0, 0, 2, 1, 0.5, 0.5]),
        ({"kind": "sequence", "veto": 0.6}, [0, 0, 2, 0, 0, 0]),
    ],
)
def test_weights_match_hand_computed_values(values, want):
    torch.testing.assert_close(weights_of(**values), torch.tensor(want, dtype=torch.float32))


@pytest.mark.parametrize("kind", ["truncated", "masked", "sequence", "sequence_masked"])
def test_a_token_of_another_rank_has_no_weight_that_could_be_used(kind):
    whole, mine = weights_of(kind=kind, veto=0.1), weights_of(MINE, kind=kind, veto=0.1)
    assert torch.equal(mine[MINE], whole[MINE])
    assert mine[~MINE].isnan().all()


def test_a_sequence_on_several_ranks_is_our_own_bug():
    half = torch.tensor([True, False, True, True, True, True])
    with pytest.raises(AssertionError, match="several ranks"):
        weights_of(half, kind="sequence")


def inputs_of(config: AlgorithmConfig):
    ones = torch.ones(6, dtype=torch.float64)
    modulated = ModulatedBatch(batch=batch(), compensation=ones, stabilization=ones, ranges=())
    old, reference = statistics(MINE), torch.full((6,), -3.0)
    return corrected_inputs(batch(), old, modulated, reference, config), old


def test_without_a_correction_the_inputs_are_bitwise_the_plain_ones():
    inputs, old = inputs_of(AlgorithmConfig())
    assert inputs.loss_weights is None
    assert torch.equal(inputs.old_logp, old.stats.logp)
    assert torch.equal(inputs.advantages, torch.arange(6.0))
    assert inputs.reference_logp is not None and inputs.reference_logp.tolist() == [-3.0] * 6


def test_bypass_takes_the_sampler_for_the_old_policy():
    inputs, _ = inputs_of(AlgorithmConfig(old_logp="sampler"))
    assert torch.equal(inputs.old_logp, SAMPLER)
    assert inputs.loss_weights is None


def test_a_correction_leaves_old_policy_and_advantages_alone():
    config = AlgorithmConfig(correction=CorrectionConfig(kind="masked", high=3.5))
    inputs, old = inputs_of(config)
    assert torch.equal(inputs.old_logp, old.stats.logp)
    assert torch.equal(inputs.advantages, torch.arange(6.0))
    assert inputs.loss_weights is not None
    torch.testing.assert_close(inputs.loss_weights[MINE], torch.tensor([0.0, 0.0, 3.0]))


def metrics_of(owned: Tensor, **values) -> dict[str, float]:
    config = CorrectionConfig(**values)
    weights = loss_weights(batch(), statistics(owned), config)
    sums = correction_sums(weights, batch(), owned, config)
    return correction_metrics(sums, int(owned.sum()))


def test_metrics_of_a_correction_by_hand():
    # weights 0, 0 | 2, | 1, .5, .5: the first sequence is dropped, the third token capped
    assert metrics_of(ALL, kind="truncated", veto=0.3) == pytest.approx(
        {
            "correction/weight_mean": 4 / 6,
            "correction/clipped_share": 1 / 6,
            "correction/dropped_share": 2 / 6,
            "correction/dropped_sequences": 1,
        }
    )
    # 0, 0 | 3 | 1, .5, .5 for this rank's three tokens; a weight of 2 would be no cap here
    assert metrics_of(MINE, kind="masked", high=3.5) == pytest.approx(
        {
            "correction/weight_mean": 1.0,
            "correction/clipped_share": 0,
            "correction/dropped_share": 2 / 3,
            "correction/dropped_sequences": 1,
        }
    )


def test_a_sequence_that_keeps_a_token_is_not_dropped():
    got = metrics_of(ALL, kind="masked", low=0.0, high=1.0)
    # 8 and 3 are out: one token of the first sequence stays, none of the second
    assert got["correction/dropped_share"] == pytest.approx(2 / 6)
    assert got["correction/dropped_sequences"] == 1


def test_only_a_kind_with_a_cap_clips():
    weights = torch.tensor([2.0, 2.0, 1.0, 1.0, 1.0, 1.0])
    for kind, clipped in [("truncated", 2), ("sequence", 2), ("masked", 0), ("sequence_masked", 0)]:
        config = CorrectionConfig.model_validate({"kind": kind})
        assert correction_sums(weights, batch(), ALL, config)[1] == clipped


def test_no_correction_has_no_metrics():
    assert metrics_of(ALL) == {}


def test_a_step_without_tokens_has_finite_metrics():
    nobody = torch.zeros(6, dtype=torch.bool)
    assert set(metrics_of(nobody, kind="truncated").values()) == {0.0}
