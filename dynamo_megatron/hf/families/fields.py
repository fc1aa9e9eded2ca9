"""Fields of a ``config.json``, of the right type and in range, or an error that names them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any


class ArchitectureError(ValueError):
    """A model folder that cannot be trained."""


class Fields:
    """The keys of a JSON object; null and an absent key are the same where a key is optional.

    Args:
        raw: the object.
        path: of the file, for messages.
    """

    def __init__(self, raw: Mapping[str, Any], path: Path) -> None:
        self._raw, self._path = raw, path

    def count(self, key: str) -> int:
        """A whole number above 0.

        Raises:
            KeyError: it is not there.
            ArchitectureError: it is anything else.
        """
        value = self._raw[key]
        # True and False are ints to Python.
        if type(value) is not int or value < 1:
            raise self._wrong(key, value, "a whole number above 0")
        return value

    def optional_count(self, key: str) -> int | None:
        """As ``count``, or None."""
        return None if self._raw.get(key) is None else self.count(key)

    def positive(self, key: str) -> float:
        """A finite number above 0.

        Raises:
            KeyError: it is not there.
            ArchitectureError: it is anything else.
        """
        value = self._raw[key]
        if type(value) not in (int, float) or not 0 < value < math.inf:
            raise self._wrong(key, value, "a finite number above 0")
        return float(value)

    def flag(self, key: str) -> bool:
        """True or false; false where it is absent."""
        value = self._raw.get(key, False)
        if not isinstance(value, bool):
            raise self._wrong(key, value, "true or false")
        return value

    def mapping(self, key: str) -> Mapping[str, Any]:
        """An object; an empty one where it is absent or null."""
        value = self._raw.get(key)
        if value is not None and not isinstance(value, dict):
            raise self._wrong(key, value, "an object")
        return value or {}

    def words(self, key: str) -> list[str]:
        """A list of strings; an empty one where it is absent or null."""
        value = self._raw.get(key)
        if value is None:
            return []
        if not isinstance(value, list) or not all(isinstance(word, str) for word in value):
            raise self._wrong(key, value, "a list of strings")
        return value

    def _wrong(self, key: str, value: object, wanted: str) -> ArchitectureError:
        return ArchitectureError(
            f"{self._path}: {key}={value!r} is not {wanted}: there is no such model. Correct the "
            "file, or copy it again."
        )
