"""What the loop carries from step to step, besides the policy. Equal on every rank."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from dynamo_megatron.algo.history import SuccessHistory
from dynamo_megatron.evaluate.heldout import HeldoutResult
from dynamo_megatron.parallel.codec import decode_groups, encode_groups
from dynamo_megatron.types import Counters, DataCursor, GroupSizes, Prompt, RolloutGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class Draw:
    """The prompts of a step, and how many rollouts each of them gets.

    Attributes:
        step: that trains on them; enters the rollouts' seeds.
        prompts: in the order in which they were drawn.
        sizes: rollouts for each.
        cursor: where the next prompts are drawn.
        num_cold: prompts whose variance was not known.
    """

    step: int
    prompts: tuple[Prompt, ...]
    sizes: GroupSizes
    cursor: DataCursor
    num_cold: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledBatch:
    """A draw with its verified rollouts, before anything is trained on them."""

    draw: Draw
    groups: tuple[RolloutGroup, ...]

    def to_json(self) -> dict[str, Any]:
        """Everything but the groups, and a digest that ties them to it."""
        draw = self.draw
        return {
            "step": draw.step,
            "sizes": list(draw.sizes.sizes),
            "cursor": asdict(draw.cursor),
            "num_cold": draw.num_cold,
            "digest": _digest(self.groups),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any], rollouts: bytes) -> SampledBatch:
        """Inverse of ``to_json``, given the encoded groups.

        Raises:
            ValueError: the groups are not those that ``data`` was written with.
        """
        groups = tuple(decode_groups(rollouts))
        sizes = [len(group.rollouts) for group in groups]
        if _digest(groups) != data["digest"] or sizes != data["sizes"]:
            raise ValueError(
                f"the rollouts sampled ahead are not those of step {data['step']} that the "
                "checkpoint's trainer.json describes: files of two checkpoints were mixed. Go back "
                "to an older checkpoint."
            )
        prompts = tuple(group.prompt for group in groups)
        draw = Draw(
            step=data["step"],
            prompts=prompts,
            sizes=GroupSizes(prompt_ids=tuple(p.id for p in prompts), sizes=tuple(sizes)),
            cursor=DataCursor(**data["cursor"]),
            num_cold=data["num_cold"],
        )
        return cls(draw=draw, groups=groups)


def _digest(groups: tuple[RolloutGroup, ...]) -> str:
    """Of the identities: prompts, seeds and weights. Contents have the file's own hash."""
    named = [[g.prompt.id, [[r.seed, r.weight_version] for r in g.rollouts]] for g in groups]
    return hashlib.sha256(json.dumps(named).encode()).hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopState:
    """The trainer's own state; with the policy's it is all that a run needs to go on.

    Attributes:
        step: steps done.
        cursor: where the next prompts are drawn.
        history: successes and rollouts of every prompt.
        epoch_history: the history as it was when the epoch began, for ``refresh=epoch``.
        counters: what was left out or went wrong.
        evaluations: held-out results so far, each step at most once.
        ahead: with ``one_step_off`` the next step's rollouts, by the weights before the last
            update. Those weights are gone: only a checkpoint can bring these rollouts back.
    """

    step: int = 0
    cursor: DataCursor = field(default_factory=DataCursor)
    history: SuccessHistory = field(default_factory=SuccessHistory)
    epoch_history: SuccessHistory = field(default_factory=SuccessHistory)
    counters: Counters = field(default_factory=Counters)
    evaluations: tuple[HeldoutResult, ...] = ()
    ahead: SampledBatch | None = None

    def evaluated(self, step: int) -> HeldoutResult | None:
        """The held-out result of the policy after ``step`` steps, if it was measured."""
        return next((result for result in self.evaluations if result.step == step), None)

    def to_json(self) -> dict[str, Any]:
        """A plain JSON value, without the rollouts ahead; floats come back exactly."""
        return {
            "step": self.step,
            "cursor": asdict(self.cursor),
            "history": self.history.to_json(),
            "epoch_history": self.epoch_history.to_json(),
            "counters": asdict(self.counters),
            "evaluations": [asdict(result) for result in self.evaluations],
            "ahead": None if self.ahead is None else self.ahead.to_json(),
        }

    def encoded_rollouts(self) -> bytes:
        """The rollouts ahead, as ``from_json`` takes them."""
        assert self.ahead is not None, "nothing was sampled ahead"
        return encode_groups(self.ahead.groups)

    @classmethod
    def from_json(cls, data: Mapping[str, Any], rollouts: bytes | None = None) -> LoopState:
        """Inverse of ``to_json`` and ``encoded_rollouts``.

        Raises:
            ValueError: state and rollouts are not of one checkpoint.
        """
        ahead = data.get("ahead")  # checkpoints from before the key have nothing ahead
        if (ahead is None) != (rollouts is None):
            raise ValueError(
                "a checkpoint's trainer.json and its rollouts.safetensors do not agree on whether "
                "rollouts were sampled ahead. Go back to an older checkpoint."
            )
        return cls(
            step=data["step"],
            cursor=DataCursor(**data["cursor"]),
            history=SuccessHistory.from_json(data["history"]),
            epoch_history=SuccessHistory.from_json(data["epoch_history"]),
            counters=Counters(**data["counters"]),
            evaluations=tuple(HeldoutResult(**result) for result in data["evaluations"]),
            ahead=None if rollouts is None else SampledBatch.from_json(data["ahead"], rollouts),
        )
