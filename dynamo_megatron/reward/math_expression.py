r"""Comparison of two expressions by math-verify (Apache-2.0, on sympy), without its leniences.

Its own time limits use ``signal.alarm`` and are off: the pool kills a worker that takes too long.
Decimals become exact numbers before they are compared (math-verify rounds to six places, so that
0.333333 would be a third), a repeated element of a list counts, and the sides of an equation must
have one value. Units are not its work.
"""

from __future__ import annotations

import logging
import re
from functools import lru_cache
from typing import Any

# Here and not on first use: a worker's start has a long time limit, a verification a short one.
try:
    from latex2sympy2_extended import NormalizationConfig
    from math_verify import LatexExtractionConfig, parse, verify
    from sympy import Basic, FiniteSet, Float, I, MatrixBase, N, Rational, Set, Symbol
except ImportError as error:
    raise ImportError(
        "the math verifier needs math-verify, which is not installed: "
        "pip install 'dynamo-megatron[math]'"
    ) from error

_CONFIG = LatexExtractionConfig(
    boxed_match_priority=0,
    normalization_config=NormalizationConfig(
        basic_latex=True, units=False, malformed_operators=True, nits=True, boxed="all"
    ),
)
_EQUALS = re.compile(r"((?<![\\<>!:=])=(?!=)|\\(?:approx(?:eq)?|simeq|equiv)(?![A-Za-z])|\u2248)")
_DECIMALS = re.compile(r"-?[0-9]*\.([0-9]+)(?:\\?[.l]?dots)?")


def parse_expression(text: str) -> Any:
    """The text as one expression; None where math-verify cannot read it."""
    _silence()
    found = parse(
        f"\\boxed{{{text}}}",
        extraction_config=[_CONFIG],
        fallback_mode="no_fallback",
        parsing_timeout=0,  # none: the pool has its own
    )
    return _exact(found[0]) if found else None


def expressions_agree(found: str, reference: str) -> bool:
    """Whether two answers are one expression, equation, list or set.

    Args:
        found: the answer of a response.
        reference: what it must equal; of an equation such as x = 5, its value is enough.
    """
    gold = parse_expression(reference)
    parts = elements(found)
    if gold is None or not all(_has_one_value(part) for part in parts):
        return False
    if len(parts) == 1 and len(sides(reference)) == 1:
        found = sides(found)[-1]
    target = parse_expression(found)
    if target is None:
        return False
    if _repeats(found, target) or _repeats(reference, gold):
        return _same_elements(parts, elements(reference))
    return _equal(gold, target)


def sides(text: str) -> list[str]:
    r"""The sides of an equation, without one that only rounds the last: \sqrt2 \approx 1.41."""
    parts = _EQUALS.split(text)
    if len(parts) > 2 and parts[-2] != "=" and _rounds(parts[-3], parts[-1]):
        del parts[-2:]
    return [part.strip() for part in parts[::2]]


def elements(text: str) -> list[str]:
    """The parts of a list or set, written with commas or semicolons; the text itself for others."""
    inner = re.fullmatch(r"\\\{(.*)\\\}", text.strip())
    parts, depth, start = [], 0, 0
    text = inner[1] if inner else text
    for place, character in enumerate(text):
        if character in "([{":
            depth += 1
        elif character in ")]}":
            depth -= 1
        elif character in ",;" and depth == 0 and text[place - 1 : place] != "\\":
            parts.append(text[start:place])
            start = place + 1
    return [part.strip() for part in (*parts, text[start:])]


def _equal(gold: Any, target: Any) -> bool:
    return bool(verify([gold], [target], timeout_seconds=None, raise_on_error=False))


def _exact(expression: Any) -> Any:
    """The expression with exact numbers for its decimals, and the imaginary unit for i."""
    if not isinstance(expression, Basic | MatrixBase):
        return expression
    exact: dict[Any, Any] = {decimal: Rational(str(decimal)) for decimal in expression.atoms(Float)}
    free: set[Any] = expression.free_symbols  # the i of a sum is not
    for symbol in free:
        # Whether symbols are real depends on how an i is spaced: 2 + 3i and 2 + 3 i would differ.
        if symbol.name == "i":
            exact[symbol] = I
        elif not symbol.is_real:
            exact[symbol] = Symbol(symbol.name, real=True)
    return expression.xreplace(exact) if exact else expression


def _has_one_value(text: str) -> bool:
    """Whether the sides of an equation that are numbers are the same number."""
    written = sides(text)
    if len(written) < 2:
        return True
    values = [value for side in written if _is_number(value := parse_expression(side))]
    return all(_equal(value, values[-1]) for value in values[:-1])


def _is_number(expression: Any) -> bool:
    return (
        isinstance(expression, Basic)
        and not isinstance(expression, Set)
        and not expression.free_symbols
    )


def _rounds(exact: str, decimal: str) -> bool:
    """Whether a decimal is the rounded value of what stands before it."""
    places = _DECIMALS.fullmatch(decimal.strip())
    value = parse_expression(exact) if places else None
    if places is None or not _is_number(value):
        return False
    error = abs(N(value, 30) - Rational(decimal.strip()))
    return bool(error <= Rational(1, 10 ** len(places[1])))


def _repeats(text: str, expression: Any) -> bool:
    """Whether a list has an element twice, which a set cannot say."""
    return isinstance(expression, FiniteSet) and len(elements(text)) > len(expression.args)


def _same_elements(found: list[str], reference: list[str]) -> bool:
    if len(found) != len(reference):
        return False
    left = [parse_expression(part) for part in reference]
    for part in found:
        value = parse_expression(part)
        match = next((gold for gold in left if gold is not None and _equal(gold, value)), None)
        if match is None:
            return False
        left.remove(match)
    return True


@lru_cache(maxsize=1)
def _silence() -> None:
    # It warns that its time limits are off; they are the pool's work.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
