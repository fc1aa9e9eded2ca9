r"""Verifier for mathematical answers: equal as numbers, expressions, sets or text.

The answer is found by ``extraction``; what is compared is one expression against one, never a
search of the response for something that fits. Two decimal numbers are compared exactly, words and
equal texts as text; everything else is math-verify's work (Apache-2.0, on sympy). Its own time
limits use ``signal.alarm`` and are off: the pool kills a worker that takes too long.

Units are not compared, on either side: ``5``, ``5 cm``, ``5\text{ m}`` and ``5\text{ cm}^2`` are
one answer, ``$5`` is ``5``, ``90^\circ`` is ``90``. A unit is text in a command, a word of a short
list, or after a number a word of the problem itself (``12 marbles``). Words for numbers are no
units: ``18 million`` is not ``18``. A percentage equals its number and its value: ``10\%`` is both
``10`` and ``0.1``. The letter of a choice, ``\text{(C)}``, is also ``(C)`` and ``C``. References
for which a unit or a percentage decides want a verifier of their own.
"""

from __future__ import annotations

import logging
import re
from fractions import Fraction
from functools import lru_cache
from typing import Any

from dynamo_megatron.reward.extraction import extract_answer, strip_markup
from dynamo_megatron.reward.verification import Verification

# Here and not on first use: a worker's start has a long time limit, a verification a short one.
try:
    from math_verify import LatexExtractionConfig, parse, verify
except ImportError as error:
    raise ImportError(
        "the math verifier needs math-verify, which is not installed: "
        "pip install 'dynamo-megatron[math]'"
    ) from error

_NUMBER = re.compile(r"[+\-\u2212]?(?:[0-9]{1,3}(?:,[0-9]{3})++|[0-9]++)(?:\.[0-9]++)?")
_BASED = re.compile(r"([0-9A-Z]++)_\{?([0-9]++)\}?")
_WORDS = re.compile(
    r"(?:\\(?:text|textbf|textit|mathrm|mbox)\{([^{}]*)\}|([A-Za-z]+(?:[' .-][A-Za-z]+)*+\.?))"
)
_POWER = r"(?:\^\{?[23]\}?|[\u00b2\u00b3])"
_UNIT = re.compile(
    r"(?<=[0-9])\s*(?:(?:square |cubic )?(?:dollars?|cents?|euros?|pounds?|degrees?|seconds?"
    r"|minutes?|hours?|days?|weeks?|months?|years?|miles?|feet|foot|inch(?:es)?|yards?|units?"
    r"|people|(?:kilo|centi|milli)?(?:met(?:er|re)s?|grams?)|(?:k|c|m)?m|k?g|mph)"
    rf"{_POWER}?|(?:in|ft){_POWER})\Z"
)
_SCALE = re.compile(
    r"(?<![a-z])(?:hundred|thousand|million|billion|trillion|dozen)s?(?![a-z])", re.IGNORECASE
)
_COUNTED = re.compile(rf"({_NUMBER.pattern})\s+([A-Za-z]{{3,}}(?:\s+[A-Za-z]+){{0,3}}+)")
_NO_UNIT = re.compile(
    r"(?<![a-z])(?:and|plus|minus|less|more|over|squared|cubed|factorial|percent|half|halves"
    r"|(?:third|quarter|fourth|fifth|tenth|hundredth|thousandth)s?)(?![a-z])",
    re.IGNORECASE,
)
_CHOICE = re.compile(r"(?:\\(?:text|textbf|textrm|mathrm|mathbf|mbox)\{)?\(?([A-Z])\)?\}?")
_DEGREE = re.compile(r"\u00b0|\\degrees?(?![a-z])")
_WORD_LETTERS = 4
_SPACING = re.compile(r"\\[!,;:> ]|\\left(?![a-z])|\\right(?![a-z])|[\s~]")


def verify_math(response: str, answer: str, prompt: str) -> Verification:
    """Reward 1.0 where the response's final answer equals the reference, else 0.0.

    Args:
        response: decoded response.
        answer: reference answer: LaTeX, a number or words, with or without math delimiters.
        prompt: the problem; its words are units.
    """
    found = extract_answer(response)
    if found is None:
        return Verification(reward=0.0)
    equal = answers_agree(_count(found.text, prompt) or found.text, answer)
    return Verification(reward=float(equal), formatted=found.formatted, extracted=found.text)


def check_reference(response: str, answer: str, prompt: str) -> Verification:
    """Reward 1.0 where the reference itself can be compared by value, 0.0 where only as text."""
    reference = strip_markup(answer)
    known = (
        _number(reference) is not None or _words(reference, min_letters=_WORD_LETTERS) is not None
    )
    return Verification(reward=float(known or bool(_parse(reference))))


def answers_agree(found: str, answer: str) -> bool:
    """Whether two answers are the same.

    Args:
        found: the answer of a response.
        answer: the reference.
    """
    reference, found = (
        _DEGREE.sub(r"^\\circ ", strip_markup(text)).strip() for text in (answer, found)
    )
    if _plain(found) == _plain(reference):
        return True
    if (letter := _CHOICE.fullmatch(reference)) and len(reference) > 1:
        choice = _CHOICE.fullmatch(found)
        return choice is not None and choice[1] == letter[1]
    # math-verify drops text: 18 million would pass for 18.
    if _SCALE.findall(reference.lower()) != _SCALE.findall(found.lower()):
        return False
    # A word after a number would be read as a product of letters. In the reference it may be one.
    if not _UNIT.search(reference):
        found = _UNIT.sub("", found)
    numbers = _number(found), _number(reference)
    if None not in numbers:
        return numbers[0] == numbers[1]
    # math-verify drops a subscript: 52 in base 9 would pass for 52 in base 8.
    based = _BASED.fullmatch(reference), _BASED.fullmatch(found)
    if based[0] and based[1]:
        return based[0].groups() == based[1].groups()
    # Words are no products of letters: math-verify would take "nevelyE" for "Evelyn".
    words = _words(reference, min_letters=_WORD_LETTERS)
    if words is not None:
        return _words(found, min_letters=1) == words
    gold = _parse(reference)
    target = _parse(found) if gold else []
    return bool(target) and bool(verify(gold, target, timeout_seconds=None, raise_on_error=False))


def _count(text: str, problem: str) -> str | None:
    """The number of a count, such as 12 marbles, of what the problem speaks of; None for others."""
    match = _COUNTED.fullmatch(strip_markup(text))
    if match is None:
        return None
    words = [word.lower() for word in match[2].split()]
    known = {word.removesuffix("s") for word in re.findall("[a-z]+", problem.lower())}
    if not all(word.removesuffix("s") in known for word in words):
        return None
    return None if _NO_UNIT.search(text) or _SCALE.search(text) else match[1]


def _plain(text: str) -> str:
    """Text without spacing, for comparison as text."""
    text = _SPACING.sub("", text)
    return text.replace("\\dfrac", "\\frac").replace("\\tfrac", "\\frac").replace("\u2212", "-")


def _number(text: str) -> Fraction | None:
    """The exact value of an integer or decimal."""
    text = text.replace("{,}", ",").replace("\\!", "").replace("\\$", "").strip()
    if not _NUMBER.fullmatch(text):
        return None
    return Fraction(text.replace(",", "").replace("\u2212", "-"))


def _words(text: str, *, min_letters: int) -> str | None:
    """Words without their LaTeX command, in lower case; None where the text is mathematics.

    Args:
        text: an answer.
        min_letters: shorter text outside a command is a product of variables.
    """
    match = _WORDS.fullmatch(text)
    if match is None:
        return None
    bare = match[1] is None
    words = " ".join((match[1] or match[2]).lower().split()).strip(".")
    if not any(character.isalpha() for character in words):
        return None
    return words if not bare or len(words) >= min_letters else None


def _parse(text: str) -> list[Any]:
    """The text as one expression; empty where math-verify cannot read it."""
    _silence()
    return parse(
        f"\\boxed{{{text}}}",
        extraction_config=[LatexExtractionConfig(boxed_match_priority=0)],
        fallback_mode="no_fallback",
        parsing_timeout=0,  # none: the pool has its own
    )


@lru_cache(maxsize=1)
def _silence() -> None:
    # It warns that its time limits are off; they are the pool's work.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
