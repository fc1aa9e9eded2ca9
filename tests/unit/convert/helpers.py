"""What lies in a folder, for comparing two."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for path in folder.glob("*.safetensors"):
        tensors = load_file(path)
        assert not tensors.keys() & found.keys(), "a tensor is in two files"
        found |= tensors
    return found


def assert_same_tensors(folder: Path, source: Path) -> None:
    got, want = tensors_of(folder), tensors_of(source)
    assert got.keys() == want.keys()
    for name in want:
        assert got[name].dtype == want[name].dtype
        assert torch.equal(got[name], want[name]), name


def snapshot(folder: Path) -> dict[str, bytes]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}
