"""Scripted stand-ins behind the protocols, for tests of the loop. They record what happens when."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from dynamo_megatron.protocols import RolloutListener, WeightStream
from dynamo_megatron.rollout.errors import RolloutError
from dynamo_megatron.rollout.seeds import rollout_seed
from dynamo_megatron.types import FinishReason, GroupSizes, Prompt, Rollout


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """One response: its tokens, what they decode to and the logprob of each."""

    token_ids: tuple[int, ...]
    text: str
    logprob: float = -1.0
    finish_reason: FinishReason = FinishReason.STOP

    def as_rollout(self, prompt_id: str, index: int, *, version: int, seed: int) -> Rollout:
        """The rollout that a policy of this script would have sampled."""
        return Rollout(
            prompt_id=prompt_id,
            index=index,
            token_ids=self.token_ids,
            logprobs=(self.logprob,) * len(self.token_ids),
            finish_reason=self.finish_reason,
            weight_version=version,
            seed=seed,
            text=self.text,
        )


@dataclass
class ScriptedEngine:
    """A ``RolloutEngine`` that answers each prompt from a script, and keeps a diary.

    Attributes:
        scripts: by prompt id the responses in turn; rollout k gets number k modulo their count.
        events: what was called, in order. Share the list among fakes to see one order of all.
        fail_at_step: ``generate`` of this step raises.
    """

    scripts: Mapping[str, Sequence[Script]]
    events: list[str] = field(default_factory=list)
    fail_at_step: int | None = None
    version: int | None = None

    def load_weights(self, weights: WeightStream, *, version: int) -> None:
        """Exhaust the stream and remember the version."""
        names = [name for name, _ in weights]
        self.version = version
        self.events.append(f"load {len(names)} weights of version {version}")

    def generate(
        self,
        prompts: Sequence[Prompt],
        sizes: GroupSizes,
        *,
        step: int,
        temperature: float,
        seed: int,
        first_index: Sequence[int] | None = None,
        on_rollout: RolloutListener | None = None,
    ) -> list[Rollout]:
        """Scripted rollouts with the real seeds and the loaded version."""
        self.events.append(f"generate {sizes.budget} rollouts at step {step}")
        if self.version is None:
            raise RolloutError("generate was called before load_weights")
        if tuple(prompt.id for prompt in prompts) != sizes.prompt_ids:
            raise RolloutError("prompts and sizes are in different orders")
        if step == self.fail_at_step:
            raise RolloutError(f"scripted failure at step {step}")
        starts = first_index or [0] * len(prompts)
        rollouts = [
            self.scripts[prompt.id][k % len(self.scripts[prompt.id])].as_rollout(
                prompt.id, k, version=self.version, seed=rollout_seed(seed, step, prompt.id, k)
            )
            for prompt, size, first in zip(prompts, sizes.sizes, starts, strict=True)
            for k in range(first, first + size)
        ]
        for rollout in rollouts if on_rollout is not None else ():
            on_rollout(rollout)
        return rollouts

    def probe(self, prompts: Sequence[Prompt], *, temperature: float, seed: int) -> list[Rollout]:
        """A script needs no check."""
        return []

    def close(self) -> None:
        """Note that the loop released the engine."""
        self.events.append("close engine")
