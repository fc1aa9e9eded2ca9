"""Sampling with a transformers model inside the process: no service, no extra install."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from dynamo_megatron.protocols import RolloutListener, WeightStream
from dynamo_megatron.rollout.decode import Decoded, DecodeSpec, decode
from dynamo_megatron.rollout.errors import RolloutError
from dynamo_megatron.rollout.kv_cache import (
    ATTENTION,
    register_attention,
    require_plain_attention,
)
from dynamo_megatron.rollout.sampling import uniforms_for
from dynamo_megatron.rollout.seeds import rollout_seed
from dynamo_megatron.rollout.servable import require_servable
from dynamo_megatron.rollout.weights import copy_weights
from dynamo_megatron.types import FinishReason, GroupSizes, Prompt, Rollout


@dataclass(frozen=True, slots=True)
class _Wanted:
    """One rollout to sample: the prompt's place in the step, k, its seed."""

    prompt: int
    k: int
    seed: int


class HfEngine:
    """A ``RolloutEngine`` on one CPU or GPU.

    A rollout's tokens are a function of the weights, its prompt and its seed, whatever it is
    batched with (up to float rounding between batch shapes, which can flip a token whose random
    number falls within 1e-6 of a boundary).

    Args:
        model_path: Hugging Face folder: architecture, tokenizer, initial weights.
        max_tokens: longest response.
        batch_size: sequences decoded together.
        stop_token_ids: tokens that end a response.
        pad_token_id: fills prompts on the left.
        dtype: of the weights and activations.
        device: where the model lives.
        num_threads: CPU threads while generating (rank 0 may use the cores of ranks that wait);
            None leaves torch's setting.
        version: version of the folder's own weights; None refuses to generate before
            ``load_weights``, so that a resumed run cannot sample from its starting point.

    Raises:
        RolloutError: the model's attention is not supported, or no stop token was given.
    """

    def __init__(
        self,
        model_path: str | Path,
        *,
        max_tokens: int,
        batch_size: int,
        stop_token_ids: Sequence[int],
        pad_token_id: int,
        dtype: torch.dtype = torch.float32,
        device: str | torch.device = "cpu",
        num_threads: int | None = None,
        version: int | None = None,
    ) -> None:
        if max_tokens < 1 or batch_size < 1 or not stop_token_ids:
            raise RolloutError(
                f"max_tokens={max_tokens}, batch_size={batch_size}, stop_token_ids="
                f"{tuple(stop_token_ids)}: the first two must be at least 1, and without a stop "
                "token no response could end. Take the stop tokens from the model's "
                "generation_config."
            )
        register_attention()
        with torch.random.fork_rng(devices=[]):  # building a model draws initial weights
            self._model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
                model_path, dtype=dtype, attn_implementation=ATTENTION
            )
        require_plain_attention(self._model.config)
        self._model.to(torch.device(device))  # pyright: ignore[reportCallIssue, reportArgumentType]
        self._model.eval().requires_grad_(False)
        self._tokenizer = AutoTokenizer.from_pretrained(model_path)
        self._max_tokens = max_tokens
        self._batch_size = batch_size
        self._stop_token_ids = tuple(stop_token_ids)
        self._pad_token_id = pad_token_id
        self._num_threads = num_threads
        self._version = version

    def load_weights(self, weights: WeightStream, *, version: int) -> None:
        """Make ``version`` the policy that the next ``generate`` samples from.

        Raises:
            RolloutError: a tensor is missing, unknown, comes twice or has another shape. The engine
                then refuses to generate until a load succeeds.
        """
        self._version = None  # half-loaded weights must not be sampled from
        copy_weights(self._model, weights)
        self._version = version

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
                likely token each time (logprobs are then those at temperature 1).
            seed: the run's seed.
            first_index: the k that each prompt's rollouts start at; 0 by default.
            on_rollout: told of each rollout when its batch is done.

        Raises:
            RolloutError: prompts and sizes do not match, a prompt is empty or too long for the
                model, no weights were loaded, or the logits are not finite.
        """
        version = self._version
        if version is None:
            raise RolloutError(
                "no complete set of weights is loaded, so the samples would come from an unknown "
                "policy. Call load_weights before generate."
            )
        require_servable(
            prompts,
            sizes,
            temperature,
            max_tokens=self._max_tokens,
            limit=self._model.config.max_position_embeddings,
        )
        spec = DecodeSpec(
            max_tokens=self._max_tokens,
            temperature=temperature,
            stop_token_ids=self._stop_token_ids,
            pad_token_id=self._pad_token_id,
        )
        wanted = [
            _Wanted(place, k, rollout_seed(seed, step, prompt.id, k))
            for place, (prompt, size, first) in enumerate(
                zip(prompts, sizes.sizes, first_index or [0] * len(prompts), strict=True)
            )
            for k in range(first, first + size)
        ]
        # Prompts of like length together: less padding. Stable, so a prompt's rollouts stay so too.
        by_length = sorted(wanted, key=lambda w: len(prompts[w.prompt].token_ids))
        rollouts: dict[tuple[int, int], Rollout] = {}
        with _threads(self._num_threads):
            for start in range(0, len(by_length), self._batch_size):
                rows = by_length[start : start + self._batch_size]
                sampled = self._sample(prompts, rows, spec, version)
                rollouts.update(zip(((r.prompt, r.k) for r in rows), sampled, strict=True))
                if on_rollout is not None:
                    for rollout in sampled:
                        on_rollout(rollout)
        return [rollouts[w.prompt, w.k] for w in wanted]

    def probe(self, prompts: Sequence[Prompt], *, temperature: float, seed: int) -> list[Rollout]:
        """Nothing to check: ``load_weights`` has compared every name and shape, and copied."""
        return []

    def close(self) -> None:
        """Nothing to release but memory, which goes with the object."""

    def _sample(
        self, prompts: Sequence[Prompt], rows: Sequence[_Wanted], spec: DecodeSpec, version: int
    ) -> list[Rollout]:
        """One batch; each prompt is read once, whatever the number of its rollouts."""
        places = list(dict.fromkeys(row.prompt for row in rows))
        local = {place: index for index, place in enumerate(places)}
        decoded = decode(
            self._model,
            [prompts[place].token_ids for place in places],
            [local[row.prompt] for row in rows],
            uniforms_for([row.seed for row in rows], spec.max_tokens),
            spec,
        )
        _require_finite(prompts, rows, decoded.logprobs, decoded.lengths)
        tokens, logprobs = _ragged(decoded.tokens, decoded), _ragged(decoded.logprobs, decoded)
        texts = self._tokenizer.batch_decode(tokens, skip_special_tokens=True)
        return [
            Rollout(
                prompt_id=prompts[row.prompt].id,
                index=row.k,
                token_ids=tuple(tokens[i]),
                logprobs=tuple(logprobs[i]),
                finish_reason=FinishReason.STOP if decoded.stopped[i] else FinishReason.LENGTH,
                weight_version=version,
                seed=row.seed,
                text=texts[i],
            )
            for i, row in enumerate(rows)
        ]


def _ragged(values_BT: Tensor, decoded: Decoded) -> list[list]:
    """Each sequence's own values."""
    rows = zip(values_BT.tolist(), decoded.lengths.tolist(), strict=True)
    return [row[:length] for row, length in rows]


def _require_finite(
    prompts: Sequence[Prompt], rows: Sequence[_Wanted], logprobs_BT: Tensor, lengths_B: Tensor
) -> None:
    """Refuse samples drawn from NaN: they look like tokens but are none."""
    sampled_BT = torch.arange(logprobs_BT.shape[1]) < lengths_B[:, None]
    broken_B = (sampled_BT & ~logprobs_BT.isfinite()).any(dim=1)
    if bool(broken_B.any()):
        row = rows[int(broken_B.nonzero()[0])]
        raise RolloutError(
            f"the logits of {int(broken_B.sum())} sequences are not finite, first those of rollout "
            f"{row.k} of prompt {prompts[row.prompt].id}: the policy's weights are broken (NaN or "
            "infinite). Look at the last update's gradient norm and restart from a checkpoint."
        )


@contextmanager
def _threads(count: int | None) -> Iterator[None]:
    """Run torch with so many CPU threads, then as before."""
    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)
