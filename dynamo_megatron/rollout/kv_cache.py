"""Key-value cache and attention of the decode loop, in transformers' own slots.

transformers' dynamic cache copies all it holds at every token, and its SDPA path repeats every
key-value head when a mask is given. On the CPU those two copies cost several times the model. Here
the cache writes in place, and the query heads that share a key-value head are queries of one
attention call, so nothing is repeated.

Shapes: B sequences, H query heads, Hk key-value heads, q new positions, n held positions, D head.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, DynamicCache, PretrainedConfig
from transformers.cache_utils import Cache, CacheLayerMixin

from dynamo_megatron.rollout.errors import RolloutError

ATTENTION = "dynamo_grouped_sdpa"
GROWTH = 1.5


class InPlaceLayer(CacheLayerMixin):
    """One layer's keys and values in buffers with room to grow.

    Args:
        room: positions to reserve at first, beyond the prompt.
    """

    def __init__(self, room: int) -> None:
        super().__init__()
        self._room = room
        self._length = 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Reserve the prompt's length and the room."""
        batch, heads, length, _ = key_states.shape
        shape = (batch, heads, length + self._room)
        self.keys = key_states.new_empty((*shape, key_states.shape[-1]))
        self.values = value_states.new_empty((*shape, value_states.shape[-1]))
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Append [B, Hk, q, D] and return views of all that is held, [B, Hk, n, D]."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        assert self.keys is not None and self.values is not None, "initialised above"
        start, self._length = self._length, self._length + key_states.shape[-2]
        if self._length > self.keys.shape[-2]:
            self.keys = _grown(self.keys, self._length)
            self.values = _grown(self.values, self._length)
        self.keys[:, :, start : self._length] = key_states
        self.values[:, :, start : self._length] = value_states
        return self.keys[:, :, : self._length], self.values[:, :, : self._length]

    def select(self, rows: Tensor) -> None:
        """Keep, drop or repeat sequences: row i becomes what ``rows[i]`` was."""
        assert self.keys is not None and self.values is not None, "nothing cached yet"
        self.keys = self.keys.index_select(0, rows)
        self.values = self.values.index_select(0, rows)

    def get_seq_length(self) -> int:
        """Positions held."""
        return self._length

    def get_max_length(self) -> int:
        """-1, transformers' word for no limit."""
        return -1

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Length and offset that a mask must cover."""
        return self._length + query_length, 0


def _grown(buffer: Tensor, needed: int) -> Tensor:
    batch, heads, length, dim = buffer.shape
    larger = buffer.new_empty(batch, heads, max(needed, int(length * GROWTH)), dim)
    larger[:, :, :length] = buffer
    return larger


class InPlaceCache(Cache):
    """The cache of all layers.

    Args:
        num_layers: layers of the model.
        room: positions to reserve beyond the prompt.
    """

    def __init__(self, num_layers: int, room: int) -> None:
        self.in_place = [InPlaceLayer(room) for _ in range(num_layers)]
        super().__init__(layers=list(self.in_place))

    def select(self, rows: Tensor) -> None:
        """Keep, drop or repeat sequences in every layer."""
        for layer in self.in_place:
            layer.select(rows)


def require_plain_attention(config: PretrainedConfig) -> None:
    """Refuse a model whose layers do not all attend to everything before.

    Raises:
        RolloutError: sliding-window or linear-attention layers, whose masks are not made here.
    """
    cache = DynamicCache(config=config)
    if any(cache.is_sliding):
        raise RolloutError(
            f"the embedded engine cannot sample from a {config.model_type} with sliding-window "
            "layers: it attends to all tokens before. Use a model with full attention."
        )


def register_attention() -> None:
    """Make ``ATTENTION`` known to transformers. Repeating it changes nothing."""
    AttentionInterface.register(ATTENTION, grouped_attention)


def grouped_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor,
    scaling: float,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_others: object,
) -> tuple[Tensor, None]:
    """Attention for transformers' layers: all query heads of a key-value head in one call.

    Args:
        module: the attention layer, not used.
        query: [B, H, q, D].
        key: [B, Hk, n, D]; H is a multiple of Hk and head h reads key-value head h // (H / Hk).
        value: [B, Hk, n, D].
        attention_mask: [B, 1, q, n] bool, true where a query may look.
        scaling: factor of the scores.
        softcap: must be absent.
        s_aux: attention sinks, must be absent.
        **_others: what transformers passes to every implementation and this one needs not.

    Returns:
        [B, q, H, D] and no weights.
    """
    if softcap is not None or s_aux is not None:
        raise RolloutError(
            "the embedded engine does not implement soft-capped scores or attention sinks, and "
            "leaving them out would sample from another policy. Use another model."
        )
    batch, heads, length, dim = query.shape
    kv_heads = key.shape[1]
    group = heads // kv_heads
    grouped = query.reshape(batch, kv_heads, group * length, dim)
    mask = attention_mask
    if length > 1 and group > 1:
        mask = mask.repeat(1, 1, group, 1)  # the group's queries follow one another
    out = scaled_dot_product_attention(grouped, key, value, attn_mask=mask, scale=scaling)
    return out.reshape(batch, heads, length, -1).transpose(1, 2).contiguous(), None


def prompt_mask(lengths_B: Tensor, longest: int) -> Tensor:
    """Mask of left-padded prompts: [B, 1, longest, longest] bool.

    A padding position looks at itself: with nothing to look at its values would be NaN, and a
    masked NaN still poisons a weighted sum.
    """
    place = torch.arange(longest, device=lengths_B.device)
    real_BN = place >= (longest - lengths_B)[:, None]
    causal_NN = place[:, None] >= place
    alone_NN = place[:, None] == place
    return ((causal_NN & real_BN[:, None, :]) | alone_NN)[:, None]
