"""A ``RolloutEngine`` over vLLM replicas on Ray."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from transformers import AutoTokenizer

from dynamo_megatron.protocols import RolloutListener, WeightStream
from dynamo_megatron.rollout.errors import RolloutError
from dynamo_megatron.rollout.seeds import rollout_seed
from dynamo_megatron.rollout.servable import require_servable
from dynamo_megatron.rollout.vllm.dispatch import Dispatcher
from dynamo_megatron.rollout.vllm.fleet import Fleet
from dynamo_megatron.rollout.vllm.limits import check_temperature
from dynamo_megatron.rollout.vllm.schedule import LengthHistory, Planned, Schedule
from dynamo_megatron.rollout.vllm.wire import Sample, SampleRequest, Sampling
from dynamo_megatron.types import FinishReason, GroupSizes, Prompt, Rollout

PROBE_STEP = -1
"""Enters a probe's seeds in place of the step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """What the engine asks of its replicas.

    Attributes:
        max_tokens: longest response.
        max_model_len: longest prompt and response together.
        window: requests a replica holds at a time.
        probe_tokens: length of a probe.
        hang_timeout_s: after which a replica that makes no step is lost.
        top_p: kept probability mass.
        top_k: kept tokens; 0 keeps all.
    """

    max_tokens: int
    max_model_len: int
    window: int
    probe_tokens: int
    hang_timeout_s: float
    top_p: float = 1.0
    top_k: int = 0


@dataclass(frozen=True, slots=True)
class Timing:
    """When a replica sampled a response (seconds since the epoch)."""

    replica: int
    started_s: float
    finished_s: float
    tokens: int


class VllmEngine:
    """Samples on replicas that hold the current weights.

    A rollout's tokens are a function of the weights, its prompt and its seed: neither the number of
    replicas nor the loss of one changes them, up to float rounding between batch shapes.

    Args:
        fleet: the replicas, started.
        settings: see there.
        model_dir: for the tokenizer, which turns responses into text.
    """

    def __init__(self, fleet: Fleet, settings: EngineSettings, *, model_dir: str) -> None:
        self._fleet = fleet
        self._settings = settings
        self._tokenizer = AutoTokenizer.from_pretrained(model_dir)
        self._lengths = LengthHistory()
        self.timings: list[Timing] = []

    def load_weights(self, weights: WeightStream, *, version: int) -> None:
        """Bring ``version`` into every replica.

        Raises:
            RolloutError: see ``Fleet.update``. No replica samples until a load succeeds.
        """
        self._fleet.update(weights, version)

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

        Args and errors: see ``protocols.RolloutEngine``. Replicas that are lost on the way are
        replaced; what they held is sampled elsewhere with the same seeds.
        """
        version = self._require_version()
        require_servable(
            prompts,
            sizes,
            temperature,
            max_tokens=self._settings.max_tokens,
            limit=self._settings.max_model_len,
        )
        wanted = _wanted(prompts, sizes, first_index, step=step, seed=seed)
        rollouts: dict[str, Rollout] = {}
        self.timings = []

        def on_sample(replica: int, sample: Sample) -> None:
            rollout = self._as_rollout(wanted[sample.key], sample)
            rollouts[sample.key] = rollout
            self.timings.append(
                Timing(replica, sample.started_s, sample.finished_s, len(sample.token_ids))
            )
            if on_rollout is not None:
                on_rollout(rollout)

        dispatcher = Dispatcher(
            self._fleet,
            Schedule(
                [self._planned(key, one) for key, one in wanted.items()],
                window=self._settings.window,
                num_replicas=len(self._fleet.ready),
            ),
            self._sampling(temperature, version, self._settings.max_tokens),
            hang_timeout_s=self._settings.hang_timeout_s,
            on_sample=on_sample,
        )
        try:
            dispatcher.run()
        except BaseException:
            self._fleet.cancel()
            raise
        self._lengths.observe((r.prompt_id, len(r.token_ids)) for r in rollouts.values())
        return [rollouts[key] for key in wanted]

    def probe(self, prompts: Sequence[Prompt], *, temperature: float, seed: int) -> list[Rollout]:
        """One short rollout of each prompt from every replica; k is the replica's place.

        They are drawn from the full distribution, whatever is cut in training.
        """
        version = self._require_version()
        sampling = Sampling(
            temperature=temperature,
            max_tokens=min(self._settings.probe_tokens, self._settings.max_tokens),
            version=version,
        )
        replicas = self._fleet.ready
        wanted = {
            (number, prompt.id): _Wanted(
                prompt, place, rollout_seed(seed, PROBE_STEP, prompt.id, place)
            )
            for place, number in enumerate(replica.number for replica in replicas)
            for prompt in prompts
        }
        requests = {
            replica.number: [
                wanted[replica.number, prompt.id].request(f"probe/{prompt.id}")
                for prompt in prompts
            ]
            for replica in replicas
        }
        found = self._fleet.exchange_all(requests, sampling)
        return [
            self._as_rollout(wanted[replica.number, prompt.id], samples[f"probe/{prompt.id}"])
            for prompt in prompts
            for replica, samples in zip(replicas, found.values(), strict=True)
        ]

    def close(self) -> None:
        """End the replicas, and Ray where it was started here."""
        self._fleet.close()

    def _require_version(self) -> int:
        if self._fleet.version is None:
            raise RolloutError(
                "no complete set of weights is loaded, so the samples would come from an unknown "
                "policy. Call load_weights before generate."
            )
        return self._fleet.version

    def _sampling(self, temperature: float | None, version: int, max_tokens: int) -> Sampling:
        if temperature is not None:
            try:
                check_temperature("temperature", temperature)
            except ValueError as error:
                raise RolloutError(str(error)) from None
        return Sampling(
            temperature=temperature,
            max_tokens=max_tokens,
            version=version,
            top_p=self._settings.top_p,
            top_k=self._settings.top_k,
        )

    def _planned(self, key: str, wanted: _Wanted) -> Planned:
        return Planned(
            request=wanted.request(key),
            group=wanted.prompt.id,
            expected_tokens=self._lengths.expected(wanted.prompt.id, self._settings.max_tokens),
        )

    def _as_rollout(self, wanted: _Wanted, sample: Sample) -> Rollout:
        if not all(map(math.isfinite, sample.logprobs)):
            raise RolloutError(
                f"the logits of rollout {wanted.k} of prompt {wanted.prompt.id} are not finite: "
                "the policy's weights are broken (NaN or infinite). Look at the last update's "
                "gradient norm and restart from a checkpoint."
            )
        return Rollout(
            prompt_id=wanted.prompt.id,
            index=wanted.k,
            token_ids=sample.token_ids,
            logprobs=sample.logprobs,
            finish_reason=FinishReason(sample.finish_reason),
            weight_version=sample.version,
            seed=wanted.seed,
            text=self._tokenizer.decode(sample.token_ids, skip_special_tokens=True),
        )


@dataclass(frozen=True, slots=True)
class _Wanted:
    """One rollout: its prompt, k and seed."""

    prompt: Prompt
    k: int
    seed: int

    def request(self, key: str) -> SampleRequest:
        return SampleRequest(key=key, token_ids=self.prompt.token_ids, seed=self.seed)


def _wanted(
    prompts: Sequence[Prompt],
    sizes: GroupSizes,
    first_index: Sequence[int] | None,
    *,
    step: int,
    seed: int,
) -> dict[str, _Wanted]:
    starts = first_index or [0] * len(prompts)
    return {
        f"{prompt.id}/{k}": _Wanted(prompt, k, rollout_seed(seed, step, prompt.id, k))
        for prompt, size, first in zip(prompts, sizes.sizes, starts, strict=True)
        for k in range(first, first + size)
    }
