"""Reads tensors by name from a Hugging Face folder's safetensors files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

from safetensors import SafetensorError, safe_open
from torch import Tensor

SINGLE_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"
_ADAPTER = "adapter_config.json"


class WeightsError(ValueError):
    """Weights that are missing, truncated or of the wrong shape."""


def _open(path: Path):
    return safe_open(str(path), framework="pt", device="cpu")


class SafetensorsReader:
    """Tensors of a model folder: those that transformers loads from it.

    They are in ``model.safetensors``, or in the files of an index. A folder with both is refused:
    transformers and inference engines take different ones. So is one with an adapter. Other files
    are not read, nor are pickled weights.
    """

    def __init__(self, model_dir: Path) -> None:
        """Open every file of the model.

        Raises:
            WeightsError: no weights or two sets of them, a broken index, a missing shard, a
                truncated file, or a tensor that is in two files.
        """
        self.model_dir = model_dir
        self._files = {}
        self._where: dict[str, str] = {}
        listed = _weight_map(model_dir)
        names = [SINGLE_NAME] if listed is None else sorted(set(listed.values()))
        for name in names:
            self._open_file(name)
        if listed is not None:
            self._require_indexed(listed)

    def _open_file(self, name: str) -> None:
        path = self.model_dir / name
        try:
            self._files[name] = _open(path)
        except FileNotFoundError:
            raise WeightsError(
                f"{self.model_dir}/{INDEX_NAME} names {name}, which is not there: the download is "
                "incomplete. Copy the missing shard."
            ) from None
        except (SafetensorError, OSError) as error:
            raise WeightsError(
                f"{path} cannot be read as safetensors ({error}): the file is truncated or "
                "damaged. Copy it again."
            ) from None
        for key in self._files[name].keys():  # noqa: SIM118 - safe_open is no mapping
            if key in self._where:
                raise WeightsError(
                    f"{key} is in both {self._where[key]} and {name} of {self.model_dir}: which of "
                    "the two is loaded depends on the program. Files of two models are mixed; copy "
                    "the folder again."
                )
            self._where[key] = name

    def _require_indexed(self, listed: Mapping[str, str]) -> None:
        if listed != self._where:
            names = sorted(
                n for n in listed.keys() | self._where if listed.get(n) != self._where.get(n)
            )
            raise WeightsError(
                f"{self.model_dir / INDEX_NAME} and the files it lists do not agree on where "
                f"{', '.join(names[:3])} is: files of two models are mixed, or a download is "
                "incomplete. Copy the folder again."
            )

    def surplus_files(self) -> list[str]:
        """Names of ``*.safetensors`` in the folder that are not read.

        vLLM loads every file of a folder without an index.
        """
        found = {path.name for path in self.model_dir.glob("*.safetensors")}
        return sorted(found - self._files.keys())

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


def _weight_map(model_dir: Path) -> dict[str, str] | None:
    """File of each tensor, or None where there is one file."""
    if (model_dir / _ADAPTER).is_file():
        raise WeightsError(
            f"{model_dir} holds an adapter ({_ADAPTER}), which transformers adds to the weights "
            "where peft is installed and which is not read here. Merge it with peft's "
            "merge_and_unload and save the result, or delete the adapter's files."
        )
    single, index = model_dir / SINGLE_NAME, model_dir / INDEX_NAME
    if single.is_file() and index.is_file():
        raise WeightsError(
            f"{model_dir} holds weights twice: {SINGLE_NAME}, which transformers loads, and the "
            f"files of {INDEX_NAME}, which other programs load. Delete {INDEX_NAME} and its files "
            f"if {SINGLE_NAME} is the model, or else {SINGLE_NAME}."
        )
    if single.is_file():
        return None
    if not index.is_file():
        others = sorted(path.name for path in model_dir.glob("*.safetensors"))
        raise WeightsError(
            f"{model_dir} has neither {SINGLE_NAME} nor {INDEX_NAME}, so transformers would load "
            f"no safetensors from it (others there: {', '.join(others[:3]) or 'none'}). Pickled "
            "weights (*.bin, *.pt) are not read: convert them with transformers' save_pretrained "
            "first; of an incomplete download, copy the missing files."
        )
    return _read_index(index)


def _read_index(path: Path) -> dict[str, str]:
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:  # of JSON, or of UTF-8
        raise WeightsError(f"{path} is not JSON ({error}): copy it again.") from None
    listed = raw.get("weight_map") if isinstance(raw, dict) else None
    if not isinstance(listed, dict) or not listed:
        raise WeightsError(
            f"{path} has no weight_map that names the file of each tensor: it is no index of "
            "safetensors. Copy it again."
        )
    for tensor, file in listed.items():
        if not isinstance(file, str) or file in ("", ".", "..") or "/" in file or "\\" in file:
            raise WeightsError(
                f"{path} puts {tensor} into {file!r}, which is not the name of a file in the "
                "folder: no other place is read. Put the files beside the index."
            )
    return listed
