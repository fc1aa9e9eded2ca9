"""Which dtype the weights of a folder have, and which they are written in."""

from __future__ import annotations

import torch

from dynamo_megatron.convert.errors import ConversionError
from dynamo_megatron.hf.reader import SafetensorsReader

_WRITTEN = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
# Numbers that can be rounded. Others, such as float8 and integers, mean something with a scale.
_READ = {"F64", *_WRITTEN}


def dtype_to_write(reader: SafetensorsReader, asked: torch.dtype | None) -> torch.dtype:
    """What is written of a folder's weights: what was asked for, or their own dtype.

    Raises:
        ConversionError: they are quantized, or nothing was asked for and they do not have one
            dtype that is written.
    """
    found = _dtypes(reader)
    if others := sorted(set(found) - _READ):
        raise ConversionError(
            f"{reader.model_dir} has weights of the dtype {', '.join(others)}: they are quantized "
            "or no weights, and what they stand for is not in them. Take the model in bfloat16 or "
            "float32."
        )
    if asked is not None:
        return asked
    if len(found) > 1:
        raise ConversionError(
            f"{reader.model_dir} has weights of the dtypes {', '.join(found)}; a checkpoint has "
            "one, and conversion is exact only where it is the same. Choose one: --dtype bfloat16."
        )
    if found[0] not in _WRITTEN:
        raise ConversionError(
            f"{reader.model_dir} has weights of the dtype {found[0]}, and a checkpoint's are "
            "float32, bfloat16 or float16: choose one, such as --dtype float32."
        )
    return _WRITTEN[found[0]]


def written_dtype(reader: SafetensorsReader) -> torch.dtype:
    """The dtype of a folder that a conversion wrote.

    Raises:
        ConversionError: no conversion writes this.
    """
    found = _dtypes(reader)
    if len(found) != 1 or found[0] not in _WRITTEN:
        raise ConversionError(
            f"{reader.model_dir} has weights of the dtypes {', '.join(found)}; a conversion writes "
            "all in one, of float32, bfloat16 and float16."
        )
    return _WRITTEN[found[0]]


def name_of(dtype: torch.dtype) -> str:
    """As config.json and the command line write it."""
    return str(dtype).removeprefix("torch.")


def _dtypes(reader: SafetensorsReader) -> list[str]:
    return sorted({reader.dtype(name) for name in reader.names()})
