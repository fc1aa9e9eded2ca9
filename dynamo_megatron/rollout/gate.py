"""The gate before the first update: sampler and trainer are the same policy, or the run stops.

A mismatch never crashes by itself. It trains with wrong policy ratios (verl#3133, NeMo-RL#1767,
ms-swift#8196, slime#1695), so it is looked for at the one moment when equality is certain.

Shapes: S sequences, T response tokens of all sequences.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dynamo_megatron.rollout.errors import SamplerMismatchError

MOST = 0.9
"""Share of tokens that must follow a pattern for it to be named."""
EXPLAINED = 0.3
"""Share of the gap's variance that the logprob explains, from which it is the temperature."""
FEW_TOKENS = 8
"""Fewer wrong tokens than this show no pattern."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplerGap:
    """How far sampler and trainer are apart, nats.

    Attributes:
        max: largest |trainer logp - sampler logp|.
        mean: mean of the same.
        num_tokens: tokens compared.
    """

    max: float
    mean: float
    num_tokens: int


@dataclass(frozen=True, slots=True)
class _Faults:
    """The compared tokens, and which are wrong.

    Attributes:
        trainer: [n] logprobs by the trainer.
        sampler: [n] logprobs by the sampler.
        sequence: [n] the sequence each belongs to.
        position: [n] its place in the response.
        wrong: [n] bool.
        tolerance: above which a token is wrong.
    """

    trainer: Tensor
    sampler: Tensor
    sequence: Tensor
    position: Tensor
    wrong: Tensor
    tolerance: float


def check_sampler_agreement(
    trainer_logp_T: Tensor,
    sampler_logp_T: Tensor,
    *,
    response_offsets: Tensor,
    prompt_ids: Sequence[str],
    rollout_indices: Sequence[int],
    tolerance: float,
    step: int,
    compared_T: Tensor | None = None,
) -> SamplerGap:
    """Compare the log-probabilities that sampler and trainer give to the sampled tokens.

    Args:
        trainer_logp_T: [T] by the trainer, at the sampling temperature, before any update.
        sampler_logp_T: [T] by the sampler, same tokens in the same order.
        response_offsets: [S + 1] int64, first token of each sequence.
        prompt_ids: S prompt ids, for the message.
        rollout_indices: S numbers within the prompt's group, for the message.
        tolerance: largest gap allowed, nats.
        step: for the message.
        compared_T: [T] bool, tokens to compare; None compares all. A rank that computed only some
            tokens compares those.

    Returns:
        The gap.

    Raises:
        SamplerMismatchError: a token's gap is above the tolerance or not finite. Says how far apart
            they are, where, and which stage is most likely wrong.
    """
    # Statistics come from the GPU, the batch lives on the CPU; the comparison is small.
    trainer_logp_T, sampler_logp_T = trainer_logp_T.cpu(), sampler_logp_T.cpu()
    response_offsets = response_offsets.cpu()
    lengths_S = response_offsets[1:] - response_offsets[:-1]
    sequence_T = torch.repeat_interleave(torch.arange(len(lengths_S)), lengths_S)
    position_T = torch.arange(len(sequence_T)) - response_offsets[sequence_T]
    chosen_T = (
        torch.ones_like(sequence_T, dtype=torch.bool) if compared_T is None else compared_T.cpu()
    )
    trainer, sampler = trainer_logp_T[chosen_T].double(), sampler_logp_T[chosen_T].double()
    gap = (trainer - sampler).abs()
    if gap.numel() == 0:
        return SamplerGap(max=0.0, mean=0.0, num_tokens=0)
    found = SamplerGap(max=float(gap.max()), mean=float(gap.mean()), num_tokens=gap.numel())
    # Written so that NaN counts as wrong.
    wrong = ~(gap <= tolerance)
    if not bool(wrong.any()):
        return found
    faults = _Faults(trainer, sampler, sequence_T[chosen_T], position_T[chosen_T], wrong, tolerance)
    worst = int(gap.nan_to_num(nan=float("inf")).argmax())
    place = int(faults.sequence[worst])
    where = (
        f"token {int(faults.position[worst])} of rollout {rollout_indices[place]} of prompt "
        f"{prompt_ids[place]}"
    )
    raise SamplerMismatchError(
        f"step {step}: sampler and trainer are not the same policy. {int(wrong.sum())} of "
        f"{found.num_tokens} tokens differ by more than {tolerance:g} nats; the largest gap is "
        f"{found.max:.4g}, the mean {found.mean:.4g}. Worst: {where}, trainer "
        f"{float(trainer[worst]):.4f}, sampler {float(sampler[worst]):.4f}. {_likely_stage(faults)}"
    )


def _likely_stage(faults: _Faults) -> str:
    """Read the pattern of the gaps: which stage is most likely wrong, and what to check."""
    finite = faults.trainer.isfinite() & faults.sampler.isfinite()
    if not bool(finite.all()):
        side = "sampler" if bool((~faults.sampler.isfinite()).any()) else "trainer"
        return (
            f"The {side}'s values are not finite: its weights or its kernel are broken. Check the "
            "weights for NaN and, in bfloat16, the attention kernel."
        )
    if int(faults.wrong.sum()) < FEW_TOKENS:
        return (
            "Too few tokens are wrong to show a pattern: most likely the two sides' arithmetic "
            "differs (dtype, attention kernel). Compare both in float32, or raise "
            "rollout.gate_tolerance if the gap is that of the dtype."
        )
    shift = _shift(faults)
    if shift:
        return (
            f"The two agree when one is moved by {shift:+d} position: alignment. The logprob of "
            "token t must be read from the output at t - 1, on both sides."
        )
    return _by_sequence(faults) or _by_policy(faults)


def _shift(faults: _Faults) -> int:
    """The lag at which neighbours of the same sequence agree, or 0."""
    for lag in (1, -1):
        trainer = faults.trainer[1:] if lag > 0 else faults.trainer[:-1]
        sampler = faults.sampler[:-1] if lag > 0 else faults.sampler[1:]
        inside = faults.sequence[1:] == faults.sequence[:-1]
        gap = (trainer - sampler).abs()[inside]
        if gap.numel() and bool((gap <= faults.tolerance).double().mean() > MOST):
            return lag
    return 0


def _by_sequence(faults: _Faults) -> str:
    """Whether whole sequences, or whole beginnings of sequences, are right."""
    wrong = faults.wrong
    num_sequences = int(faults.sequence.max()) + 1
    first = torch.full((num_sequences,), torch.iinfo(torch.int64).max)
    first.scatter_reduce_(0, faults.sequence[wrong], faults.position[wrong], "amin")
    hit = first < torch.iinfo(torch.int64).max
    present = torch.zeros(num_sequences, dtype=torch.bool)
    present[faults.sequence] = True
    after = faults.position >= first[faults.sequence]
    share_after = float(wrong[after].double().mean())
    before = int((~after & hit[faults.sequence]).sum())
    if share_after > MOST and before >= int(hit.sum()):
        return (
            f"The responses agree up to a position ({int(first[hit].min())} at the earliest, "
            f"{int(first[hit].max())} at the latest) and are wrong from there on: a token was "
            "inserted, dropped or shifted, or positions and masks go wrong there. Check that token "
            "ids are never re-tokenised, then position ids and packing."
        )
    if share_after > MOST and int(hit.sum()) <= 0.75 * int(present.sum()):
        return (
            f"{int(hit.sum())} of {int(present.sum())} sequences are wrong from their first token, "
            "the others right: those responses were paired with another prompt or template, or "
            "packing leaks between sequences. Check grouping by prompt id, the prompt's token ids "
            "and cu_seqlens."
        )
    return ""


def _by_policy(faults: _Faults) -> str:
    """Tokens are wrong everywhere: temperature, truncation or weights."""
    gap = faults.trainer - faults.sampler
    pair = torch.stack([faults.trainer, faults.sampler])
    covariance = torch.cov(pair)
    correlation = float(torch.corrcoef(pair)[0, 1])
    # log softmax(z / T) is 1/T times z up to a constant of the context: under another temperature
    # the trainer's values are a multiple of the sampler's, and the gap follows the logprob.
    # Measured on random logits: at least 0.57 for a factor of 0.4 to 2, at most 0.05 for weights.
    explained = float(torch.corrcoef(torch.stack([gap, faults.sampler]))[0, 1]) ** 2
    slope = float(covariance[0, 1] / covariance[1, 1])
    if explained > EXPLAINED and correlation > 0.0:
        return (
            f"The trainer's logprobs vary {slope:.2f} times as much as the sampler's on the same "
            "tokens: temperature (that is roughly the sampler's divided by the trainer's). Check "
            "that rollout.temperature reaches the trainer's statistics, and that the sampler "
            "returns processed logprobs, not raw ones."
        )
    if bool((gap <= faults.tolerance).all()):
        return (
            "The sampler's logprob is the higher one on every token: its distribution holds fewer "
            "tokens than the trainer's. Check that top-p and top-k are off, that the sampler's "
            "logprobs are those before truncation, and that the trainer masks padded vocabulary."
        )
    return (
        f"Tokens are wrong everywhere without a pattern (correlation {correlation:.2f}): weights. "
        "Check that load_weights ran after the last change of the policy, that every parameter is "
        "exported under the right name, and tied embeddings."
    )
