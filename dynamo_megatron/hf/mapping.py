"""Parameter by parameter: which Hugging Face tensors make a Megatron tensor, and how it is split.

A rule says how Hugging Face tensors are fused into Megatron's (``fuse``/``unfuse``) and how the
fused tensor is cut over tensor-parallel ranks (``shard``/``unshard``). Import, export and the
weights of the rollout engine all go through this table.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

import torch
from torch import Tensor

from dynamo_megatron.hf.architecture import Architecture


class Kind(StrEnum):
    """How a Megatron tensor is fused and split."""

    COPY = "copy"
    """One tensor, the same on every tensor-parallel rank."""
    VOCAB = "vocab"
    """One tensor, padded to the padded vocabulary, cut along rows."""
    INPUT_SPLIT = "input_split"
    """One tensor, cut along columns (row-parallel linear)."""
    QKV = "qkv"
    """Query, key and value, interleaved by query group, cut along rows."""
    GATE_UP = "gate_up"
    """Gate above up; each rank holds its slice of both."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One Megatron parameter of the whole (unsplit) model.

    Attributes:
        megatron: name in the full model, layers numbered globally; the alternatives are what the
            same parameter is called under the local and the Transformer Engine layer spec.
        hf: names of the Hugging Face tensors it is made of, in fusing order.
        kind: how.
        layer: decoder layer, or None outside the decoder stack.
    """

    megatron: tuple[str, ...]
    hf: tuple[str, ...]
    kind: Kind
    layer: int | None


def parameter_table(arch: Architecture) -> Iterator[Entry]:
    """Every parameter of the model in model order; tied models have no output layer of their own.

    Source: Hugging Face ``Qwen3ForCausalLM`` and megatron-core 0.16.1 ``GPTModel`` names.
    """
    yield Entry(
        ("embedding.word_embeddings.weight",), ("model.embed_tokens.weight",), Kind.VOCAB, None
    )
    for layer in range(arch.num_layers):
        yield from _decoder_layer(layer, arch)
    yield Entry(("decoder.final_layernorm.weight",), ("model.norm.weight",), Kind.COPY, None)
    if not arch.tied:
        yield Entry(("output_layer.weight",), ("lm_head.weight",), Kind.VOCAB, None)


def _decoder_layer(layer: int, arch: Architecture) -> Iterator[Entry]:
    attention = "self_attention"
    rows: list[tuple[tuple[str, ...], tuple[str, ...], Kind]] = [
        (
            ("input_layernorm.weight", f"{attention}.linear_qkv.layer_norm_weight"),
            ("input_layernorm.weight",),
            Kind.COPY,
        ),
        (
            (f"{attention}.linear_qkv.weight",),
            tuple(f"self_attn.{x}_proj.weight" for x in "qkv"),
            Kind.QKV,
        ),
        ((f"{attention}.linear_proj.weight",), ("self_attn.o_proj.weight",), Kind.INPUT_SPLIT),
        (
            ("pre_mlp_layernorm.weight", "mlp.linear_fc1.layer_norm_weight"),
            ("post_attention_layernorm.weight",),
            Kind.COPY,
        ),
        (
            ("mlp.linear_fc1.weight",),
            ("mlp.gate_proj.weight", "mlp.up_proj.weight"),
            Kind.GATE_UP,
        ),
        (("mlp.linear_fc2.weight",), ("mlp.down_proj.weight",), Kind.INPUT_SPLIT),
    ]
    if arch.qkv_bias:
        rows.append(
            (
                (f"{attention}.linear_qkv.bias",),
                tuple(f"self_attn.{x}_proj.bias" for x in "qkv"),
                Kind.QKV,
            )
        )
    if arch.qk_norm:
        for x in "qk":
            rows.append(
                (
                    (f"{attention}.{x}_layernorm.weight",),
                    (f"self_attn.{x}_norm.weight",),
                    Kind.COPY,
                )
            )
    for megatron, hf, kind in rows:
        yield Entry(
            tuple(f"decoder.layers.{layer}.{name}" for name in megatron),
            tuple(f"model.layers.{layer}.{name}" for name in hf),
            kind,
            layer,
        )


def checkpoint_key(entry: Entry) -> str:
    """Name in a distributed checkpoint, where a decoder's layers share one, with a leading axis.

    Source: megatron-core 0.16.1 ``TransformerBlock.sharded_state_dict``; the local layer spec's
    norms are stored under their Transformer Engine names.
    """
    name = entry.megatron[-1]
    return name if entry.layer is None else name.replace(f"layers.{entry.layer}.", "layers.", 1)


def megatron_shape(entry: Entry, arch: Architecture, *, padded_vocab: int) -> tuple[int, ...]:
    """Shape of a full Megatron tensor, vocabulary padding included."""
    queries, keys = arch.num_heads * arch.head_dim, arch.num_kv_heads * arch.head_dim
    name = entry.megatron[0]
    match entry.kind:
        case Kind.VOCAB:
            return (padded_vocab, arch.hidden_size)
        case Kind.QKV:
            rows = queries + 2 * keys
            return (rows,) if name.endswith("bias") else (rows, arch.hidden_size)
        case Kind.GATE_UP:
            return (2 * arch.ffn_size, arch.hidden_size)
        case Kind.INPUT_SPLIT:
            return (arch.hidden_size, queries if "self_attention" in name else arch.ffn_size)
        case Kind.COPY:
            per_head = "q_layernorm" in name or "k_layernorm" in name
            return (arch.head_dim if per_head else arch.hidden_size,)


def hf_shapes(arch: Architecture) -> dict[str, tuple[int, ...]]:
    """Shape of every Hugging Face tensor of the model, in model order."""
    queries, keys = arch.num_heads * arch.head_dim, arch.num_kv_heads * arch.head_dim
    shapes: dict[str, tuple[int, ...]] = {}
    for entry in parameter_table(arch):
        full = megatron_shape(entry, arch, padded_vocab=arch.vocab_size)
        rows = (full[0],)
        if entry.kind is Kind.QKV:
            rows = (queries, keys, keys)
        elif entry.kind is Kind.GATE_UP:
            rows = (arch.ffn_size, arch.ffn_size)
        shapes |= {name: (r, *full[1:]) for name, r in zip(entry.hf, rows, strict=True)}
    return shapes


def fuse(kind: Kind, parts: Sequence[Tensor], arch: Architecture) -> Tensor:
    """Full Megatron tensor from its Hugging Face parts."""
    match kind:
        case Kind.QKV:
            # Megatron keeps each query group together: its queries, then its key, then its value.
            grouped = [part.view(arch.num_kv_heads, -1, *part.shape[1:]) for part in parts]
            return torch.cat(grouped, dim=1).flatten(0, 1)
        case Kind.GATE_UP:
            return torch.cat(tuple(parts), dim=0)
        case _:
            (tensor,) = parts
            return tensor


def unfuse(kind: Kind, tensor: Tensor, arch: Architecture) -> list[Tensor]:
    """Hugging Face parts of a full Megatron tensor; the inverse of ``fuse``."""
    match kind:
        case Kind.QKV:
            queries = arch.num_heads // arch.num_kv_heads * arch.head_dim
            grouped = tensor.view(arch.num_kv_heads, -1, *tensor.shape[1:])
            parts = grouped.split([queries, arch.head_dim, arch.head_dim], dim=1)
            return [part.flatten(0, 1).contiguous() for part in parts]
        case Kind.GATE_UP:
            return [part.contiguous() for part in tensor.chunk(2)]
        case Kind.VOCAB:
            return [tensor[: arch.vocab_size].contiguous()]
        case _:
            return [tensor]


def shard(kind: Kind, full: Tensor, *, rank: int, size: int, padded_vocab: int) -> Tensor:
    """Rank ``rank``'s part of a full Megatron tensor, contiguous.

    Rows that pad the vocabulary are zero.
    """
    match kind:
        case Kind.COPY:
            return full.contiguous()
        case Kind.VOCAB:
            padded = full.new_zeros(padded_vocab, *full.shape[1:])
            padded[: full.shape[0]] = full
            return padded.chunk(size)[rank].contiguous()
        case Kind.INPUT_SPLIT:
            return full.chunk(size, dim=1)[rank].contiguous()
        case Kind.QKV:
            return full.chunk(size)[rank].contiguous()
        case Kind.GATE_UP:
            gate, up = full.chunk(2)
            return torch.cat([gate.chunk(size)[rank], up.chunk(size)[rank]])


def unshard(kind: Kind, shards: Sequence[Tensor]) -> Tensor:
    """Full Megatron tensor (vocabulary padding included) from the ranks' parts in order."""
    match kind:
        case Kind.COPY:
            return shards[0]
        case Kind.INPUT_SPLIT:
            return torch.cat(tuple(shards), dim=1)
        case Kind.GATE_UP:
            halves = [part.chunk(2) for part in shards]
            return torch.cat([gate for gate, _ in halves] + [up for _, up in halves])
        case _:
            return torch.cat(tuple(shards))
