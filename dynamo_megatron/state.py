"""What the loop carries from step to step, besides the policy. Equal on every rank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from dynamo_megatron.algo.history import SuccessHistory
from dynamo_megatron.evaluate.heldout import HeldoutResult
from dynamo_megatron.types import Counters, DataCursor


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
    """

    step: int = 0
    cursor: DataCursor = field(default_factory=DataCursor)
    history: SuccessHistory = field(default_factory=SuccessHistory)
    epoch_history: SuccessHistory = field(default_factory=SuccessHistory)
    counters: Counters = field(default_factory=Counters)
    evaluations: tuple[HeldoutResult, ...] = ()

    def evaluated(self, step: int) -> HeldoutResult | None:
        """The held-out result of the policy after ``step`` steps, if it was measured."""
        return next((result for result in self.evaluations if result.step == step), None)

    def to_json(self) -> dict[str, Any]:
        """A plain JSON value; floats come back exactly."""
        return {
            "step": self.step,
            "cursor": asdict(self.cursor),
            "history": self.history.to_json(),
            "epoch_history": self.epoch_history.to_json(),
            "counters": asdict(self.counters),
            "evaluations": [asdict(result) for result in self.evaluations],
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> LoopState:
        """Inverse of ``to_json``."""
        return cls(
            step=data["step"],
            cursor=DataCursor(**data["cursor"]),
            history=SuccessHistory.from_json(data["history"]),
            epoch_history=SuccessHistory.from_json(data["epoch_history"]),
            counters=Counters(**data["counters"]),
            evaluations=tuple(HeldoutResult(**result) for result in data["evaluations"]),
        )
