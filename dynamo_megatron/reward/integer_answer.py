r"""Verifier for integer answers: the last ``Answer: <integer>``, or ``\boxed{}`` without one.

What counts as an integer is strict on purpose: the line after the last ``Answer:`` must hold one
integer and nothing else but decoration. A lenient reading ("the first number found") pays a policy
for ``Answer: 12 or 13`` and cuts ``Answer: 12.5`` to 12.
"""

from __future__ import annotations

import re

from dynamo_megatron.reward.verification import Verification

_INTEGER = r"[+\-\u2212]?(?:[0-9]{1,3}(?:,[0-9]{3})++|[0-9]++)"
_OPEN = r"(?:[\s*$`]|\\[(\[])*+"
_CLOSE = r"(?:[\s*$`]|\\[)\]])*+"
# Possessive quantifiers (*+, ++): the time stays linear in the response, whatever a policy writes.
_LINE = re.compile(
    rf"{_OPEN}(?:\\boxed\{{\s*+({_INTEGER})\s*+\}}|({_INTEGER})){_CLOSE}\.?+{_CLOSE}"
)
_BOXED = re.compile(r"\\boxed\{([^{}]*+(?:\{,\}[^{}]*+)*+)\}")
_MARKER = re.compile(r"(?<!\w)Answer(?:\*\*)?+[ \t]*+:")


def extract_integer_answer(response: str) -> str | None:
    r"""Extract the integer that follows the last ``Answer:``.

    The first non-empty line after the marker must be one integer: a sign (``+``, ``-`` or the
    minus sign U+2212), leading zeros and thousands separators (``1,234``, ``1{,}234``) are read;
    markdown stars and backticks, dollar signs, ``\( \)``, ``\[ \]``, ``\boxed{}`` around it and a
    full stop after it are ignored. Anything else on the line, such as a unit, a second number or a
    decimal part (12.5, and 12.0 too), means that there is no integer answer. An earlier
    ``Answer:`` is never fallen back to. ``Answer`` is case-sensitive and starts a word. Only a
    response without any ``Answer:`` is asked for its last ``\boxed{}``.

    Args:
        response: decoded response, any content.

    Returns:
        Canonical digits (``-1234``: no ``+``, separators, leading zeros or negative zero), or None.
    """
    start = None
    for marker in _MARKER.finditer(response):
        start = marker.end()
    if start is None:
        boxed = response.rfind("\\boxed{")
        match = _BOXED.match(response, boxed) if boxed >= 0 else None
        return _canonical_integer(match[1]) if match else None
    return _canonical_integer(response[start:].lstrip().partition("\n")[0])


def verify_integer_answer(response: str, answer: str, prompt: str) -> Verification:
    """Reward 1.0 where the response's integer answer is the reference, else 0.0.

    Args:
        response: decoded response.
        answer: reference answer, an integer written in any of the ways a response may write it.
        prompt: not used.

    Raises:
        ValueError: the reference is not an integer, so that no response could ever be right.
    """
    reference = parse_reference(answer)
    extracted = extract_integer_answer(response)
    if extracted is None:
        return Verification(reward=0.0)
    return Verification(reward=float(extracted == reference), formatted=True, extracted=extracted)


def parse_reference(answer: str) -> str:
    """Read a reference answer as canonical digits.

    Raises:
        ValueError: it is not an integer.
    """
    reference = _canonical_integer(answer)
    if reference is None:
        raise ValueError(
            f"the reference answer {answer[:80]!r} is not an integer, so no response could be "
            "right. Leave such problems out, or choose a verifier for them."
        )
    return reference


def _canonical_integer(line: str) -> str | None:
    # Strings all the way: int() refuses more than 4300 digits, and a policy may write them.
    match = _LINE.fullmatch(line.replace("{,}", ","))
    if match is None:
        return None
    written = (match[1] or match[2]).replace(",", "")
    digits = written.lstrip("+-\u2212").lstrip("0") or "0"
    return f"-{digits}" if written[0] in "-\u2212" and digits != "0" else digits
