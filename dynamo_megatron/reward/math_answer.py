r"""Verifier for mathematical answers: equal as numbers, expressions, sets or text.

The answer is found by ``extraction``; what is compared is one expression against one, never a
search of the response for something that fits. Two decimal numbers are compared exactly, words and
equal texts as text; everything else is math-verify's work, on what ``math_notation`` understands.

Units are not compared, on either side: ``5``, ``5 cm``, ``5 m/s`` and ``5\text{ cm}^2`` are one
answer, ``$5`` is ``5``, ``90^\circ`` is ``90``. A unit is a word of a list or of the problem itself
(``12 marbles``), a letter only in a text command or after a space; any other text must stand in
the reference as well. Words for powers of ten are numbers: ``18 million`` is 18000000, not ``18``.
A percentage equals its number and its value: ``10\%`` is both ``10`` and ``0.1``. The letter of a
choice, ``\text{(C)}``, is also ``(C)`` and ``C``. References for which a unit or a percentage
decides want a verifier of their own.

Decimals are exact: ``0.333333`` is not a third, whatever the number of places. ``3 1/2`` is a mixed
number and ``5 6`` no number at all. A base is compared (``52_8`` is not ``52``), and may be left
out only where the problem speaks of a base, which it then gives. Where a list repeats an element,
so must the other. An equation stands for its last side, and the others must not be another number.
Dots, primes, quotes and ``mod`` must stand in the reference as well.
"""

from __future__ import annotations

import re
from fractions import Fraction

from dynamo_megatron.reward.extraction import extract_answer, strip_markup
from dynamo_megatron.reward.math_expression import expressions_agree, parse_expression, sides
from dynamo_megatron.reward.math_notation import (
    Reading,
    marks,
    number,
    read,
    rewrite,
    singular_words,
)
from dynamo_megatron.reward.verification import Verification

_BASED = re.compile(r"([0-9A-Z]++)_\{?([0-9]++)\}?")
_BASE_NAMED = re.compile(r"\bbase\b|binary|ternary|octal|hexadecimal", re.IGNORECASE)
_WORDS = re.compile(
    r"(?:\\(?:text|textbf|textit|mathrm|mbox)\{([^{}]*)\}|([A-Za-z]+(?:[' .-][A-Za-z]+)*+\.?))"
)
_CHOICE = re.compile(r"(?:\\(?:text|textbf|textrm|mathrm|mathbf|mbox)\{)?\(?([A-Z])\)?\}?")
_WORD_LETTERS = 4
_SPACING = re.compile(r"\\[!,;:> ]|\\left(?![a-z])|\\right(?![a-z])|[\s~]")
_TIMES_ZERO = re.compile(r"(?<![0-9.])0\s*[A-Za-hj-z]")


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
    equal = answers_agree(found.text, answer, prompt)
    return Verification(reward=float(equal), formatted=found.formatted, extracted=found.text)


def check_reference(response: str, answer: str, prompt: str) -> Verification:
    """Reward 1.0 where the reference itself can be compared by value, 0.0 where only as text."""
    reference = rewrite(strip_markup(answer))
    known = (
        number(reference) is not None or _words(reference, min_letters=_WORD_LETTERS) is not None
    )
    body = read(reference, singular_words(""), trusted=True).body
    return Verification(reward=float(known or parse_expression(body) is not None))


def answers_agree(found: str, answer: str, problem: str = "") -> bool:
    """Whether two answers are the same.

    Args:
        found: the answer of a response.
        answer: the reference.
        problem: its words are units, and it says whether the base of a number is known.
    """
    reference, found = (rewrite(strip_markup(text)) for text in (answer, found))
    if _plain(found) == _plain(reference):
        return True
    if (letter := _CHOICE.fullmatch(reference)) and len(reference) > 1:
        choice = _CHOICE.fullmatch(found)
        return choice is not None and choice[1] == letter[1]
    # Words are no products of letters: math-verify would take "nevelyE" for "Evelyn".
    words = _words(reference, min_letters=_WORD_LETTERS)
    if words is not None:
        return _words(found, min_letters=1) == words
    units = singular_words(problem) | singular_words(reference)
    gold, target = read(reference, units, trusted=True), read(found, units)
    if based := _BASED.fullmatch(gold.body):
        return _based_agree(sides(target.body)[-1], based, problem)
    numbers = _value(gold), _value(target)
    if None not in numbers:
        return _numbers_agree(target, gold)
    return _expressions_agree(target, gold)


def _expressions_agree(found: Reading, reference: Reading) -> bool:
    side = sides(found.body)[-1]
    if marks(side) != marks(sides(reference.body)[-1]):
        return False
    # math-verify would take 0 times letters, as in "0 not", for 0.
    if _TIMES_ZERO.search(side) and not _TIMES_ZERO.search(reference.body):
        return False
    return expressions_agree(_scaled(found), _scaled(reference))


def _scaled(reading: Reading) -> str:
    if reading.factor == 1:
        return reading.body
    return rf"\left({sides(reading.body)[-1]}\right) \cdot {reading.factor}"


def _based_agree(found: str, reference: re.Match[str], problem: str) -> bool:
    """Whether digits are those of a number with a base: math-verify drops it."""
    based = _BASED.fullmatch(found)
    if based is not None:
        return based.groups() == reference.groups()
    return found == reference[1] and _BASE_NAMED.search(problem) is not None


def _value(reading: Reading) -> Fraction | None:
    value = number(reading.body.removesuffix("%").removesuffix("\\"))
    return None if value is None else value * reading.factor


def _numbers_agree(found: Reading, reference: Reading) -> bool:
    """Whether two numbers are equal; a percentage is both its number and its value."""
    left, right = _value(found), _value(reference)
    percent = found.body.endswith("%"), reference.body.endswith("%")
    if left is None or right is None:
        return False
    if percent == (True, False):
        return right in (left, left / 100)
    if percent == (False, True):
        return left in (right, right / 100)
    return left == right


def _plain(text: str) -> str:
    """Text without spacing, for comparison as text; two numbers stay apart."""
    text = re.sub(" +", " ", _SPACING.sub(" ", text))
    text = re.sub("(?<![0-9.]) | (?![0-9.])", "", text)
    return text.replace("\\dfrac", "\\frac").replace("\\tfrac", "\\frac")


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
