"""Causal attention over packed rows where Transformer Engine is not available.

Shapes: T tokens of a row, H query heads of this rank, K key-value heads (groups) of this rank,
D head dimension.
"""

from dataclasses import dataclass

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn import functional as F

# Sequences of 1 to 32 tokens share a batch, 33 to 64, and so on. With 256 sequences of 40 tokens a
# layer's forward and backward takes a quarter of the time of one call a sequence; the padding is
# at most 31 tokens. 32 rows of float32 or bfloat16 also start every sequence on a cache line.
_WIDTH_STEP = 32


class PackedDotProductAttention(DotProductAttention):
    """Megatron-Core's local attention, able to take packed sequences as well.

    Use it as ``core_attention`` of the local layer spec. A row of packed sequences
    (``PackedSeqParams`` with ``qkv_format="thd"``) then means the same as with Transformer
    Engine: every sequence attends causally to itself and to nothing else. Without
    ``packed_seq_params`` it is Megatron-Core's own attention.

    Raises:
        ValueError: the configuration asks for what this attention does not compute.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: ProcessGroupCollection | None = None,
    ) -> None:
        dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        _refuse_unsupported(config, attn_mask_type, dropout)
        super().__init__(
            config,
            layer_number,
            attn_mask_type,
            attention_type,
            attention_dropout,
            softmax_scale,
            cp_comm_type,
            pg_collection,
        )

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> Tensor:
        """Attend within each packed sequence.

        Args:
            query: [T, H, D].
            key: [T, K, D]; H is a multiple of K.
            value: [T, K, D].
            attention_mask: ignored for packed rows, whose boundaries say it all.
            attn_mask_type: ignored likewise: causal.
            attention_bias: must be None.
            packed_seq_params: boundaries of the row's sequences, the same for queries and keys.

        Returns:
            [T, H * D], in the dtype of ``query``.

        Raises:
            ValueError: the boundaries do not cover the row, or there is a bias.
        """
        if packed_seq_params is None:
            return super().forward(
                query, key, value, attention_mask, attn_mask_type, attention_bias, None
            )
        if attention_bias is not None:
            raise ValueError(
                "attention_bias was given for a packed row, whose attention is plain causal. "
                "Remove the bias, or use Transformer Engine's attention."
            )
        boundaries = _boundaries(packed_seq_params, num_tokens=query.shape[0])
        return packed_causal_attention(query, key, value, boundaries, scale=self.softmax_scale)


def packed_causal_attention(
    query_THD: Tensor, key_TKD: Tensor, value_TKD: Tensor, boundaries: list[int], *, scale: float
) -> Tensor:
    """Causal attention inside each sequence of a packed row.

    The sequences are computed in batches of about equal length. A sequence is padded to a length
    that follows from its own length alone, and the batch is a dimension that the kernel does not
    mix. So its result and gradients do not depend, in any bit, on the other sequences of the row.
    (Padding all to the longest would be simpler, and would not have this property: the kernel
    splits its sums by the padded length.)

    Args:
        query_THD: [T, H, D] float32 or bfloat16.
        key_TKD: [T, K, D]; H is a multiple of K.
        value_TKD: [T, K, D].
        boundaries: N + 1 ascending offsets from 0 to T; sequence i is ``[b[i], b[i + 1])``.
        scale: factor on the scores.

    Returns:
        [T, H * D].
    """
    batches = _batches_of_equal_width(boundaries, query_THD.device)
    order_T = torch.cat([batch.tokens for batch in batches])
    counts = [len(batch.tokens) for batch in batches]
    # One reordering and one split: selecting each batch from the whole row would cost a gradient
    # of the row's size for every batch.
    queries, keys, values = (
        x.index_select(0, order_T).split(counts) for x in (query_THD, key_TKD, value_TKD)
    )
    attended = [
        _padded_causal_attention(query, key, value, batch, scale)
        for query, key, value, batch in zip(queries, keys, values, batches, strict=True)
    ]
    position_T = torch.empty_like(order_T)
    position_T[order_T] = torch.arange(len(order_T), device=order_T.device)
    return torch.cat(attended).index_select(0, position_T)


@dataclass(frozen=True, slots=True)
class _Batch:
    """Sequences of a row that are padded to the same length.

    Attributes:
        num_sequences: how many.
        width: their padded length.
        tokens: [t] their tokens' indices in the row.
        slots: [t] each of those tokens' index among the ``num_sequences * width`` of the batch.
    """

    num_sequences: int
    width: int
    tokens: Tensor
    slots: Tensor


def _batches_of_equal_width(boundaries: list[int], device: torch.device) -> list[_Batch]:
    start_N = torch.tensor(boundaries[:-1], device=device)
    length_N = torch.tensor(boundaries, device=device).diff()
    width_N = (length_N + _WIDTH_STEP - 1) // _WIDTH_STEP * _WIDTH_STEP
    batches = []
    for width in width_N.unique().tolist():
        members = (width_N == width).nonzero().flatten()
        offset = torch.arange(width, device=device)
        is_token = (offset < length_N[members, None]).flatten()
        tokens = (start_N[members, None] + offset).flatten()[is_token]
        batches.append(_Batch(len(members), width, tokens, is_token.nonzero().flatten()))
    return batches


def _padded_causal_attention(
    query: Tensor, key: Tensor, value: Tensor, batch: _Batch, scale: float
) -> Tensor:
    def pad(x: Tensor) -> Tensor:
        # Zeros, not neighbours: what is finite here stays finite whatever a neighbour holds.
        padded = x.new_zeros(batch.num_sequences * batch.width, *x.shape[1:])
        padded = padded.index_copy(0, batch.slots, x)
        return padded.unflatten(0, (batch.num_sequences, batch.width)).transpose(1, 2)

    attended = F.scaled_dot_product_attention(
        pad(query), pad(key), pad(value), is_causal=True, enable_gqa=True, scale=scale
    )
    return attended.transpose(1, 2).flatten(2).flatten(0, 1).index_select(0, batch.slots)


def _boundaries(packed: PackedSeqParams, *, num_tokens: int) -> list[int]:
    if packed.qkv_format != "thd" or packed.cu_seqlens_q is None:
        raise ValueError(
            f"packed_seq_params has qkv_format={packed.qkv_format!r} and cu_seqlens_q="
            f"{packed.cu_seqlens_q}; only packed rows are understood. Build it with "
            "qkv_format='thd' and cu_seqlens_q, or pass None for unpacked batches."
        )
    if packed.cu_seqlens_q_padded is not None or packed.cu_seqlens_kv_padded is not None:
        raise ValueError(
            "packed_seq_params has padded boundaries, which belong to context parallelism. Make "
            "padding a sequence of its own at the end of the row."
        )
    boundaries = packed.cu_seqlens_q.tolist()
    if packed.cu_seqlens_kv is None or packed.cu_seqlens_kv.tolist() != boundaries:
        raise ValueError(
            f"queries have the boundaries {boundaries} and keys {packed.cu_seqlens_kv}: in "
            "self-attention they are the same. Pass one tensor as both."
        )
    if boundaries[0] != 0 or boundaries[-1] != num_tokens or boundaries != sorted(boundaries):
        raise ValueError(
            f"the boundaries {boundaries} do not divide a row of {num_tokens} tokens into "
            f"sequences: they must ascend from 0 to {num_tokens}. Count padding as a sequence."
        )
    return boundaries


def _refuse_unsupported(
    config: TransformerConfig, attn_mask_type: AttnMaskType, dropout: float
) -> None:
    unsupported = {
        f"context_parallel_size={config.context_parallel_size}": config.context_parallel_size > 1,
        f"attn_mask_type={attn_mask_type.name}": attn_mask_type is not AttnMaskType.causal,
        f"attention_dropout={dropout}": dropout != 0.0,
        f"window_size={config.window_size}": config.window_size is not None,
        f"softmax_type={config.softmax_type!r}": config.softmax_type != "vanilla",
        "apply_query_key_layer_scaling=True": config.apply_query_key_layer_scaling,
    }
    asked = [name for name, is_asked in unsupported.items() if is_asked]
    if asked:
        raise ValueError(
            f"the attention for hosts without Transformer Engine cannot do {', '.join(asked)}: it "
            "computes plain causal attention over whole sequences on one rank. Change that "
            "setting, or run on GPUs with Transformer Engine."
        )
