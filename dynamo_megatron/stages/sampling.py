"""Rollouts and rewards on rank 0, the same groups on every rank."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

from torch.distributed import ProcessGroup

from dynamo_megatron.algo.history import SuccessHistory
from dynamo_megatron.config import AllocationConfig
from dynamo_megatron.parallel.codec import decode_groups, encode_groups
from dynamo_megatron.parallel.control import ControlPlane
from dynamo_megatron.parallel.reduce import raise_together
from dynamo_megatron.protocols import (
    Reward,
    RolloutEngine,
    SamplingPlan,
    SamplingWatch,
    WeightStream,
)
from dynamo_megatron.stages.allocation import allocate
from dynamo_megatron.stages.background import Background
from dynamo_megatron.stages.rounds import OneRound, Sampling, sample_rounds
from dynamo_megatron.types import GroupSizes, Prompt, RolloutGroup, Verdict


@dataclass(slots=True, kw_only=True)
class RolloutTier:
    """Makes scored groups. Every method is collective; the work is done on rank 0.

    Attributes:
        engine: on rank 0, None elsewhere.
        reward: on rank 0, None elsewhere.
        control: lets the other ranks wait outside collectives.
        group: all ranks.
        temperature: of the sampled policy.
        seed: the run's.
        watch: told on rank 0 how far a sampling is; maybe from another thread.
        background: holds what ``start`` began.
        version: of the weights that the engine holds, on every rank; None when it may hold none.
    """

    engine: RolloutEngine | None
    reward: Reward | None
    control: ControlPlane
    group: ProcessGroup
    temperature: float
    seed: int
    watch: SamplingWatch | None = None
    background: Background = field(default_factory=Background)
    version: int | None = field(default=None, init=False)

    def load_weights(self, weights: WeightStream, *, version: int) -> None:
        """Give the engine the current weights.

        Every rank exhausts the stream, also when the engine fails on rank 0: the stream's
        collectives need all ranks to the end.
        """
        self._require_idle()
        self.version = None
        failure = None
        stream = iter(weights)
        if self.engine is not None:
            try:
                self.engine.load_weights(stream, version=version)
            except Exception as error:
                failure = error
        for _ in stream:
            pass
        raise_together(failure, phase="load weights into the rollout engine", group=self.group)
        self.version = version

    def allocate(
        self, prompts: Sequence[Prompt], history: SuccessHistory, config: AllocationConfig
    ) -> GroupSizes:
        """Rank 0 decides the group sizes; all ranks receive them."""
        payload = self.control.run_on_zero(
            lambda: json.dumps(allocate(prompts, history, config).sizes).encode(), "allocate"
        )
        ids = tuple(prompt.id for prompt in prompts)
        return GroupSizes(prompt_ids=ids, sizes=tuple(json.loads(payload)))

    def sample(
        self,
        prompts: Sequence[Prompt],
        sizes: GroupSizes,
        *,
        step: int,
        temperature: float | None = None,
    ) -> list[RolloutGroup]:
        """Exactly ``sizes`` verified rollouts of each prompt, in prompt order, on every rank."""
        return self.sample_plan(prompts, OneRound(sizes), step=step, temperature=temperature)

    def sample_plan(
        self,
        prompts: Sequence[Prompt],
        plan: SamplingPlan,
        *,
        step: int,
        temperature: float | None = None,
    ) -> list[RolloutGroup]:
        """The verified rollouts that a plan asks for in its rounds, on every rank.

        Args:
            prompts: the step's.
            plan: asked on rank 0 only.
            step: enters the seeds.
            temperature: the tier's own by default.

        Returns:
            One group for each prompt, in prompt order; its size is the sum over the rounds.
        """
        self._require_idle()
        work = self._work(prompts, plan, step, temperature)
        return decode_groups(self.control.run_on_zero(lambda: work(_go_on), "rollout"))

    def probe(self, prompts: Sequence[Prompt]) -> list[RolloutGroup]:
        """One short rollout of each prompt from every replica, not scored, on every rank.

        Empty where the engine needs no such check.
        """
        self._require_idle()

        def work() -> bytes:
            assert self.engine is not None, "rank 0 holds it"
            rollouts = self.engine.probe(prompts, temperature=self.temperature, seed=self.seed)
            return encode_groups(
                [
                    RolloutGroup(
                        prompt=prompt,
                        rollouts=tuple(r for r in rollouts if r.prompt_id == prompt.id),
                        verdicts=tuple(
                            Verdict(reward=0.0) for r in rollouts if r.prompt_id == prompt.id
                        ),
                    )
                    for prompt in (prompts if rollouts else ())
                ]
            )

        return decode_groups(self.control.run_on_zero(work, "probe"))

    def start(self, prompts: Sequence[Prompt], plan: SamplingPlan, *, step: int) -> None:
        """Begin ``sample_plan`` in the background and return at once; not collective.

        Until ``finish`` nothing else of the tier may be used: weights stay as they are.
        """
        if self.engine is not None:
            work = self._work(prompts, plan, step, None)
            self.background.start(work, name=f"rollouts of step {step}")

    def finish(self) -> list[RolloutGroup]:
        """Wait for what ``start`` began; the groups on every rank, or its error on every rank."""
        return decode_groups(self.control.run_on_zero(self.background.result, "rollout"))

    def give_up(self) -> None:
        """Have what ``start`` began end soon, without a result. Not collective."""
        self.background.give_up()

    def close(self) -> None:
        """End what runs in the background, engine and verifiers. Not collective."""
        with ExitStack() as closing:
            for part in (self.reward, self.engine):
                if part is not None:
                    closing.callback(part.close)
            closing.callback(self.background.close)

    def _require_idle(self) -> None:
        assert not self.background.busy, "rollouts are being sampled in the background"

    def _work(
        self,
        prompts: Sequence[Prompt],
        plan: SamplingPlan,
        step: int,
        temperature: float | None,
    ) -> Callable[[Callable[[], None]], bytes]:
        """Rank 0's work, to be called with a check that raises when it is to be given up."""

        def work(check: Callable[[], None]) -> bytes:
            assert self.engine is not None and self.reward is not None, "rank 0 holds both"
            sampling = Sampling(
                step=step,
                temperature=self.temperature if temperature is None else temperature,
                seed=self.seed,
                watch=self.watch,
                check=check,
            )
            return encode_groups(sample_rounds(self.engine, self.reward, prompts, plan, sampling))

        return work


def _go_on() -> None:
    """Nobody gives up a call that is waited for."""
