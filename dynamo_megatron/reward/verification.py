"""What a verifier returns when it has more to say than a number."""

from __future__ import annotations

from typing import NamedTuple


class Verification(NamedTuple):
    """The result of verifying one response.

    A verifier may return this or a plain number; a number stands for ``Verification(number)``.

    Attributes:
        reward: the reward, a finite number.
        formatted: an answer could be extracted in the expected format.
        extracted: the extracted answer, or "".
    """

    reward: float
    formatted: bool = False
    extracted: str = ""
