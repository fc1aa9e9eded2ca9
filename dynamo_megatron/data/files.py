"""Problem files of every kind. Every fault is an error that says where."""

from __future__ import annotations

import json
from collections.abc import Iterator
from decimal import Decimal
from itertools import islice
from pathlib import Path
from typing import Any, Literal, NoReturn

from dynamo_megatron.data.problems import DataError
from dynamo_megatron.data.records import Record, json_type, read_record
from dynamo_megatron.data.tables import arrow_objects, parquet_objects

FileKind = Literal["jsonl", "json", "parquet", "arrow"]

_SHOWN = 80
_KIND = "The kind is what the file's name ends in, unless a run's configuration says it (kind)."


def read_problem_file(
    path: Path,
    *,
    kind: FileKind,
    problem_key: str | None = None,
    answer_key: str | None = None,
    limit: int | None = None,
) -> Iterator[Record]:
    """Read the problems of one file, in its order, without holding all of them.

    An answer may be a string (outer white space is dropped, and of a worked solution that ends in
    ``#### 18`` the 18 is taken) or a number. A number becomes its plain decimal text; one without
    a fractional part becomes an integer, since data sets write 142.0 where 142 is meant. Floats are
    read as decimals: no digit is lost. Blank lines are skipped.

    Args:
        path: the file, UTF-8 where it is text; a folder for ``arrow``, and if need be ``parquet``.
        kind: ``jsonl``, one object a line; ``json``, one list of objects; ``parquet``; ``arrow``, a
            Hugging Face data set on disk.
        problem_key: where an object holds the problem, ``a.b`` for nested keys; None looks in the
            usual places (see ``records``). It may be a list of chat messages.
        answer_key: the same for the reference answer.
        limit: read only the first so many problems; what follows is not looked at (``json`` is
            parsed whole).

    Raises:
        DataError: the file is missing, empty, damaged or not of this kind, or a record lacks a
            usable problem or answer. The message names the file and the line (or item, from 1).
    """
    if not (path.is_file() or (kind in ("parquet", "arrow") and path.is_dir())):
        raise DataError(
            f"the data {'folder' if kind == 'arrow' else 'file'} {path} does not exist (seen from "
            f"{Path.cwd()}). Correct the path."
        )
    readers = {
        "jsonl": _jsonl_objects,
        "json": _json_objects,
        "parquet": parquet_objects,
        "arrow": arrow_objects,
    }
    count = 0
    for where, item in islice(readers[kind](path), limit):
        count += 1
        yield read_record(item, where, problem_key=problem_key, answer_key=answer_key)
    if not count:
        raise DataError(
            f"{path} holds no problem: the file is empty. Remove the source or fill it."
        )


def kind_of(path: Path) -> FileKind:
    """Tell the kind of a file or folder by its name and content.

    Raises:
        DataError: it is none of the kinds.
    """
    if path.is_dir():
        return "parquet" if any(path.glob("*.parquet")) else "arrow"
    kinds: dict[str, FileKind] = {".jsonl": "jsonl", ".json": "json", ".parquet": "parquet"}
    if path.suffix not in kinds:
        raise DataError(
            f"{path}: problems are read from .jsonl, .json and .parquet files, and from folders "
            "that save_to_disk wrote. Rename the file after its kind, or convert it."
        )
    return kinds[path.suffix]


def _jsonl_objects(path: Path) -> Iterator[tuple[str, Any]]:
    """Yield each line's place and value."""
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            where = f"{path}, line {number}"
            text = _decode(line, where, first=number == 1)
            if not text.strip():
                continue
            try:
                value = _parse(text)
            except ValueError as error:
                cut = (
                    ""
                    if line.endswith(b"\n")
                    else (" The line has no end: the file looks truncated; copy it again.")
                )
                raise DataError(
                    f"{where} is not JSON: {error}. It begins with {text[:_SHOWN]!r}.{cut}"
                ) from error
            if isinstance(value, list):
                raise DataError(
                    f"{where} is a list, not an object. If the file is one JSON list, it is of "
                    f"kind json. {_KIND}"
                )
            yield where, value


def _json_objects(path: Path) -> Iterator[tuple[str, Any]]:
    """Yield each list item's place and value."""
    text = _decode(path.read_bytes(), str(path), first=True)
    if not text.strip():
        return
    try:
        values = _parse(text)
    except ValueError as error:
        raise DataError(
            f"{path} is not one JSON value: {error}. If the end is missing, copy the file again; "
            f"if each line is an object of its own, it is of kind jsonl. {_KIND}"
        ) from error
    if not isinstance(values, list):
        raise DataError(
            f"{path} holds {json_type(values)}, not a list of problems. If each line is an "
            f"object of its own, it is of kind jsonl. {_KIND}"
        )
    for number, value in enumerate(values, start=1):
        yield f"{path}, item {number}", value


def _decode(data: bytes, where: str, *, first: bool) -> str:
    try:
        # Some editors put a byte order mark at the start of a file.
        return data.decode("utf-8-sig" if first else "utf-8")
    except UnicodeDecodeError as error:
        raise DataError(
            f"{where} is not UTF-8: byte {error.start} is 0x{data[error.start]:02x} "
            f"({error.reason}). Convert the file to UTF-8, or copy it again if it is truncated."
        ) from error


def _parse(text: str) -> Any:
    try:
        return json.loads(text, parse_float=Decimal, parse_constant=_refuse_constant)
    except RecursionError as error:
        raise ValueError("its brackets are nested too deeply") from error


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")
