"""The decode loop: one batch of sequences from prompts to finished responses.

Shapes: P prompts, B sequences, b sequences still in the batch, L longest prompt, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from transformers import PreTrainedModel

from dynamo_megatron.rollout.kv_cache import InPlaceCache, prompt_mask
from dynamo_megatron.rollout.sampling import greedy_tokens, sample_tokens

COMPACT_BELOW = 0.75
"""Finished sequences leave the batch when at most this share of it is still going on."""
FIRST_ROOM = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeSpec:
    """What is sampled, and until when.

    Attributes:
        max_tokens: longest response.
        temperature: of the sampled policy; None takes the most likely token each time.
        stop_token_ids: tokens that end a response; they belong to it.
        pad_token_id: fills the prompts on the left; never seen by another token.
    """

    max_tokens: int
    temperature: float | None
    stop_token_ids: tuple[int, ...]
    pad_token_id: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoded:
    """Responses of one batch; the loop writes into them.

    Attributes:
        tokens: [B, steps] int64, meaningful up to each row's length.
        logprobs: [B, steps] float32, nats.
        lengths: [B] int64, at least 1; the stop token counts.
        stopped: [B] bool, ended by a stop token.
    """

    tokens: Tensor
    logprobs: Tensor
    lengths: Tensor
    stopped: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class _Batch:
    """The b sequences still being decoded.

    Attributes:
        rows: [b] their places among all B.
        alive: [b] bool, not ended yet.
        next_position: [b] position of the next token.
        mask: [b, 1, 1, L + max_tokens] bool, false on the prompt's padding.
    """

    rows: Tensor
    alive: Tensor
    next_position: Tensor
    mask: Tensor

    def select(self, keep: Tensor) -> _Batch:
        """Only the sequences at ``keep``."""
        return _Batch(
            rows=self.rows[keep],
            alive=self.alive[keep],
            next_position=self.next_position[keep],
            mask=self.mask[keep],
        )


@torch.inference_mode()
def decode(
    model: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    prompt_of_row: Sequence[int],
    uniforms: Tensor,
    spec: DecodeSpec,
) -> Decoded:
    """Sample one response for each row.

    Args:
        model: a causal language model with ``grouped_attention``.
        prompts: P different prompts as token ids, none empty.
        prompt_of_row: B prompt indices, one for each response wanted.
        uniforms: [B, max_tokens] float64 in [0, 1), one number for each token.
        spec: how to sample and when to stop.
    """
    device = model.device
    cache = InPlaceCache(model.config.num_hidden_layers, min(spec.max_tokens, FIRST_ROOM))
    lengths_P = torch.tensor([len(prompt) for prompt in prompts], device=device)
    of_row_B = torch.tensor(prompt_of_row, device=device)
    logits = _prefill(model, prompts, lengths_P, cache, spec.pad_token_id)[of_row_B]
    cache.select(of_row_B)
    batch = _first_batch(lengths_P[of_row_B], spec.max_tokens)
    uniforms = uniforms.to(device)
    stops = torch.tensor(spec.stop_token_ids, device=device)
    output = _empty_output(len(prompt_of_row), spec.max_tokens, device)
    for step in range(spec.max_tokens):
        ids, logp = (
            greedy_tokens(logits)
            if spec.temperature is None
            else sample_tokens(logits, uniforms[batch.rows, step], spec.temperature)
        )
        batch = _record(output, batch, step, ids, logp, stops)
        num_alive = int(batch.alive.sum())
        if num_alive == 0 or step + 1 == spec.max_tokens:
            break
        if num_alive <= COMPACT_BELOW * len(batch.rows):
            keep = batch.alive.nonzero()[:, 0]
            batch, ids = batch.select(keep), ids[keep]
            cache.select(keep)
        logits = _next_logits(model, ids, batch, cache)
        batch = replace(batch, next_position=batch.next_position + 1)
    steps = int(output.lengths.max())
    return Decoded(
        tokens=output.tokens[:, :steps].cpu(),
        logprobs=output.logprobs[:, :steps].cpu(),
        lengths=output.lengths.cpu(),
        stopped=output.stopped.cpu(),
    )


def _prefill(
    model: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    lengths_P: Tensor,
    cache: InPlaceCache,
    pad_token_id: int,
) -> Tensor:
    """Logits [P, V] after each prompt, left-padded to one length; fills the cache."""
    longest = max(len(prompt) for prompt in prompts)
    ids = torch.tensor(
        [[pad_token_id] * (longest - len(prompt)) + list(prompt) for prompt in prompts],
        device=lengths_P.device,
    )
    place = torch.arange(longest, device=lengths_P.device)
    positions = (place - (longest - lengths_P)[:, None]).clamp_(min=0)
    return model(
        input_ids=ids,
        attention_mask=prompt_mask(lengths_P, longest),
        position_ids=positions,
        past_key_values=cache,
        use_cache=True,
        logits_to_keep=1,
    ).logits[:, -1]


def _next_logits(model: PreTrainedModel, ids: Tensor, batch: _Batch, cache: InPlaceCache) -> Tensor:
    """Logits [b, V] after one more token of each sequence."""
    held = cache.get_seq_length() + 1
    return model(
        input_ids=ids[:, None],
        attention_mask=batch.mask[..., :held],
        position_ids=batch.next_position[:, None],
        past_key_values=cache,
        use_cache=True,
        logits_to_keep=1,
    ).logits[:, -1]


def _first_batch(lengths_B: Tensor, max_tokens: int) -> _Batch:
    longest = int(lengths_B.max())
    place = torch.arange(longest + max_tokens, device=lengths_B.device)
    return _Batch(
        rows=torch.arange(len(lengths_B), device=lengths_B.device),
        alive=torch.ones_like(lengths_B, dtype=torch.bool),
        next_position=lengths_B,
        mask=(place >= (longest - lengths_B)[:, None])[:, None, None],
    )


def _empty_output(rows: int, max_tokens: int, device: torch.device) -> Decoded:
    return Decoded(
        tokens=torch.zeros(rows, max_tokens, dtype=torch.int64, device=device),
        logprobs=torch.zeros(rows, max_tokens, dtype=torch.float32, device=device),
        lengths=torch.zeros(rows, dtype=torch.int64, device=device),
        stopped=torch.zeros(rows, dtype=torch.bool, device=device),
    )


def _record(
    output: Decoded, batch: _Batch, step: int, ids: Tensor, logp: Tensor, stops: Tensor
) -> _Batch:
    """Write one token of each sequence; a sequence that has ended no longer grows."""
    output.tokens[batch.rows, step] = ids
    output.logprobs[batch.rows, step] = logp
    output.lengths[batch.rows] += batch.alive
    stopping = batch.alive & torch.isin(ids, stops)
    output.stopped[batch.rows] |= stopping
    return replace(batch, alive=batch.alive & ~stopping)
