r"""When two wrong answers are the same one: a normal form, for counting votes.

Right answers need none: each equals the reference. If wrong ones were told apart as text, ``1/2``
and ``\frac12`` would split their votes while right answers pool theirs, and a majority vote would
look better than it is. The verifier's own equality would do, but it may take for ever on what a
model wrote, and runs only where it can be killed.
"""

from __future__ import annotations

import re
from fractions import Fraction
from typing import NamedTuple

from dynamo_megatron.reward.extraction import MAX_ANSWER_CHARS, strip_markup

_NUMBER = r"(?:\d{1,3}(?:[, ]\d{3})++|\d++)(?:\.\d*+)?|\.\d++"
_SIGN = r"[+\-]?"
_DECIMAL = re.compile(rf"({_SIGN})({_NUMBER})")
_RATIO = re.compile(
    rf"({_SIGN})(?:\\frac\{{({_SIGN})({_NUMBER})\}}\{{({_SIGN})({_NUMBER})\}}"
    rf"|({_NUMBER})/({_SIGN})({_NUMBER}))"
)
_WRAPPER = re.compile(r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mbox)\s*\{([^{}]*)\}")
_DROPPED = re.compile(r"\\left(?![A-Za-z])|\\right(?![A-Za-z])|\\!|\\?\$")
_SPACING = re.compile(r"\\[,;:> ]|[\s~]")
_SPACES = re.compile(r"(?<!\d) +| +(?!\d)")
_FRACTION = re.compile(r"\\[dtc]?frac(?![A-Za-z])")
_FLAT_FRACTION = re.compile(r"\\frac *(?:(\d)|\{([^{}]*)\}) *(?:(\d)|\{([^{}]*)\})")
_LIST = re.compile(r"\d, +\d")
_PERCENT = re.compile(r"\\?%\Z")


class NormalForm(NamedTuple):
    """An answer as it is counted.

    Attributes:
        value: of a number, exactly; else the text.
        percent: it was a percentage; ``50%`` is neither ``50`` nor ``0.5``.
    """

    value: Fraction | str
    percent: bool = False


def normal_form(answer: str) -> NormalForm:
    r"""What all spellings of an answer have in common.

    Numbers are taken by value: integers, decimals, fractions (``a/b``, ``\frac{a}{b}``,
    ``\frac12``, ``\dfrac``), with signs and thousands separators. Everything else is text without
    math delimiters, ``$``, spacing, ``\left``, ``\right`` and the commands that set text. A space
    between two digits stays: ``1 2`` is not ``12``, and ``1 1/2`` is no ``11/2``.

    Args:
        answer: as the verifier extracted it.
    """
    if len(answer) > MAX_ANSWER_CHARS:
        return NormalForm("".join(answer.split()))
    text = _DROPPED.sub("", strip_markup(answer)).replace("\u2212", "-").replace("{,}", ",")
    before = None
    while text != before:
        before, text = text, _WRAPPER.sub(r"\1", text)
    spaced = _FRACTION.sub(r"\\frac", _SPACING.sub(" ", text).strip())
    text = _SPACES.sub("", _FLAT_FRACTION.sub(_braced, spaced))
    bare = _PERCENT.sub("", text)
    # 1, 234 is two numbers.
    value = None if _LIST.search(spaced) else _value(bare)
    return NormalForm(text) if value is None else NormalForm(value, percent=bare != text)


def _braced(match: re.Match[str]) -> str:
    top, bottom = match[1] or match[2] or "", match[3] or match[4] or ""
    return f"\\frac{{{top}}}{{{bottom}}}"


def _value(text: str) -> Fraction | None:
    if number := _DECIMAL.fullmatch(text):
        return _signed(number[2], number[1])
    ratio = _RATIO.fullmatch(text)
    if ratio is None:
        return None
    top = _signed(ratio[3] or ratio[6], ratio[1], ratio[2] or "")
    bottom = _signed(ratio[5] or ratio[8], ratio[4] or ratio[7] or "")
    return top / bottom if bottom else None


def _signed(digits: str, *signs: str) -> Fraction:
    value = Fraction(digits.replace(",", "").replace(" ", ""))
    return -value if signs.count("-") % 2 else value
