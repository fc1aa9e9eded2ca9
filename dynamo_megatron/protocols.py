"""The seams of the trainer. ``build`` alone names what stands behind them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from dynamo_megatron.types import (
    DataCursor,
    GroupSizes,
    MiniBatch,
    Modulate,
    OwnedStats,
    Prompt,
    Rollout,
    RolloutGroup,
    TokenInputs,
    TrainBatch,
    UpdateStats,
    Verdict,
)

WeightStream = Iterable[tuple[str, Tensor]]
"""Hugging Face parameter names with full, CPU-or-GPU tensors, each exactly once."""

RolloutListener = Callable[[Rollout], None]
"""Called with each rollout when it is complete, in the order of completion. May raise: the engine
then gives up what is left and lets the exception through."""

SamplingWatch = Callable[[int, int, int], None]
"""Told how far a sampling is: rollouts done, rollouts wanted, tokens done. (0, n, 0) begins one."""

MetricValue = float | Mapping[str, int]
"""A scalar, or a histogram as a mapping from value to count."""


class PromptSource(Protocol):
    """Training prompts in a seeded order, a fresh shuffle each epoch."""

    def take(self, count: int, cursor: DataCursor) -> tuple[list[Prompt], DataCursor]:
        """The next ``count`` different prompts and the cursor after them."""
        ...

    def __len__(self) -> int: ...


class RolloutEngine(Protocol):
    """Samples responses from the current policy weights (rank 0)."""

    def load_weights(self, weights: WeightStream, *, version: int) -> None:
        """Make ``version`` the policy that the next ``generate`` samples from."""
        ...

    def generate(
        self,
        prompts: Sequence[Prompt],
        sizes: GroupSizes,
        *,
        step: int,
        temperature: float | None,
        seed: int,
        first_index: Sequence[int] | None = None,
        on_rollout: RolloutListener | None = None,
    ) -> list[Rollout]:
        """Return ``sizes.budget`` rollouts, grouped by prompt, in prompt order, k ascending.

        Args:
            prompts: the prompts, in the order of ``sizes.prompt_ids``.
            sizes: rollouts for each.
            step: enters each rollout's seed.
            temperature: of the sampled policy softmax(logits / temperature); None takes the most
                likely token each time.
            seed: the run's seed; a rollout's own is a function of (seed, step, prompt id, k).
            first_index: the k that each prompt's rollouts start at, 0 by default; a later round of
                the same step goes on where the one before ended.
            on_rollout: told of each rollout as it completes, from the calling thread.

        Raises:
            RolloutError: a completion is missing or was sampled from another version.
        """
        ...

    def probe(self, prompts: Sequence[Prompt], *, temperature: float, seed: int) -> list[Rollout]:
        """One short rollout of each prompt from every replica, to be checked by the trainer.

        Called after ``load_weights``. Empty where the engine needs no such check.
        """
        ...

    def close(self) -> None:
        """Release processes and memory."""
        ...


class SamplingPlan(Protocol):
    """Decides the rollouts of one step, in one round or in several (rank 0)."""

    def next_sizes(self) -> GroupSizes | None:
        """Rollouts of the next round for each of the step's prompts, 0 allowed; None: enough."""
        ...

    def observe(self, groups: Sequence[RolloutGroup]) -> None:
        """Look at all rollouts and verdicts of the step so far, one group for each prompt."""
        ...


class Scoring(Protocol):
    """Verification while responses still arrive. Belongs to one thread."""

    def submit(self, prompt: Prompt, rollout: Rollout) -> None:
        """Have a rollout verified; returns at once. Raises when verification cannot work."""
        ...

    def verdicts(self) -> list[Verdict]:
        """Wait for the rest: one verdict for each rollout, in the order of submission."""
        ...


class Reward(Protocol):
    """Verifies responses in killable processes (rank 0)."""

    def score(self, items: Sequence[tuple[Prompt, Rollout]]) -> list[Verdict]:
        """One verdict for each item, in order. A verifier's failure is a Verdict, not an error."""
        ...

    def stream(self) -> AbstractContextManager[Scoring]:
        """The same verdicts for rollouts that arrive one at a time.

        Nothing else of this object may be used until the context is left.
        """
        ...

    def close(self) -> None:
        """End the worker processes."""
        ...


class PolicyActor(Protocol):
    """The policy on this rank. Every method is collective: all ranks call it together."""

    @property
    def reports_tokens(self) -> bool:
        """Among the ranks that own the same tokens, this one counts them in metrics."""
        ...

    @property
    def data_size(self) -> int:
        """Number of data-parallel shares that mini-batches are planned for."""
        ...

    def weights(self) -> WeightStream:
        """The current weights under Hugging Face names. Every rank must exhaust the stream."""
        ...

    def token_stats(self, batch: TrainBatch, plan: Sequence[MiniBatch]) -> OwnedStats:
        """Statistics of the policy as it is, for the response tokens that this rank owns."""
        ...

    def reference_logp(self, batch: TrainBatch, plan: Sequence[MiniBatch]) -> Tensor | None:
        """[T] log-probabilities under the policy the run started from; None without a penalty."""
        ...

    def update(
        self,
        plan: Sequence[MiniBatch],
        tokens: TokenInputs,
        modulate: Callable[[MiniBatch], Modulate] | None = None,
    ) -> list[UpdateStats]:
        """One optimizer step for each mini-batch of the plan.

        Args:
            plan: the step's mini-batches.
            tokens: advantages and log-probabilities, [T].
            modulate: for each mini-batch the modulation by current statistics; None when the
                advantages are final.
        """
        ...


class MetricsSink(Protocol):
    """Receives what a run reports (rank 0)."""

    def write(self, step: int, metrics: Mapping[str, MetricValue]) -> None:
        """Record one step; steps ascend, each is written once."""
        ...

    def close(self) -> None:
        """Flush."""
        ...


class Checkpointer(Protocol):
    """Saves and restores the whole run. Collective."""

    def save(
        self,
        step: int,
        state: Mapping[str, Any],
        resolved_config: str | None = None,
        *,
        rollouts: Callable[[], bytes] | None = None,
    ) -> Path:
        """Write a checkpoint; its completion marker comes last.

        Args:
            step: steps done.
            state: the trainer's own.
            resolved_config: for people.
            rollouts: gives those that were sampled ahead, encoded; called on rank 0.
        """
        ...

    def latest(self) -> Path | None:
        """The newest complete checkpoint."""
        ...

    def load(self, path: Path) -> Mapping[str, Any]:
        """Restore model, optimizer and random state; return the trainer's own state."""
        ...

    def load_rollouts(self, path: Path) -> bytes | None:
        """The encoded rollouts of a checkpoint that was loaded; None when there are none."""
        ...
