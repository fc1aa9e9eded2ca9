"""Each prompt's record of successes, the only memory of the allocator."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class SuccessHistory:
    """Successes and rollouts of every prompt seen so far. Immutable; keyed by prompt id only.

    Attributes:
        counts: prompt id -> (k successes, G verified rollouts), 0 <= k <= G. Real numbers, because
            old evidence may be decayed. A prompt that is absent has (0, 0).

    Raises:
        ValueError: a count is not a finite number, or not 0 <= k <= G.
    """

    counts: Mapping[str, tuple[float, float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        checked = {}
        for prompt_id, (successes, rollouts) in self.counts.items():
            if not isinstance(prompt_id, str):
                raise ValueError(
                    f"prompt id {prompt_id!r} is a {type(prompt_id).__name__}: counts are kept by "
                    "content, a row number would collide between files. Use the prompt's id."
                )
            # Written so that NaN fails too.
            if not (0 <= successes <= rollouts and math.isfinite(rollouts)):
                raise ValueError(
                    f"prompt {prompt_id} has {successes} successes of {rollouts} rollouts, which "
                    "no sampling can give: a step was counted twice, or the saved history is "
                    "damaged. Restart from an older checkpoint, or from an empty history."
                )
            checked[prompt_id] = (float(successes), float(rollouts))
        object.__setattr__(self, "counts", MappingProxyType(checked))

    def __reduce__(self) -> tuple[type[SuccessHistory], tuple[dict[str, tuple[float, float]]]]:
        # A mapping proxy cannot be pickled, and histories travel between processes.
        return SuccessHistory, (dict(self.counts),)

    def lookup(self, prompt_ids: Iterable[str]) -> tuple[Tensor, Tensor]:
        """Return ``(num_correct, num_rollouts)``, both [P] float64, in the order of the ids."""
        rows = [self.counts.get(prompt_id, (0.0, 0.0)) for prompt_id in prompt_ids]
        table_P2 = torch.tensor(rows, dtype=torch.float64).reshape(-1, 2)
        return table_P2[:, 0].contiguous(), table_P2[:, 1].contiguous()

    def updated(self, results: Sequence[tuple[str, int, int]]) -> SuccessHistory:
        """Return the history after one step; this one stays as it is.

        Args:
            results: (prompt id, successes, verified rollouts) of each prompt of the step, in any
                order. Rollouts whose verification failed are in neither number. A prompt with no
                verified rollout is left as it was.

        Raises:
            ValueError: an id comes twice, or not 0 <= successes <= rollouts.
        """
        counts = dict(self.counts)
        seen: set[str] = set()
        for prompt_id, successes, rollouts in results:
            if prompt_id in seen:
                raise ValueError(
                    f"prompt {prompt_id} comes twice in one step's results: its rollouts would be "
                    "counted twice or its groups were split. Sum each prompt's rollouts first."
                )
            seen.add(prompt_id)
            if not 0 <= successes <= rollouts:
                raise ValueError(
                    f"prompt {prompt_id} reports {successes} successes of {rollouts} verified "
                    "rollouts. Count both over the same rollouts of this prompt."
                )
            if rollouts:
                old_successes, old_rollouts = counts.get(prompt_id, (0.0, 0.0))
                counts[prompt_id] = (old_successes + successes, old_rollouts + rollouts)
        return SuccessHistory(counts)

    def decayed(self, rho: float) -> SuccessHistory:
        """Return the history with every count multiplied by ``rho`` (once an epoch; 1 keeps all).

        Raises:
            ValueError: ``rho`` is outside (0, 1].
        """
        if not 0 < rho <= 1:
            raise ValueError(
                f"history decay is {rho}, but it multiplies counts and must be in (0, 1]. "
                "Use 1 to never forget."
            )
        return SuccessHistory({p: (rho * k, rho * g) for p, (k, g) in self.counts.items()})

    def to_json(self) -> dict[str, list[float]]:
        """Return plain JSON data, sorted by id; `from_json` gives back the very same numbers."""
        return {prompt_id: list(self.counts[prompt_id]) for prompt_id in sorted(self.counts)}

    @classmethod
    def from_json(cls, data: Mapping[str, Sequence[float]]) -> SuccessHistory:
        """Read what `to_json` gave.

        Raises:
            ValueError: an entry is not a pair of numbers with 0 <= k <= G.
        """
        counts = {}
        for prompt_id, pair in data.items():
            if len(pair) != 2 or not all(type(x) in (int, float) for x in pair):
                raise ValueError(
                    f"saved history of prompt {prompt_id} is {pair!r}, expected [successes, "
                    "rollouts]: the file is damaged or of another kind. Use an older checkpoint."
                )
            counts[prompt_id] = (pair[0], pair[1])
        return cls(counts)

    def digest(self) -> str:
        """Return a sha256 (hex) of the contents, whatever the order they came in."""
        text = json.dumps([[p, k.hex(), g.hex()] for p, (k, g) in sorted(self.counts.items())])
        return hashlib.sha256(text.encode()).hexdigest()
