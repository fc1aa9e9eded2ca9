"""What a Hugging Face ``config.json`` says, in the terms the trainer needs."""

from __future__ import annotations

import json
from pathlib import Path

from dynamo_megatron.hf.families import FAMILIES
from dynamo_megatron.hf.families.base import Architecture
from dynamo_megatron.hf.families.fields import ArchitectureError

__all__ = ["Architecture", "ArchitectureError", "padded_vocab_size", "read_architecture"]


def read_architecture(model_dir: Path) -> Architecture:
    """Read ``config.json`` of a Hugging Face model folder.

    Raises:
        ArchitectureError: no such file, a family that is not supported, or a feature of the family
            (sliding window, scaled frequencies, another activation) that the trainer would ignore.
    """
    path = model_dir / "config.json"
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ArchitectureError(
            f"{model_dir} has no config.json: it is no Hugging Face model folder (config.json, "
            "*.safetensors, tokenizer files). Choose one that is."
        ) from None
    except (ValueError, RecursionError) as error:  # of JSON, or of UTF-8
        raise ArchitectureError(
            f"{path} is not JSON ({error}): copy the model folder again."
        ) from None
    model_type = raw.get("model_type") if isinstance(raw, dict) else None
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise ArchitectureError(
            f"{path} describes a {model_type!r} model; supported are {', '.join(FAMILIES)}. "
            "Another family needs its own file in dynamo_megatron/hf/families."
        )
    try:
        return FAMILIES[model_type].read(raw, path)
    except KeyError as error:
        raise ArchitectureError(
            f"{path} has no key {error}: it is not a complete {model_type} configuration."
        ) from None


def padded_vocab_size(vocab_size: int, *, multiple: int, tensor_parallel: int) -> int:
    """Vocabulary rows with padding: the next multiple of ``multiple * tensor_parallel``.

    Padding columns have probability zero and gradient zero everywhere.
    """
    unit = multiple * tensor_parallel
    return -(-vocab_size // unit) * unit
