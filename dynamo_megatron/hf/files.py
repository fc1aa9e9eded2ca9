"""The small files of a Hugging Face model folder, which go along with the weights as they are."""

from __future__ import annotations

import json
import operator
from pathlib import Path
from typing import Any

from dynamo_megatron.hf.architecture import Architecture, ArchitectureError

CONFIG = "config.json"
COPIED_FILES = (
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "tokenizer.model",
    "spiece.model",
)
"""Files that are copied; ``additional_chat_templates/*.jinja`` too."""

_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "spiece.model", "vocab.json", "vocab.txt")


def companion_files(model_dir: Path) -> list[Path]:
    """The copied files that are there, relative to the folder; ``config.json`` is not one."""
    templates = sorted(model_dir.glob("additional_chat_templates/*.jinja"))
    candidates = [*(model_dir / name for name in COPIED_FILES), *templates]
    return [path.relative_to(model_dir) for path in candidates if path.is_file()]


def config_with_dtype(model_dir: Path, dtype: str) -> bytes:
    """The folder's ``config.json`` with another dtype.

    Args:
        model_dir: the source.
        dtype: of the weights as they are written, such as ``bfloat16``.
    """
    config = json.loads((model_dir / CONFIG).read_text(encoding="utf-8"))
    # transformers 5 writes "dtype", 4 wrote "torch_dtype"; whichever is there is kept.
    keys = [key for key in ("dtype", "torch_dtype") if key in config] or ["dtype"]
    config.update(dict.fromkeys(keys, dtype))
    return (json.dumps(config, indent=2, ensure_ascii=False) + "\n").encode()


def has_tokenizer(model_dir: Path) -> bool:
    """Is there a file of which a tokenizer can be made?"""
    return any((model_dir / name).is_file() for name in _TOKENIZERS)


def read_object(path: Path) -> dict[str, Any]:
    """A file with one JSON object.

    Raises:
        ArchitectureError: it holds something else.
    """
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ArchitectureError(f"{path} is not JSON ({error}): copy it again.") from None
    if not isinstance(raw, dict):
        raise ArchitectureError(
            f"{path} holds a JSON {type(raw).__name__} where an object belongs: it cannot be used. "
            "Copy it again."
        )
    return raw


def check_companions(model_dir: Path, arch: Architecture) -> None:
    """Refuse small files that are broken, and a tokenizer that is not the model's.

    Raises:
        ArchitectureError: a ``*.json`` is no JSON object, or see ``check_tokenizer``.
    """
    for name in companion_files(model_dir):
        if name.suffix == ".json":
            read_object(model_dir / name)
    check_tokenizer(model_dir, arch)


def check_tokenizer(model_dir: Path, arch: Architecture) -> None:
    """Refuse a tokenizer that makes tokens which the embedding does not have.

    Only ``tokenizer.json`` is looked at. A vocabulary that is larger than the tokenizer is usual.

    Raises:
        ArchitectureError: the tokenizer's largest id is beyond the vocabulary.
    """
    path = model_dir / "tokenizer.json"
    if not path.is_file():
        return
    try:
        raw = read_object(path)
        vocab = raw["model"].get("vocab", {})
        ids = list(vocab.values()) if isinstance(vocab, dict) else list(range(len(vocab)))
        ids += [token["id"] for token in raw.get("added_tokens", ())]
        largest = max((operator.index(number) for number in ids), default=-1)
    except (KeyError, TypeError, AttributeError) as error:
        raise ArchitectureError(
            f"{path} is not a tokenizer ({type(error).__name__}: {error}): copy it again."
        ) from None
    if largest >= arch.vocab_size:
        raise ArchitectureError(
            f"{path} makes token ids up to {largest}, and the embedding of the model has "
            f"{arch.vocab_size} rows (vocab_size of config.json): such tokens cannot be embedded. "
            "Take the tokenizer that belongs to the weights, or resize the embedding with "
            "transformers' resize_token_embeddings first."
        )
