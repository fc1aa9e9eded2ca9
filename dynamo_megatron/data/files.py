"""Problem files: JSON lines, or one JSON list. Every fault is an error that says where."""

from __future__ import annotations

import json
from collections.abc import Iterator
from decimal import Decimal
from itertools import islice
from pathlib import Path
from typing import Any, Literal, NamedTuple, NoReturn

from dynamo_megatron.data.problems import DataError

_MAX_DECIMAL_EXPONENT = 100
_SHOWN = 80


class Record(NamedTuple):
    """What a file says of one problem."""

    problem: str
    answer: str


def read_problem_file(
    path: Path,
    *,
    kind: Literal["jsonl", "json"],
    problem_key: str = "problem",
    answer_key: str = "answer",
    limit: int | None = None,
) -> list[Record]:
    """Read the problems of one file, in its order.

    An answer may be a string (outer white space is dropped) or a number. A number becomes its plain
    decimal text; one without a fractional part becomes an integer, since data sets write 142.0
    where 142 is meant. Floats are read as decimals: no digit is lost. Blank lines are skipped.

    Args:
        path: the file, UTF-8.
        kind: ``jsonl``, one object a line, or ``json``, one list of objects.
        problem_key: where an object holds the problem text.
        answer_key: where it holds the reference answer.
        limit: read only the first so many problems; what follows is not looked at (``jsonl``).

    Raises:
        DataError: the file is missing, empty, not UTF-8 or not of this kind, or a record lacks a
            usable problem or answer. The message names the file and the line (or item, from 1).
    """
    if not path.is_file():
        raise DataError(
            f"the data file {path} does not exist (seen from {Path.cwd()}). Correct the path of "
            "the source under data.train or data.heldout."
        )
    objects = _jsonl_objects(path) if kind == "jsonl" else _json_objects(path)
    records = [
        Record(
            _problem_text(_field(item, problem_key, where, "problem_key"), where, problem_key),
            _answer_text(_field(item, answer_key, where, "answer_key"), where, answer_key),
        )
        for where, item in islice(objects, limit)
    ]
    if not records:
        raise DataError(
            f"{path} holds no problem: the file is empty. Remove the source or fill it."
        )
    return records


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
                    f"{where} is a list, not an object. If the file is one JSON list, set "
                    "kind: json for this source."
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
            f"{path} is not one JSON value: {error}. If each line is an object of its own, set "
            "kind: jsonl for this source; if the end is missing, copy the file again."
        ) from error
    if not isinstance(values, list):
        raise DataError(
            f"{path} holds {_json_type(values)}, not a list of problems. If each line is an "
            "object of its own, set kind: jsonl for this source."
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


def _field(item: Any, key: str, where: str, option: str) -> Any:
    if not isinstance(item, dict):
        raise DataError(f"{where} is {_json_type(item)}, not an object with {key!r}.")
    if key not in item:
        raise DataError(
            f"{where} has no {key!r}; its keys are {sorted(item)}. Name the right one with "
            f"{option} of this source."
        )
    return item[key]


def _problem_text(value: Any, where: str, key: str) -> str:
    if not isinstance(value, str):
        raise DataError(
            f"{where}: {key!r} is {_json_type(value)}; a problem must be a string. Convert the "
            "file, or name another key with problem_key of this source."
        )
    if not value.strip():
        raise DataError(f"{where}: {key!r} is empty. Remove the record or write its problem.")
    return _encodable(value, where, key)


def _answer_text(value: Any, where: str, key: str) -> str:
    if isinstance(value, str) and value.strip():
        return _encodable(value.strip(), where, key)
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    # The bound keeps a 1e999999999 from being written out.
    if isinstance(value, Decimal) and abs(value.adjusted()) <= _MAX_DECIMAL_EXPONENT:
        return str(int(value)) if value == value.to_integral_value() else format(value, "f")
    problem = "empty" if isinstance(value, str) else _json_type(value)
    if isinstance(value, Decimal):
        problem = f"{value}, too far from 1 to be written out"
    raise DataError(
        f"{where}: {key!r} is {problem}; a reference answer must be a string or a number, else no "
        "response could be right. Complete the record, or name another key with answer_key of this "
        "source."
    )


def _encodable(text: str, where: str, key: str) -> str:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise DataError(
            f"{where}: {key!r} holds half a surrogate pair ({text[error.start]!r} at character "
            f"{error.start}), which no tokenizer takes. The text was cut or escaped wrongly."
        ) from error
    return text


def _json_type(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "a boolean"
    names = {str: "a string", list: "a list", dict: "an object", int: "a number"}
    return names.get(type(value), "a number")
