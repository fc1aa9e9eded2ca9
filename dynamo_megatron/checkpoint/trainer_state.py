"""The trainer's own state as JSON that comes back exactly."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any


def encode_state(state: Mapping[str, Any]) -> bytes:
    """JSON of the trainer's state; floats keep every bit.

    Raises:
        ValueError: a key is not text or a value not of JSON, and would come back as another.
    """
    _require_json(state, "state")
    return json.dumps(state).encode()


def _require_json(value: Any, where: str) -> None:
    if isinstance(value, dict):
        for key, inner in value.items():
            if not isinstance(key, str):
                raise ValueError(
                    f"{where} has the key {key!r} ({type(key).__name__}); JSON has text keys only "
                    "and would return it as another. Store pairs in a list instead."
                )
            _require_json(inner, f"{where}.{key}")
    elif isinstance(value, list | tuple):
        for index, inner in enumerate(value):
            _require_json(inner, f"{where}[{index}]")
    elif value is not None and type(value) not in (str, int, float, bool):
        raise ValueError(
            f"{where} is a {type(value).__name__}, which JSON cannot hold. Convert it to numbers, "
            "text, lists and dicts."
        )
