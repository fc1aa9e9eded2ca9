"""Reads tensors by name from a Hugging Face folder's safetensors files."""

from __future__ import annotations

import json
from pathlib import Path
from types import TracebackType

from safetensors import SafetensorError, safe_open
from torch import Tensor

INDEX_NAME = "model.safetensors.index.json"


class WeightsError(ValueError):
    """Weights that are missing, truncated or of the wrong shape."""


def _open(path: Path):
    return safe_open(str(path), framework="pt", device="cpu")


class SafetensorsReader:
    """Tensors of a model folder, one file or sharded with an index. Pickled weights are refused."""

    def __init__(self, model_dir: Path) -> None:
        """Open every file of the folder.

        Raises:
            WeightsError: no safetensors, a missing shard, or a truncated file.
        """
        self.model_dir = model_dir
        self._files = {}
        self._where: dict[str, str] = {}
        for name in self._file_names():
            path = model_dir / name
            try:
                self._files[name] = _open(path)
            except FileNotFoundError:
                raise WeightsError(
                    f"{model_dir}/{INDEX_NAME} names {name}, which is not there: the download is "
                    "incomplete. Copy the missing shard."
                ) from None
            except (SafetensorError, OSError) as error:
                raise WeightsError(
                    f"{path} cannot be read as safetensors ({error}): the file is truncated or "
                    "damaged. Copy it again."
                ) from None
            for key in self._files[name].keys():  # noqa: SIM118 - safe_open is no mapping
                self._where[key] = name
        self._require_indexed()

    def _require_indexed(self) -> None:
        index = self.model_dir / INDEX_NAME
        if not index.exists():
            return
        listed = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        if listed != self._where:
            names = sorted(
                n for n in listed.keys() | self._where if listed.get(n) != self._where.get(n)
            )
            raise WeightsError(
                f"{index} and the files it lists do not agree on where {', '.join(names[:3])} is: "
                "files of two models are mixed, or a download is incomplete. Copy the folder again."
            )

    def _file_names(self) -> list[str]:
        index = self.model_dir / INDEX_NAME
        if index.exists():
            return sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        names = sorted(path.name for path in self.model_dir.glob("*.safetensors"))
        if not names:
            raise WeightsError(
                f"{self.model_dir} holds no *.safetensors file. Pickled weights (*.bin, *.pt) are "
                "not read: convert them with transformers' save_pretrained first."
            )
        return names

    def names(self) -> set[str]:
        """Names of all tensors."""
        return set(self._where)

    def shape(self, name: str) -> tuple[int, ...]:
        """A tensor's shape, without reading it."""
        return tuple(self._files[self._file_of(name)].get_slice(name).get_shape())

    def dtype(self, name: str) -> str:
        """A tensor's dtype as the format names it (``F32``, ``BF16``), without reading it."""
        return self._files[self._file_of(name)].get_slice(name).get_dtype()

    def tensor(self, name: str) -> Tensor:
        """One tensor on the CPU.

        Raises:
            WeightsError: no file holds it.
        """
        return self._files[self._file_of(name)].get_tensor(name)

    def _file_of(self, name: str) -> str:
        if name not in self._where:
            raise WeightsError(
                f"{self.model_dir} has no tensor {name}: its weights do not belong to its "
                "config.json, or a shard is missing."
            )
        return self._where[name]

    def forget(self) -> None:
        """Unmap what was read, so that it no longer counts as memory of this process."""
        for name in self._files:
            self._files[name] = _open(self.model_dir / name)

    def close(self) -> None:
        """Release the files."""
        self._files = {}

    def __enter__(self) -> SafetensorsReader:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
