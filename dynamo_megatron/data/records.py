"""What a record of a problem file says: the problem, its answer, and where they may stand.

Files name their columns in a few ways. Unless a source names them, the problem is looked for under
``problem``, ``question`` and ``prompt``, and the answer under ``answer``, then
``reward_model.ground_truth`` (the schema of DAPO and verl), then after the ``####`` that ends a
``solution`` (GSM8K).
"""

from __future__ import annotations

import math
import re
from decimal import Decimal
from typing import Any, NamedTuple

from dynamo_megatron.data.problems import DataError

PROBLEM_KEYS = ("problem", "question", "prompt")
ANSWER_KEYS = ("answer", "reward_model.ground_truth")
SOLUTION_KEY = "solution"
SOURCE_KEY = "data_source"
LABEL_KEYS = ("extra_info.index", "unique_id")

_MAX_DECIMAL_EXPONENT = 100
_MISSING = object()
_MARKED_ANSWER = re.compile(r"(?:^|\n)####[ \t]*(\S[^\n]*)\s*\Z")


class Record(NamedTuple):
    """What a file says of one problem.

    Attributes:
        problem: the user's message.
        answer: reference answer.
        system: the system message before it, or "".
        source: the ``data_source`` the record names, or "".
        label: the data set's own name for the problem (``extra_info.index``, ``unique_id``), or "".
    """

    problem: str
    answer: str
    system: str = ""
    source: str = ""
    label: str = ""


def read_record(
    item: Any, where: str, *, problem_key: str | None, answer_key: str | None
) -> Record:
    """Read one object of a file.

    Args:
        item: the parsed object.
        where: its place, for errors.
        problem_key: where the problem stands, ``a.b`` for a key within an object; None looks.
        answer_key: the same for the answer.

    Raises:
        DataError: the problem or the answer is missing or cannot be used.
    """
    key = problem_key or _first_present(item, PROBLEM_KEYS)
    system, problem = _conversation(_field(item, key, where, "problem_key"), where, key)
    label = next((v for k in LABEL_KEYS if (v := _lookup(item, k)) not in (None, _MISSING)), "")
    source = _lookup(item, SOURCE_KEY)
    return Record(
        problem=problem,
        answer=_answer(item, where, answer_key),
        system=system,
        source=source if isinstance(source, str) else "",
        label=str(label),
    )


def _first_present(item: Any, keys: tuple[str, ...]) -> str:
    return next((key for key in keys if _lookup(item, key) is not _MISSING), keys[0])


def _lookup(item: Any, key: str) -> Any:
    """The value under a key, or under a path of keys; ``_MISSING`` where there is none."""
    if not isinstance(item, dict):
        return _MISSING
    if key in item:
        return item[key]
    first, dot, rest = key.partition(".")
    return _lookup(item.get(first), rest) if dot else _MISSING


def _field(item: Any, key: str, where: str, option: str) -> Any:
    if not isinstance(item, dict):
        raise DataError(f"{where} is {json_type(item)}, not an object with {key!r}.")
    value = _lookup(item, key)
    if value is _MISSING:
        raise DataError(
            f"{where} has no {key!r}; its keys are {sorted(item)}. Rename the right one in the "
            f"file, or name it in a run's configuration ({option})."
        )
    return value


def _conversation(value: Any, where: str, key: str) -> tuple[str, str]:
    """System and user message; a plain string is the user's."""
    if not (isinstance(value, list) and value and all(isinstance(m, dict) for m in value)):
        return "", _text(value, where, key)
    roles = [message.get("role") for message in value]
    if roles not in (["user"], ["system", "user"]):
        raise DataError(
            f"{where}: {key!r} is a conversation with the roles {roles}; a problem is one user "
            "message, after a system message if need be. Convert the file."
        )
    texts = [_text(m.get("content"), where, f"content of {key}") for m in value]
    return ("", texts[0]) if len(texts) == 1 else (texts[0], texts[1])


def _text(value: Any, where: str, key: str) -> str:
    if not isinstance(value, str):
        raise DataError(
            f"{where}: {key!r} is {json_type(value)}; a problem must be a string. Convert the "
            "file, or name another key in a run's configuration (problem_key)."
        )
    if not value.strip():
        raise DataError(f"{where}: {key!r} is empty. Remove the record or write its problem.")
    return _encodable(value, where, key)


def _answer(item: Any, where: str, key: str | None) -> str:
    if key is not None:
        return _answer_text(_field(item, key, where, "answer_key"), where, key)
    for candidate in ANSWER_KEYS:
        value = _lookup(item, candidate)
        if value is not _MISSING and value is not None:
            return _answer_text(value, where, candidate)
    solution = _lookup(item, SOLUTION_KEY)
    if isinstance(solution, str) and _MARKED_ANSWER.search(solution):
        return _answer_text(solution, where, SOLUTION_KEY)
    return _answer_text(_field(item, ANSWER_KEYS[0], where, "answer_key"), where, ANSWER_KEYS[0])


def _answer_text(value: Any, where: str, key: str) -> str:
    if isinstance(value, str) and value.strip():
        marked = _MARKED_ANSWER.search(value)
        return _encodable((marked[1] if marked else value).strip(), where, key)
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    if isinstance(value, float) and math.isfinite(value):
        value = Decimal(repr(value))
    # The bound keeps a 1e999999999 from being written out.
    if (
        isinstance(value, Decimal)
        and value.is_finite()
        and abs(value.adjusted()) <= _MAX_DECIMAL_EXPONENT
    ):
        return str(int(value)) if value == value.to_integral_value() else format(value, "f")
    problem = "empty" if isinstance(value, str) else json_type(value)
    if isinstance(value, Decimal):
        problem = f"{value}, too far from 1 to be written out"
    if isinstance(value, float):
        problem = f"{value}, which no response can equal"
    raise DataError(
        f"{where}: {key!r} is {problem}; a reference answer must be a string or a number, else no "
        "response could be right. Complete the record, or name another key in a run's "
        "configuration (answer_key)."
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


def json_type(value: Any) -> str:
    """What a parsed value is, in words."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "a boolean"
    names = {str: "a string", list: "a list", dict: "an object", int: "a number"}
    return names.get(type(value), "a number")
