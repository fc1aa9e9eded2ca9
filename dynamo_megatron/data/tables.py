"""Parquet files and Hugging Face data sets saved to disk, read batch by batch with pyarrow.

pyarrow alone is enough: a data set that ``datasets.Dataset.save_to_disk`` wrote is a folder of
Arrow streams and a ``state.json`` that lists them. The ``datasets`` package is not needed.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dynamo_megatron.data.problems import DataError

_BATCH_ROWS = 4096
_NEEDED = "needs pyarrow, which is not installed: pip install 'dynamo-megatron[data]'."


def parquet_objects(path: Path) -> Iterator[tuple[str, Any]]:
    """Yield each row's place and value.

    Args:
        path: a parquet file, or a folder whose parquet files are read in the order of their names.

    Raises:
        DataError: pyarrow is missing, a file is damaged, or the folder holds none.
    """
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError as error:
        raise DataError(f"reading {path} {_NEEDED}") from error
    files = sorted(path.glob("*.parquet")) if path.is_dir() else [path]
    if not files:
        raise DataError(f"the folder {path} holds no *.parquet file. Correct the path.")
    for file in files:
        try:
            with pq.ParquetFile(file) as table:
                yield from _rows(file, table.iter_batches(batch_size=_BATCH_ROWS))
        except (pa.ArrowException, OSError) as error:
            raise DataError(
                f"{file} cannot be read as parquet: {error}. Copy it again, or, if it is of "
                "another kind, rename it after that."
            ) from error


def arrow_objects(path: Path) -> Iterator[tuple[str, Any]]:
    """Yield each row's place and value.

    Args:
        path: the folder of one split, as ``Dataset.save_to_disk`` wrote it.

    Raises:
        DataError: pyarrow is missing, or the folder is not one complete split.
    """
    try:
        import pyarrow as pa
    except ImportError as error:
        raise DataError(f"reading {path} {_NEEDED}") from error
    for file in _stream_files(path):
        try:
            with pa.memory_map(str(file)) as source, pa.ipc.open_stream(source) as stream:
                yield from _rows(file, stream)
        except (pa.ArrowException, OSError) as error:
            raise DataError(
                f"{file} cannot be read as an Arrow stream: {error}. Copy the data set again."
            ) from error


def _stream_files(path: Path) -> list[Path]:
    if (path / "dataset_dict.json").is_file():
        splits = ", ".join(sorted(p.parent.name for p in path.glob("*/state.json"))) or "none"
        raise DataError(
            f"{path} holds several splits ({splits}) and a source is one. Add the split's name to "
            "the path."
        )
    try:
        state = json.loads((path / "state.json").read_text(encoding="utf-8"))
        files = [path / Path(entry["filename"]).name for entry in state["_data_files"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"{path} is no data set that save_to_disk wrote: its state.json cannot be used "
            f"({error!r}). Correct the path, or export the data as parquet."
        ) from error
    return files


def _rows(file: Path, batches: Any) -> Iterator[tuple[str, Any]]:
    number = 0
    for batch in batches:
        for row in batch.to_pylist():
            number += 1
            yield f"{file}, row {number}", row
