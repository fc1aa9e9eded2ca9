"""What decides an evaluation's samples beside its options: weights, text files, the verifier.

A fingerprint depends on content alone, so an identical copy of a folder is the same model, wherever
it lies and whenever it was made.
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Iterator, Sequence
from fnmatch import fnmatch
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import BinaryIO

BLOCKS, BLOCK_BYTES = 256, 64 << 10
"""Blocks read of a file of weights, evenly spaced, and their size."""

TEXT_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab*",
    "merges*",
    "chat_template*",
    "*.model",
    "*.tiktoken",
    "*.jinja",
    "additional_chat_templates/*",
)
"""What transformers reads of a model folder beside the weights."""

_MAX_HEADER_BYTES = 100 << 20  # safetensors reads no longer one
_DIGITS = 16


def weights_fingerprint(model_dir: Path) -> str:
    """Tells the weights of two model folders apart, without reading gigabytes.

    Of each ``*.safetensors`` file the name, the size, the header (names, types and shapes of the
    tensors) and evenly spaced blocks enter; a file of up to 16 MiB is read whole. A training step
    changes values all over a file. What is missed is a change that lies between two blocks, such
    as one edited row: to evaluate that, choose another ``--out``.
    """
    hashed = hashlib.sha256()
    for path in sorted(model_dir.glob("*.safetensors")):
        size = path.stat().st_size
        hashed.update(f"{path.name}\0{size}\0".encode())
        with path.open("rb") as file:
            for block in _blocks(file, size):
                hashed.update(block)
    return hashed.hexdigest()[:_DIGITS]


def _blocks(file: BinaryIO, size: int) -> Iterator[bytes]:
    if size <= BLOCKS * BLOCK_BYTES:
        yield file.read()
        return
    header = 8 + int.from_bytes(file.read(8), "little")
    file.seek(0)
    yield file.read(min(header, _MAX_HEADER_BYTES))
    for number in range(BLOCKS):
        # The first block is the file's first, the last its last.
        file.seek((size - BLOCK_BYTES) * number // (BLOCKS - 1))
        yield file.read(BLOCK_BYTES)


def text_fingerprint(model_dir: Path) -> str:
    """Tells the tokenizers, chat templates and configurations of two model folders apart."""
    hashed = hashlib.sha256()
    names = [p.relative_to(model_dir).as_posix() for p in _files(model_dir)]
    for name in sorted(names):
        content = (model_dir / name).read_bytes()
        hashed.update(f"{name}\0{len(content)}\0".encode() + content)
    return hashed.hexdigest()[:_DIGITS]


def _files(model_dir: Path) -> Iterator[Path]:
    for path in (*model_dir.glob("*"), *model_dir.glob("additional_chat_templates/*")):
        name = path.relative_to(model_dir).as_posix()
        if path.is_file() and any(fnmatch(name, pattern) for pattern in TEXT_FILES):
            yield path


def verifier_fingerprint(verifier: str) -> str | None:
    """Tells two states of a user's verifier apart, by the source file of its module.

    The module is found as a worker finds it and not imported: what its import does is not for this
    process. Modules that it imports are not looked at.

    Args:
        verifier: a built-in verifier's name or ``module:function``.

    Returns:
        None of a built-in one, or where there is no such file; the worker says why it is missing.
    """
    module, colon, _ = verifier.partition(":")
    if not colon:
        return None
    spec = _find(module)
    if spec is None or spec.origin is None or not Path(spec.origin).is_file():
        return None
    return hashlib.sha256(Path(spec.origin).read_bytes()).hexdigest()[:_DIGITS]


def _find(module: str) -> ModuleSpec | None:
    """The module, without its import or (unlike ``importlib.util.find_spec``) its packages'."""
    spec: ModuleSpec | None = None
    path: Sequence[str] | None = None
    parts = module.split(".")
    for count in range(1, len(parts) + 1):
        name = ".".join(parts[:count])
        found = (finder.find_spec(name, path) for finder in sys.meta_path)
        spec = next((one for one in found if one is not None), None)
        if spec is None and count == 1:
            # Last on a worker's path.
            spec = PathFinder.find_spec(name, [os.getcwd()])
        if spec is None:
            return None
        path = spec.submodule_search_locations
        if path is None and count < len(parts):
            return None
    return spec
