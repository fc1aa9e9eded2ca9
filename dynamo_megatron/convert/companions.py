"""Is what stands beside the weights what the conversion writes there?"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from dynamo_megatron.checkpoint.megatron import HF_FOLDER
from dynamo_megatron.convert.dtypes import name_of, written_dtype
from dynamo_megatron.convert.errors import ConversionError
from dynamo_megatron.convert.reading import CheckpointWeights
from dynamo_megatron.hf.files import CONFIG, companion_files, config_with_dtype, read_object
from dynamo_megatron.hf.reader import SafetensorsReader


def check_written_hf(model_dir: Path, source: Path, dtype: torch.dtype | None) -> None:
    """Check a written Hugging Face folder, but for its tensors.

    Args:
        model_dir: the folder.
        source: where its configuration and tokenizer came from.
        dtype: what the weights must have; anything that is one where it is None.

    Raises:
        ConversionError: names the file, and the key of config.json.
    """
    with SafetensorsReader(model_dir) as reader:
        if surplus := reader.surplus_files():
            raise ConversionError(
                f"{model_dir} holds {', '.join(surplus)} beside the model: engines that load every "
                "*.safetensors of a folder would load other weights. Delete what is not the model."
            )
        found = written_dtype(reader)
    _require_dtype(model_dir, found, dtype)
    _require_same(source, model_dir, json.loads(config_with_dtype(source, name_of(found))))


def check_written_megatron(
    weights: CheckpointWeights, source: Path, dtype: torch.dtype | None
) -> None:
    """Check a written checkpoint, but for its tensors; see ``check_written_hf``."""
    _require_dtype(weights.folder, weights.dtype, dtype)
    _require_same(source, weights.folder / HF_FOLDER, read_object(source / CONFIG))


def _require_dtype(folder: Path, found: torch.dtype, wanted: torch.dtype | None) -> None:
    if wanted is not None and wanted != found:
        raise ConversionError(
            f"{folder} has weights in {name_of(found)}, and --dtype asks for {name_of(wanted)}."
        )


def _require_same(source: Path, written: Path, config: dict[str, Any]) -> None:
    wanted, found = set(companion_files(source)), set(companion_files(written))
    wrong = [f"{name} is missing" for name in sorted(wanted - found)]
    wrong += [f"{name} is not in the source" for name in sorted(found - wanted)]
    wrong += [
        f"{name} has other contents"
        for name in sorted(wanted & found)
        if (source / name).read_bytes() != (written / name).read_bytes()
    ]
    wrong += [f"{CONFIG} has {line}" for line in _different(config, written / CONFIG)]
    if wrong:
        raise ConversionError(
            f"{written} is not what a conversion with the files of {source} writes: "
            f"{'; '.join(wrong)}. Convert again, or name the folder that was used: --source DIR "
            "(to-hf)."
        )


def _different(wanted: dict[str, Any], path: Path) -> list[str]:
    found = read_object(path)
    return [
        f"{key}={_shown(found, key)} for {_shown(wanted, key)}"
        for key in sorted(wanted.keys() | found.keys())
        if _shown(wanted, key) != _shown(found, key)
    ]


def _shown(config: dict[str, Any], key: str) -> str:
    # As text, so that true is not 1.
    return json.dumps(config[key], sort_keys=True) if key in config else "nothing"
