r"""Finds the final answer in a free-form solution.

In this order: the last ``\boxed{}``; the line after the last ``Answer:``; what follows the last
``answer is`` or ``####``; the last formula or number. Only the first two are the expected format.
A marker with nothing usable after it means that there is no answer: nothing earlier is fallen back
to, since a policy that writes many candidates must not be paid for one of them.
"""

from __future__ import annotations

import re
from collections import deque
from typing import NamedTuple

MAX_ANSWER_CHARS = 1000
"""A longer answer is none: comparing it could take for ever."""

_LINE_MARKER = re.compile(r"(?<!\w)Answer(?:\*\*)?+[ \t]*+:")
_LOOSE_MARKER = re.compile(
    r"(?:(?<!\w)(?i:the (?:final |correct )?answer is)|(?:^|\n)####)[ \t]*+:?", re.MULTILINE
)
_NUMBER = r"[-\u2212]?(?:\d{1,3}(?:,\d{3})++|\d++)?(?:\.\d++)?(?:/\d++)?(?:\\?%)?"
_LAST = re.compile(
    r"\$\$(?P<a>[^$]++)\$\$|\\\[(?P<b>(?:[^\\]|\\(?![\[\]]))*+)\\\]|\\\((?P<c>(?:[^\\]|\\(?![()]))*+)\\\)"
    rf"|(?<!\\)\$(?P<d>(?:\\.|[^$\n\\])++)\$|(?<![\w.,/])\$?(?P<n>(?=[-\u2212]?\.?\d){_NUMBER})(?!\w)"
)


class Extracted(NamedTuple):
    """An answer as written, and whether it stood in the expected format."""

    text: str
    formatted: bool


def extract_answer(response: str) -> Extracted | None:
    r"""The final answer of a response, without the markup around it.

    Args:
        response: decoded response, any content.

    Returns:
        None where there is no answer, or one too long to compare.
    """
    boxed = response.rfind("\\boxed")
    if boxed >= 0:
        return _usable(_braced(response[boxed + len("\\boxed") :]), formatted=True)
    marker = _last_match(_LINE_MARKER, response)
    if marker is not None:
        return _usable(strip_markup(_line(response, marker.end())), formatted=True)
    marker = _last_match(_LOOSE_MARKER, response)
    if marker is not None:
        return _usable(_loose(_line(response, marker.end())), formatted=False)
    last = _last_match(_LAST, response)
    return _usable(_content(last), formatted=False) if last is not None else None


def strip_markup(text: str) -> str:
    r"""Text without the stars, backticks, math delimiters and full stop around it."""
    before = None
    while text != before:
        before = text
        text = text.strip()
        if text.endswith(".") and not text.endswith(".."):
            text = text[:-1].rstrip()
        for opening, closing in (("**", "**"), ("`", "`"), ("$$", "$$"), ("$", "$")):
            inner = text[len(opening) : -len(closing)]
            wrapped = text.startswith(opening) and text.endswith(closing)
            if wrapped and len(text) > len(opening) and opening not in inner.replace("\\$", ""):
                text = inner
        for opening, closing in (("\\(", "\\)"), ("\\[", "\\]")):
            if text.startswith(opening) and text.endswith(closing) and opening not in text[2:]:
                text = text[2:-2]
        # "**Answer:** 4" leaves two stars in front of the answer.
        text = text.removeprefix("**")
    return text


def _line(text: str, start: int) -> str:
    """The first line with content; nothing where it is too long to be an answer."""
    line = text[start:].lstrip().partition("\n")[0]
    return line if len(line) <= 2 * MAX_ANSWER_CHARS else ""


def _loose(line: str) -> str:
    """The formula a sentence starts with, else all of it up to its end."""
    text = line.strip()
    formula = _LAST.match(text)
    if formula is not None and formula["n"] is None:
        rest = text[formula.end() :].lstrip()
        if not rest or rest[0] in ".,;":
            return _content(formula)
    return strip_markup(re.split(r"\.\s", text, maxsplit=1)[0])


def _content(match: re.Match[str]) -> str:
    return strip_markup(next(group for group in match.groups() if group is not None))


def _last_match(pattern: re.Pattern[str], text: str) -> re.Match[str] | None:
    last = deque(pattern.finditer(text), maxlen=1)
    return last[0] if last else None


def _braced(text: str) -> str | None:
    """What stands in the braces at the start of ``text``; None where they do not close."""
    text = text.lstrip()
    if not text.startswith("{"):
        # \boxed 5 is TeX for \boxed{5}, and models write it.
        return text[:1] if text[:1].isdigit() and not text[1:2].isalnum() else None
    depth = 0
    for place, character in enumerate(text):
        escaped = place > 0 and text[place - 1] == "\\"
        if character == "{" and not escaped:
            depth += 1
        elif character == "}" and not escaped:
            depth -= 1
            if depth == 0:
                return text[1:place]
    return None


def _usable(text: str | None, *, formatted: bool) -> Extracted | None:
    text = (text or "").strip()
    return Extracted(text, formatted) if 0 < len(text) <= MAX_ANSWER_CHARS else None
