"""Rollouts and rewards on rank 0, the same groups on every rank."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from torch.distributed import ProcessGroup

from dynamo_megatron.algo.history import SuccessHistory
from dynamo_megatron.config import AllocationConfig
from dynamo_megatron.parallel.codec import decode_groups, encode_groups
from dynamo_megatron.parallel.control import ControlPlane
from dynamo_megatron.parallel.reduce import raise_together
from dynamo_megatron.protocols import Reward, RolloutEngine, WeightStream
from dynamo_megatron.stages.allocation import allocate
from dynamo_megatron.types import GroupSizes, Prompt, RolloutGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutTier:
    """Makes scored groups. Every method is collective; the work is done on rank 0.

    Attributes:
        engine: on rank 0, None elsewhere.
        reward: on rank 0, None elsewhere.
        control: lets the other ranks wait outside collectives.
        group: all ranks.
        temperature: of the sampled policy.
        seed: the run's.
    """

    engine: RolloutEngine | None
    reward: Reward | None
    control: ControlPlane
    group: ProcessGroup
    temperature: float
    seed: int

    def load_weights(self, weights: WeightStream, *, version: int) -> None:
        """Give the engine the current weights.

        Every rank exhausts the stream, also when the engine fails on rank 0: the stream's
        collectives need all ranks to the end.
        """
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

        def work() -> bytes:
            assert self.engine is not None and self.reward is not None, "rank 0 holds both"
            rollouts = self.engine.generate(
                prompts,
                sizes,
                step=step,
                temperature=self.temperature if temperature is None else temperature,
                seed=self.seed,
            )
            by_id = {prompt.id: prompt for prompt in prompts}
            verdicts = self.reward.score([(by_id[r.prompt_id], r) for r in rollouts])
            return encode_groups(_grouped(prompts, sizes, rollouts, verdicts))

        return decode_groups(self.control.run_on_zero(work, "rollout"))

    def close(self) -> None:
        """End engine and verifiers. Not collective."""
        with ExitStack() as closing:
            for part in (self.engine, self.reward):
                if part is not None:
                    closing.callback(part.close)


def _grouped(prompts, sizes: GroupSizes, rollouts, verdicts) -> list[RolloutGroup]:
    """Groups by prompt id; refuses a count that is not the one allocated."""
    members: dict[str, list] = {prompt.id: [] for prompt in prompts}
    for rollout, verdict in zip(rollouts, verdicts, strict=True):
        members[rollout.prompt_id].append((rollout, verdict))
    groups = []
    for prompt, size in zip(prompts, sizes.sizes, strict=True):
        pairs = sorted(members[prompt.id], key=lambda pair: pair[0].index)
        if len(pairs) != size:
            raise RuntimeError(
                f"the rollout engine returned {len(pairs)} responses for prompt {prompt.id}, "
                f"{size} were allocated: the step's budget would not be what was decided."
            )
        groups.append(
            RolloutGroup(
                prompt=prompt,
                rollouts=tuple(rollout for rollout, _ in pairs),
                verdicts=tuple(verdict for _, verdict in pairs),
            )
        )
    return groups
