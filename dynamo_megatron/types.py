"""The values that pass from stage to stage of a training step.

Everything is keyed by prompt id, groups are ragged, and every value is immutable. Shape letters:
P prompts, S sequences (one rollout each), N tokens of all sequences (prompt and response),
T response tokens of all sequences (the rows of the loss), M mini-batches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum

import torch
from torch import Tensor


class FinishReason(StrEnum):
    """Why the sampler stopped."""

    STOP = "stop"
    """The model emitted a stop token (it is the last token of the rollout)."""
    LENGTH = "length"
    """The token limit was reached: the response is truncated."""


class VerdictStatus(StrEnum):
    """How a verification ended. A verifier's failure is never a wrong answer."""

    OK = "ok"
    ERROR = "error"
    TIMEOUT = "timeout"
    CRASH = "crash"


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One problem, tokenised once.

    Attributes:
        id: stable hash of the problem's content (text, answer, source).
        text: the problem as written in the data, for people and verifiers.
        token_ids: the ids that every engine is given; never re-tokenised.
        answer: reference answer, as the verifier takes it.
        source: name of the data source, for metrics per source.
    """

    id: str
    text: str
    token_ids: tuple[int, ...]
    answer: str
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSizes:
    """How many rollouts each prompt of one step receives.

    Attributes:
        prompt_ids: P prompt ids, in the order in which the prompts were drawn.
        sizes: P rollout counts; ``sum(sizes)`` is the step's rollout budget.
    """

    prompt_ids: tuple[str, ...]
    sizes: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.prompt_ids) != len(self.sizes):
            raise ValueError(
                f"GroupSizes needs one size per prompt, got {len(self.prompt_ids)} prompts and "
                f"{len(self.sizes)} sizes. Build both from the same list of prompts."
            )
        if len(set(self.prompt_ids)) != len(self.prompt_ids):
            raise ValueError(
                "GroupSizes holds a prompt id twice: its two groups could not be told apart. "
                "De-duplicate the prompts of the step."
            )
        if any(size < 0 for size in self.sizes):
            raise ValueError(f"GroupSizes needs sizes >= 0, got {min(self.sizes)}.")

    @property
    def budget(self) -> int:
        """Total number of rollouts."""
        return sum(self.sizes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """One sampled response.

    Attributes:
        prompt_id: the prompt it answers.
        index: k, its number within the prompt's group, from 0.
        token_ids: response ids as sampled, with the stop token when there is one.
        logprobs: the sampler's log-probability of each of ``token_ids`` (nats), at the
            sampling temperature.
        finish_reason: why the sampler stopped.
        weight_version: the step whose weights sampled it.
        seed: the seed it was sampled with, a function of (run seed, step, prompt id, index).
        text: the decoded response without special tokens, for people and verifiers.
    """

    prompt_id: str
    index: int
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: FinishReason
    weight_version: int
    seed: int
    text: str

    def __post_init__(self) -> None:
        if len(self.token_ids) != len(self.logprobs) or not self.token_ids:
            raise ValueError(
                f"rollout {self.index} of prompt {self.prompt_id} has {len(self.token_ids)} tokens "
                f"and {len(self.logprobs)} logprobs: the engine must return one logprob for each "
                "sampled token, and at least one token."
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What the verifier said of one rollout.

    Attributes:
        reward: the reward; 0.0 where ``status`` is not OK (and then never used).
        status: OK, or how the verification failed.
        formatted: an answer could be extracted in the expected format.
        extracted: the extracted answer, or "".
        message: the failure, or "".
    """

    reward: float
    status: VerdictStatus = VerdictStatus.OK
    formatted: bool = False
    extracted: str = ""
    message: str = ""

    @property
    def valid(self) -> bool:
        """The reward may be used."""
        return self.status is VerdictStatus.OK


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutGroup:
    """All rollouts of one prompt with their verdicts, ordered by ``Rollout.index``."""

    prompt: Prompt
    rollouts: tuple[Rollout, ...]
    verdicts: tuple[Verdict, ...]

    def __post_init__(self) -> None:
        if len(self.rollouts) != len(self.verdicts):
            raise ValueError(
                f"group of prompt {self.prompt.id}: {len(self.rollouts)} rollouts but "
                f"{len(self.verdicts)} verdicts; score every rollout exactly once."
            )
        strangers = {r.prompt_id for r in self.rollouts} - {self.prompt.id}
        if strangers:
            raise ValueError(
                f"group of prompt {self.prompt.id} holds rollouts of {sorted(strangers)}: their "
                "rewards would be credited to the wrong prompt. Group by Rollout.prompt_id."
            )
        if [r.index for r in self.rollouts] != list(range(len(self.rollouts))):
            raise ValueError(
                f"group of prompt {self.prompt.id} has rollout indices "
                f"{[r.index for r in self.rollouts]}, expected 0..{len(self.rollouts) - 1}: "
                "a response is missing or came twice."
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainBatch:
    """The sequences of one step, flat and ragged. Equal on every rank.

    Sequence s owns ``tokens[token_offsets[s]:token_offsets[s + 1]]`` (prompt, then response) and
    the response tokens ``response_offsets[s]:response_offsets[s + 1]`` of every [T] tensor.
    Rollouts whose verification failed are not in it; every response token in it counts in the loss.

    Attributes:
        tokens: [N] int64, prompt and response ids of each sequence.
        token_offsets: [S + 1] int64.
        prompt_lengths: [S] int64.
        response_offsets: [S + 1] int64.
        group_index: [S] int64, the prompt's place in the step's list of prompts.
        sampler_logp: [T] float32, the sampler's log-probabilities.
        advantages: [T] float32, per response token.
    """

    tokens: Tensor
    token_offsets: Tensor
    prompt_lengths: Tensor
    response_offsets: Tensor
    group_index: Tensor
    sampler_logp: Tensor
    advantages: Tensor

    @property
    def num_sequences(self) -> int:
        """S."""
        return self.prompt_lengths.numel()

    @property
    def num_response_tokens(self) -> int:
        """T."""
        return int(self.response_offsets[-1])


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """One packed row: what a single forward pass sees.

    The row holds whole sequences without their last token (nothing is predicted from it), then
    padding as one more sequence of its own. An empty ``rows`` is a dummy that keeps data-parallel
    ranks in step.

    Attributes:
        input_ids: [n] int64.
        position_ids: [n] int64, from 0 in each sequence.
        cu_seqlens: [k + 1] int32, starts of the k packed sequences, padding included.
        max_seqlen: longest packed sequence.
        rows: [t] int64, the places in the row that predict a response token.
        targets: [t] int64, the response token each of them predicts.
        token_index: [t] int64, that token's place in the [T] tensors of the batch.
    """

    input_ids: Tensor
    position_ids: Tensor
    cu_seqlens: Tensor
    max_seqlen: int
    rows: Tensor
    targets: Tensor
    token_index: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class MiniBatch:
    """What one optimizer step sees, as split over the data-parallel ranks.

    Attributes:
        index: place among the step's mini-batches.
        sequences: indices into the batch's sequences, ascending.
        micro_batches: for each data-parallel rank its micro-batches; every rank has equally many.
        num_tokens: response tokens over **all** ranks, the loss denominator.
    """

    index: int
    sequences: tuple[int, ...]
    micro_batches: tuple[tuple[MicroBatch, ...], ...]
    num_tokens: int


@dataclass(frozen=True, slots=True)
class TokenStats:
    """Per-token statistics of softmax(logits / temperature).

    Shapes: [T], float32 (float64 from the dense reference given float64).

    Attributes:
        logp: log pi(y) of the target, nats; differentiable.
        entropy: H = -sum pi log pi, nats; differentiable where asked for.
        lam: Lambda_y = log pi(y) + H, detached.
        sum_pi2: sum_a pi_a^2, detached.
        q: Q = sum_a pi_a^2 (log pi_a + H), the expected term of the first-order entropy change,
            detached.
    """

    logp: Tensor
    entropy: Tensor
    lam: Tensor
    sum_pi2: Tensor
    q: Tensor

    def detached(self) -> TokenStats:
        """The same numbers without a graph."""
        return TokenStats(
            *(t.detach() for t in (self.logp, self.entropy, self.lam, self.sum_pi2, self.q))
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnedStats:
    """Old-policy statistics of a step, laid out as the batch's [T] tensors.

    Attributes:
        stats: [T] tensors; meaningful only where ``owned``.
        owned: [T] bool, tokens whose last-stage forward ran on this rank.
    """

    stats: TokenStats
    owned: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenInputs:
    """What the loss needs for each response token of the batch, all [T] float32 on the CPU.

    Attributes:
        advantages: modulated already when the old policy's statistics are used.
        old_logp: log-probabilities before the step.
        reference_logp: of the reference policy, or None without a penalty.
        loss_weights: factors on the policy loss alone, without a gradient; 0 drops a token, which
            stays in the denominator. None for no factors. Where another rank owns the token: NaN.
    """

    advantages: Tensor
    old_logp: Tensor
    reference_logp: Tensor | None = None
    loss_weights: Tensor | None = None


Modulate = Callable[[Tensor, TokenStats, Tensor], Tensor]
"""(advantages, current statistics, ratio) -> advantages, for statistics of the current policy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateStats:
    """What one optimizer step did; equal on every rank.

    Attributes:
        loss: policy loss, token mean over the mini-batch.
        entropy: mean entropy at the training forward, nats.
        clip_fraction: share of tokens whose gradient the clip removed.
        ratio_max: largest policy ratio.
        approx_kl: mean of the k3 estimate of KL(old || new), nats.
        reference_kl: mean KL penalty to the reference policy, nats (0 without one).
        grad_norm: global gradient norm before clipping.
        learning_rate: of this update.
        skipped: a gradient was not finite, no weight moved.
        num_tokens: response tokens in the mini-batch, the loss denominator.
    """

    loss: float
    entropy: float
    clip_fraction: float
    ratio_max: float
    approx_kl: float
    reference_kl: float
    grad_norm: float
    learning_rate: float
    skipped: bool
    num_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DataCursor:
    """Where the next prompts are drawn from: an epoch and a place in its seeded shuffle."""

    epoch: int = 0
    position: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Counters:
    """Everything that was left out or went wrong, over the whole run."""

    truncated: int = 0
    verifier_failures: int = 0
    skipped_updates: int = 0
    skipped_steps: int = 0

    def __add__(self, other: Counters) -> Counters:
        return Counters(
            truncated=self.truncated + other.truncated,
            verifier_failures=self.verifier_failures + other.verifier_failures,
            skipped_updates=self.skipped_updates + other.skipped_updates,
            skipped_steps=self.skipped_steps + other.skipped_steps,
        )


def sequence_lengths(offsets: Tensor) -> Tensor:
    """Lengths [S] from offsets [S + 1]."""
    return offsets[1:] - offsets[:-1]


def ragged_offsets(lengths: Sequence[int]) -> Tensor:
    """Offsets [S + 1] int64 from S lengths."""
    return torch.cat(
        [
            torch.zeros(1, dtype=torch.int64),
            torch.tensor(lengths, dtype=torch.int64).cumsum(0),
        ]
    )
