"""The tokenizer of a model folder, and the tokens at which a response stops."""

from __future__ import annotations

import json
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dynamo_megatron.data.problems import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")
"""One of them holds the vocabulary; without any, transformers makes up an empty tokenizer."""


def load_tokenizer(path: str | Path) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a Hugging Face model folder, without network and remote code.

    Raises:
        DataError: there is no such folder, or no tokenizer in it that transformers can read.
    """
    # Here because transformers takes seconds to import, and most of this package works without.
    from transformers import AutoTokenizer

    if not Path(path).is_dir():
        raise DataError(
            f"the model folder {path} does not exist (seen from {Path.cwd()}). Download the model "
            "first and give the path of its folder; nothing is fetched on the way."
        )
    if not any((Path(path) / name).is_file() for name in TOKENIZER_FILES):
        raise DataError(
            f"the model folder {path} has no tokenizer: none of {', '.join(TOKENIZER_FILES)} is "
            "there. Copy the tokenizer's files from where the weights came from."
        )
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            str(path), local_files_only=True, trust_remote_code=False
        )
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise DataError(
            f"no tokenizer can be read from {path}: {error}. The folder needs tokenizer.json and "
            "tokenizer_config.json; tokenizers that bring their own Python code are not run."
        ) from error
    _check_fits(tokenizer, Path(path))
    return tokenizer


def _check_fits(tokenizer: PreTrainedTokenizerBase, model_dir: Path) -> None:
    """Refuse a tokenizer that makes tokens which the model does not have.

    Under tensor parallelism the trainer's vocabulary is padded: such a token would be trained
    there without an error, and be unknown to the sampler and the export.
    """
    rows = _read_json(model_dir / "config.json").get("vocab_size")
    token, largest = max(tokenizer.get_vocab().items(), key=itemgetter(1), default=("", -1))
    if isinstance(rows, int) and largest >= rows:
        raise DataError(
            f"the tokenizer of {model_dir} makes token ids up to {largest} ({token!r}), and the "
            f"embedding of the model has {rows} rows (vocab_size of config.json): such tokens "
            "cannot be embedded. Take the tokenizer that belongs to the weights, or resize the "
            "embedding with transformers' resize_token_embeddings first."
        )


def stop_token_ids(tokenizer: PreTrainedTokenizerBase, model_dir: str | Path) -> tuple[int, ...]:
    """The ids that end a response, as the model states them.

    Taken from the first place that names any: ``generation_config.json``, ``config.json``, then
    the tokenizer. Sampler, trainer, evaluation and export all use this one answer: an
    ``<|im_end|>`` model judged by another ``eos`` counts every response as truncated
    (SkyRL#1319).

    Args:
        tokenizer: of the model.
        model_dir: Hugging Face model folder.

    Returns:
        One or more ids, in the order stated.

    Raises:
        DataError: nothing names a stop token, or what is named is no list of token ids.
    """
    stated = [
        (name, _read_json(Path(model_dir) / name).get("eos_token_id"))
        for name in ("generation_config.json", "config.json")
    ]
    stated.append(("the tokenizer", tokenizer.eos_token_id))
    for where, value in stated:
        if value is None or value == []:
            continue
        ids = value if isinstance(value, list) else [value]
        if not all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in ids):
            raise DataError(
                f"eos_token_id in {where} of {model_dir} is {value!r}, expected a token id or a "
                "list of them. Correct it there."
            )
        return tuple(dict.fromkeys(ids))
    raise DataError(
        f"nothing in {model_dir} says at which token a response ends: eos_token_id is missing in "
        "generation_config.json, in config.json and in the tokenizer, so every response would run "
        "to the token limit. Add it to generation_config.json."
    )


def pad_token_id(tokenizer: PreTrainedTokenizerBase, stop_ids: tuple[int, ...]) -> int:
    """The id that fills batches: the tokenizer's own, else the first stop token.

    Padding is always masked by length, never by this id, so that sharing it with a stop token does
    no harm.
    """
    pad = tokenizer.pad_token_id
    return pad if isinstance(pad, int) else stop_ids[0]


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise DataError(f"{path} is not JSON: {error}. Copy the model folder again.") from error
    if not isinstance(content, dict):
        raise DataError(f"{path} does not hold a JSON object. Copy the model folder again.")
    return content
