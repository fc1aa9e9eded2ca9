"""What a family of models is to the trainer, and the shape of one of its models."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dynamo_megatron.hf.families.fields import ArchitectureError, Fields

# Hugging Face's default when config.json names no base.
_DEFAULT_THETA = 10_000.0

# megatron-core 0.16.1's RotaryEmbedding has these numbers of Llama 3.1 to 3.3 built in; only the
# factor is an argument.
_LLAMA3_ROPE = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


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
        rope_factor: Llama 3's scaling of the rotary frequencies; None for unscaled ones.
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
    rope_factor: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """What the models of a family have in common, and what of its options is not trained.

    Attributes:
        model_type: the ``model_type`` of config.json.
        causal_lm: Hugging Face's class; heads of other kinds (reward models) are refused.
        qk_norm: RMSNorm on queries and keys.
        qkv_bias: bias on the query, key and value projections, and on no other.
        only: options of config.json with the only value that is trained, which is also the value
            that Hugging Face takes when the option is absent.
        rope_types: kinds of rotary frequencies.
    """

    model_type: str
    causal_lm: str
    qk_norm: bool
    qkv_bias: bool
    only: Mapping[str, Any] = field(default_factory=dict)
    rope_types: tuple[str, ...] = ("default",)

    def read(self, raw: Mapping[str, Any], path: Path) -> Architecture:
        """The shape that a parsed ``config.json`` describes; ``path`` is for messages.

        Raises:
            ArchitectureError: the file asks for something that training would ignore.
            KeyError: a number is missing.
        """
        fields = Fields(raw, path)
        rope = fields.mapping("rope_parameters") or fields.mapping("rope_scaling")
        self._refuse_features(fields, raw, rope, path)
        heads, hidden = fields.count("num_attention_heads"), fields.count("hidden_size")
        kv_heads = fields.optional_count("num_key_value_heads") or heads
        head_dim = fields.optional_count("head_dim") or hidden // heads
        if heads % kv_heads or head_dim < 1 or head_dim % 2:
            raise ArchitectureError(
                f"{path}: {heads} query heads (num_attention_heads) of width {head_dim} cannot "
                f"share {kv_heads} keys and values (num_key_value_heads): the heads must be a "
                "multiple of them, and the width even, for the rotary frequencies."
            )
        theta = {"rope_theta": raw.get("rope_theta", _DEFAULT_THETA), **rope}
        return Architecture(
            model_type=self.model_type,
            num_layers=fields.count("num_hidden_layers"),
            hidden_size=hidden,
            ffn_size=fields.count("intermediate_size"),
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            vocab_size=fields.count("vocab_size"),
            max_positions=fields.count("max_position_embeddings"),
            rope_theta=Fields(theta, path).positive("rope_theta"),
            norm_epsilon=fields.positive("rms_norm_eps"),
            tied=fields.flag("tie_word_embeddings"),
            qk_norm=self.qk_norm,
            qkv_bias=self.qkv_bias,
            rope_factor=self._rope_factor(rope, path),
        )

    def _refuse_features(
        self, fields: Fields, raw: Mapping[str, Any], rope: Mapping[str, Any], path: Path
    ) -> None:
        classes = fields.words("architectures") or [self.causal_lm]
        if self.causal_lm not in classes:
            raise _unsupported(path, "architectures", classes, [self.causal_lm])
        others = sorted(set(fields.words("layer_types")) - {"full_attention"})
        if others:
            raise _unsupported(path, "layer_types", others, "full_attention")
        fixed = {
            "hidden_act": "silu",
            "partial_rotary_factor": 1.0,
            "quantization_config": None,
            # Names another file of weights than the usual one.
            "transformers_weights": None,
            **self.only,
        }
        for option, wanted in fixed.items():
            found = raw.get(option, rope.get(option, wanted))
            if found != wanted:
                raise _unsupported(path, option, found, wanted)

    def _rope_factor(self, rope: Mapping[str, Any], path: Path) -> float | None:
        kind = rope.get("rope_type", rope.get("type", "default"))
        if kind not in self.rope_types:
            raise _unsupported(path, "rope_type", kind, " or ".join(self.rope_types))
        if kind == "default":
            return None
        for option, wanted in _LLAMA3_ROPE.items():
            if rope.get(option) != wanted:
                raise _unsupported(path, f"rope scaling's {option}", rope.get(option), wanted)
        return Fields(rope, path).positive("factor")


def _unsupported(path: Path, option: str, found: object, wanted: object) -> ArchitectureError:
    return ArchitectureError(
        f"{path}: {option}={found!r} is not supported (only {wanted!r}); training would silently "
        "use another model than the file describes."
    )
