"""Rank 0's part of sampling: rounds of rollouts, verified while they arrive."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dynamo_megatron.protocols import Reward, RolloutEngine, SamplingPlan, SamplingWatch
from dynamo_megatron.types import GroupSizes, Prompt, Rollout, RolloutGroup, Verdict


class OneRound:
    """The plan that samples everything at once. Implements ``protocols.SamplingPlan``."""

    def __init__(self, sizes: GroupSizes) -> None:
        self._sizes: GroupSizes | None = sizes

    def next_sizes(self) -> GroupSizes | None:
        """All sizes, then None."""
        sizes, self._sizes = self._sizes, None
        return sizes

    def observe(self, groups: Sequence[RolloutGroup]) -> None:
        """Nothing depends on it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """What a step's rollouts are sampled with.

    Attributes:
        step: enters the seeds.
        temperature: of the sampled policy.
        seed: the run's.
        watch: told of every rollout.
        check: called before a round and with every rollout; raises to give up.
    """

    step: int
    temperature: float
    seed: int
    watch: SamplingWatch | None = None
    check: Callable[[], None] = lambda: None


def sample_rounds(
    engine: RolloutEngine,
    reward: Reward,
    prompts: Sequence[Prompt],
    plan: SamplingPlan,
    sampling: Sampling,
) -> list[RolloutGroup]:
    """Run a plan's rounds to the end.

    Engine and workers stay as they are between rounds; a later round's rollouts take the indices
    after those of the rounds before, so that every rollout of the step has its own seed.

    Returns:
        One group for each prompt, in prompt order; empty where the plan never asked.

    Raises:
        RuntimeError: the engine returned other rollouts than it was asked for or had told of, or
            the plan's sizes are not of these prompts.
    """
    groups = [RolloutGroup(prompt=prompt, rollouts=(), verdicts=()) for prompt in prompts]
    while (sizes := plan.next_sizes()) is not None:
        sampling.check()
        groups = _round(engine, reward, groups, sizes, sampling)
        plan.observe(groups)
    return groups


class _Arrivals:
    """Passes each rollout on as it completes: to the verifiers, and to who watches."""

    def __init__(self, scoring, groups: Sequence[RolloutGroup], total: int, sampling: Sampling):
        self._scoring = scoring
        self._prompts = {group.prompt.id: group.prompt for group in groups}
        self._done = sum(len(group.rollouts) for group in groups)
        self._tokens = sum(len(r.token_ids) for group in groups for r in group.rollouts)
        self._total = self._done + total
        self._sampling = sampling
        self.rollouts: list[Rollout] = []
        self._tell()

    def __call__(self, rollout: Rollout) -> None:
        self._sampling.check()
        prompt = self._prompts.get(rollout.prompt_id)
        if prompt is None:
            raise RuntimeError(
                f"the rollout engine returned a response for prompt {rollout.prompt_id}, which is "
                "not among the step's."
            )
        self._scoring.submit(prompt, rollout)
        self.rollouts.append(rollout)
        self._done += 1
        self._tokens += len(rollout.token_ids)
        self._tell()

    def _tell(self) -> None:
        if self._sampling.watch is not None:
            self._sampling.watch(self._done, self._total, self._tokens)


def _round(
    engine: RolloutEngine,
    reward: Reward,
    groups: Sequence[RolloutGroup],
    sizes: GroupSizes,
    sampling: Sampling,
) -> list[RolloutGroup]:
    """The groups with one more round of rollouts."""
    prompts = [group.prompt for group in groups]
    if sizes.prompt_ids != tuple(prompt.id for prompt in prompts):
        raise RuntimeError(
            f"the sampling plan gave sizes for {len(sizes.prompt_ids)} prompts that are not the "
            f"step's {len(prompts)}, or in another order: rollouts would go to the wrong prompts. "
            "A round needs one size for each prompt of the step, 0 where it wants none."
        )
    with reward.stream() as scoring:
        arrivals = _Arrivals(scoring, groups, sizes.budget, sampling)
        returned = engine.generate(
            prompts,
            sizes,
            step=sampling.step,
            temperature=sampling.temperature,
            seed=sampling.seed,
            first_index=[len(group.rollouts) for group in groups],
            on_rollout=arrivals,
        )
        verdicts = scoring.verdicts()
    judged = {
        (rollout.prompt_id, rollout.index): (rollout, verdict)
        for rollout, verdict in zip(arrivals.rollouts, verdicts, strict=True)
    }
    _require_told(returned, arrivals.rollouts, judged)
    came = Counter(prompt_id for prompt_id, _ in judged)
    return [
        _extended(group, size, came[group.prompt.id], judged)
        for group, size in zip(groups, sizes.sizes, strict=True)
    ]


def _require_told(
    returned: Sequence[Rollout],
    told: Sequence[Rollout],
    judged: dict[tuple[str, int], tuple[Rollout, Verdict]],
) -> None:
    """Every rollout that is returned is, bit for bit, the one whose verdict is at hand."""
    same = len(returned) == len(told) == len(judged) and all(
        (key := (rollout.prompt_id, rollout.index)) in judged
        and (judged[key][0] is rollout or judged[key][0] == rollout)
        for rollout in returned
    )
    if not same:
        raise RuntimeError(
            f"the rollout engine told of {len(told)} rollouts ({len(judged)} different ones) and "
            f"returned {len(returned)}, and they are not the same: a verdict would be credited to "
            "a response that was not verified."
        )


def _extended(
    group: RolloutGroup,
    size: int,
    came: int,
    judged: dict[tuple[str, int], tuple[Rollout, Verdict]],
) -> RolloutGroup:
    """The group with the rollouts that follow its own; refuses a count that is not ``size``."""
    first = len(group.rollouts)
    wanted = [(group.prompt.id, k) for k in range(first, first + size)]
    present = [judged[key] for key in wanted if key in judged]
    if not len(present) == came == size:
        raise RuntimeError(
            f"the rollout engine returned {came} responses for prompt {group.prompt.id}, "
            f"{size} were allocated (numbers {first} to {first + size - 1}): the step's budget "
            "would not be what was decided."
        )
    return RolloutGroup(
        prompt=group.prompt,
        rollouts=(*group.rollouts, *(rollout for rollout, _ in present)),
        verdicts=(*group.verdicts, *(verdict for _, verdict in present)),
    )
