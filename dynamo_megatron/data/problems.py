"""A problem before it is tokenised."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass

_ID_HEX_DIGITS = 20
"""80 bits: a collision among a million problems has a chance of 4e-13."""


class DataError(ValueError):
    """The data of a run cannot be used as it is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One problem with its reference answer.

    Attributes:
        text: the problem as written in the data.
        answer: the reference answer.
        source: name of the data source.
        system: the system message before it, or "".
        label: the data set's own name for the problem, for people; or "".
    """

    text: str
    answer: str
    source: str
    system: str = ""
    label: str = ""

    @property
    def id(self) -> str:
        """Hash of (text, answer, source, system): the same on every machine, in every run.

        History, seeds and shuffles are keyed by it, so a file may be reordered or extended between
        runs; a problem whose text or answer was corrected is another problem.
        """
        # JSON and not a join: no two different triples may read the same.
        parts = [self.text, self.answer, self.source, *([self.system] if self.system else [])]
        content = json.dumps(parts)
        return hashlib.sha256(content.encode("ascii")).hexdigest()[:_ID_HEX_DIGITS]
