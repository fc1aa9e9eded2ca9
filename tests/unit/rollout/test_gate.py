"""The step-0 gate, with each fault injected into real distributions."""

import pytest
import torch

from dynamo_megatron.rollout.errors import SamplerMismatchError
from dynamo_megatron.rollout.gate import check_sampler_agreement

LENGTHS = (9, 17, 12, 25, 14, 23)
OFFSETS = torch.tensor([0, 9, 26, 38, 63, 77, 100])
V = 50


def logits(seed: int = 0) -> torch.Tensor:
    return torch.randn(100, V, generator=torch.Generator().manual_seed(seed)) * 2.5


def sampled_tokens(logits_TV: torch.Tensor) -> torch.Tensor:
    g = torch.Generator().manual_seed(1)
    return torch.multinomial(logits_TV.softmax(-1), 1, generator=g)


def logp(logits_TV: torch.Tensor, token_T1: torch.Tensor) -> torch.Tensor:
    return logits_TV.log_softmax(-1).gather(1, token_T1)[:, 0]


@pytest.fixture
def token_T1():
    return sampled_tokens(logits())


@pytest.fixture
def right_T(token_T1):
    return logp(logits(), token_T1)


def check(trainer_T, sampler_T, **kwargs):
    return check_sampler_agreement(
        trainer_T,
        sampler_T,
        response_offsets=OFFSETS,
        prompt_ids=["a", "a", "b", "b", "c", "c"],
        rollout_indices=[0, 1, 0, 1, 0, 1],
        tolerance=1e-3,
        step=0,
        **kwargs,
    )


def message(trainer_T, sampler_T) -> str:
    with pytest.raises(SamplerMismatchError) as caught:
        check(trainer_T, sampler_T)
    return str(caught.value)


def test_agreement_within_the_tolerance_passes_and_reports_the_gap():
    trainer_T = torch.full((100,), -1.0)
    sampler_T = trainer_T.clone()
    sampler_T[7] += 5e-4  # the only gap: max 5e-4, mean 5e-6
    gap = check(trainer_T, sampler_T)
    assert gap.max == pytest.approx(5e-4, rel=1e-3)
    assert gap.mean == pytest.approx(5e-6, rel=1e-3)
    assert gap.num_tokens == 100


def test_the_worst_token_is_named_by_prompt_rollout_and_position(right_T):
    trainer_T = right_T.clone()
    trainer_T[38 + 5] -= 0.25
    text = message(trainer_T, right_T)
    assert text.startswith("step 0:")
    assert "1 of 100 tokens differ by more than 0.001" in text
    assert "largest gap is 0.25, the mean 0.0025" in text
    assert "token 5 of rollout 1 of prompt b" in text
    assert "Too few tokens" in text


@pytest.mark.parametrize("temperature", [0.5, 0.7, 0.9, 1.1, 1.5])
def test_another_temperature_is_recognised(temperature):
    token_T1 = sampled_tokens(logits() / temperature)
    sampler_T = logp(logits() / temperature, token_T1)
    text = message(logp(logits(), token_T1), sampler_T)
    assert "temperature (that is roughly" in text


def test_a_shift_by_one_position_is_recognised(right_T):
    assert "moved by -1 position: alignment" in message(right_T, right_T.roll(1))
    assert "moved by +1 position: alignment" in message(right_T, right_T.roll(-1))


def test_wrong_from_a_position_on_points_at_tokens_and_positions(token_T1, right_T):
    other_T = logp(logits(5), token_T1)
    position_T = torch.cat([torch.arange(n) for n in LENGTHS])
    text = message(torch.where(position_T >= 4, other_T, right_T), right_T)
    assert "agree up to a position (4 at the earliest, 4 at the latest)" in text
    assert "re-tokenised" in text


def test_whole_sequences_wrong_point_at_prompts_and_packing(token_T1, right_T):
    trainer_T = right_T.clone()
    trainer_T[26:38] = logp(logits(5), token_T1)[26:38]
    text = message(trainer_T, right_T)
    assert "1 of 6 sequences are wrong from their first token" in text
    assert "packing" in text


def test_other_weights_are_recognised(token_T1, right_T):
    assert "weights. Check that load_weights ran" in message(logp(logits(5), token_T1), right_T)


def test_slightly_stale_weights_are_recognised(token_T1, right_T):
    stale_T = logp(logits() + 0.05 * logits(5), token_T1)
    assert "weights. Check that load_weights ran" in message(stale_T, right_T)


def test_a_truncated_or_padded_vocabulary_is_recognised(token_T1, right_T):
    padded_TV = torch.cat([logits(), torch.zeros(100, 28)], dim=1)  # pad columns of logit 0
    text = message(logp(padded_TV, token_T1), right_T)
    assert "sampler's logprob is the higher one on every token" in text
    assert "padded vocabulary" in text


def test_top_p_in_the_sampler_is_recognised():
    probs_TV, order_TV = logits().softmax(-1).sort(-1, descending=True)
    kept_TV = probs_TV.cumsum(-1) - probs_TV < 0.9  # the smallest set with 0.9 of the mass
    cut_TV = torch.full((100, V), -torch.inf).scatter(
        1, order_TV, torch.where(kept_TV, probs_TV.log(), -torch.inf)
    )
    token_T1 = sampled_tokens(cut_TV)
    text = message(logp(logits(), token_T1), logp(cut_TV, token_T1))
    assert "top-p and top-k are off" in text


@pytest.mark.parametrize("side", ["trainer", "sampler"])
def test_values_that_are_not_finite_are_a_mismatch_of_their_side(right_T, side):
    broken_T = right_T.clone()
    broken_T[3] = float("nan")
    pair = (broken_T, right_T) if side == "trainer" else (right_T, broken_T)
    text = message(*pair)
    assert f"The {side}'s values are not finite" in text
    assert "token 3 of rollout 0 of prompt a" in text


def test_only_the_compared_tokens_count(right_T):
    trainer_T = right_T.clone()
    trainer_T[50:] += 3.0
    first_half_T = torch.arange(100) < 50
    assert check(trainer_T, right_T, compared_T=first_half_T).num_tokens == 50
    nothing = check(trainer_T, right_T, compared_T=torch.zeros(100, dtype=torch.bool))
    assert nothing.num_tokens == 0
    with pytest.raises(SamplerMismatchError, match="50 of 50 tokens differ"):
        check(trainer_T, right_T, compared_T=~first_half_T)
