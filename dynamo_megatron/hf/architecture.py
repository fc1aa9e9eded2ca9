"""What a Hugging Face ``config.json`` says, in the terms the trainer needs."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

SUPPORTED_MODEL_TYPES = ("qwen3",)


class ArchitectureError(ValueError):
    """A model folder that cannot be trained."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """A dense decoder's shape.

    Attributes:
        model_type: Hugging Face's name of the family.
        num_layers: decoder layers.
        hidden_size: width of the residual stream.
        ffn_size: width of the gated MLP.
        num_heads: query heads.
        num_kv_heads: key/value heads (query groups).
        head_dim: width of a head; may differ from hidden_size / num_heads.
        vocab_size: true vocabulary, without the padding that tensor parallelism adds.
        max_positions: longest sequence the model was made for.
        rope_theta: base of the rotary frequencies.
        norm_epsilon: of RMSNorm.
        tied: the output layer is the embedding.
        qk_norm: RMSNorm on queries and keys.
        qkv_bias: bias on the query, key and value projections.
    """

    model_type: str
    num_layers: int
    hidden_size: int
    ffn_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_positions: int
    rope_theta: float
    norm_epsilon: float
    tied: bool
    qk_norm: bool
    qkv_bias: bool


def read_architecture(model_dir: Path) -> Architecture:
    """Read ``config.json`` of a Hugging Face model folder.

    Raises:
        ArchitectureError: no such file, a family that is not supported, or a feature of the family
            (sliding window, rope scaling, another activation) that the trainer would ignore.
    """
    path = model_dir / "config.json"
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ArchitectureError(
            f"{model_dir} has no config.json: model.path must be a Hugging Face model folder "
            "(config.json, *.safetensors, tokenizer files), or builtin:tiny."
        ) from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ArchitectureError(
            f"{path} is not JSON ({error}): copy the model folder again."
        ) from None
    model_type = raw.get("model_type")
    if model_type not in SUPPORTED_MODEL_TYPES:
        raise ArchitectureError(
            f"{path} describes a {model_type!r} model; supported are "
            f"{', '.join(SUPPORTED_MODEL_TYPES)}. Another family needs its own rules in "
            "dynamo_megatron/hf."
        )
    try:
        return _architecture(raw, path)
    except KeyError as error:
        raise ArchitectureError(
            f"{path} has no key {error}: it is not a complete {model_type} configuration."
        ) from None


def _architecture(raw: dict, path: Path) -> Architecture:
    rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    for feature, found, wanted in (
        ("rope_type", rope_type, "default"),
        ("use_sliding_window", raw.get("use_sliding_window", False), False),
        ("hidden_act", raw.get("hidden_act", "silu"), "silu"),
        ("attention_bias", raw.get("attention_bias", False), False),
    ):
        if found != wanted:
            raise ArchitectureError(
                f"{path}: {feature}={found!r} is not supported (only {wanted!r}); training would "
                "silently use another model than the file describes."
            )
    heads = raw["num_attention_heads"]
    return Architecture(
        model_type=raw["model_type"],
        num_layers=raw["num_hidden_layers"],
        hidden_size=raw["hidden_size"],
        ffn_size=raw["intermediate_size"],
        num_heads=heads,
        num_kv_heads=raw.get("num_key_value_heads", heads),
        head_dim=raw.get("head_dim") or raw["hidden_size"] // heads,
        vocab_size=raw["vocab_size"],
        max_positions=raw["max_position_embeddings"],
        rope_theta=float(raw["rope_theta"] if "rope_theta" in raw else rope["rope_theta"]),
        norm_epsilon=raw["rms_norm_eps"],
        tied=raw.get("tie_word_embeddings", False),
        qk_norm=True,
        qkv_bias=False,
    )


def padded_vocab_size(vocab_size: int, *, multiple: int, tensor_parallel: int) -> int:
    """Vocabulary rows with padding: the next multiple of ``multiple * tensor_parallel``.

    Padding columns have probability zero and gradient zero everywhere.
    """
    unit = multiple * tensor_parallel
    return -(-vocab_size // unit) * unit
