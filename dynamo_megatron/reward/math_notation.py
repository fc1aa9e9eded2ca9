r"""What a written answer says besides its mathematics: units, scales, words, marks.

math-verify drops much of that (text, subscripts of numbers, quotes, dots) or reads it as factors
(``5 6`` as 11). Here it is either understood, as a unit or a scale is, or reported as a mark that
the other answer must bear as well.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Set
from fractions import Fraction
from functools import lru_cache
from typing import NamedTuple

_NUMBER = r"[+\-\u2212]?(?:[0-9]{1,3}(?:,[0-9]{3})++|[0-9]++)?(?:\.[0-9]++)?"
_DECIMAL = re.compile(rf"(?=[+\-\u2212]?\.?[0-9]){_NUMBER}(?:[eE][+-]?[0-9]{{1,3}})?")
_TEXT = (
    r"\\(?:text(?:bf|it|rm|sf|tt|normal)?|[mh]box|emph|math(?:rm|bf|it|sf|tt|cal)|operatorname)"
    r"\s*\{"
)
_TEXT_GROUP = re.compile(rf"{_TEXT}([^{{}}]*)\}}")
_POWER = r"(?:\s*\^\s*(?:[23]|\{[23]\})|[\u00b2\u00b3])"
_TEXT_TAIL = re.compile(rf"(/|\\cdot)?\s*{_TEXT}([^{{}}]*)\}}({_POWER})?\s*\Z")
_BARE_TAIL = re.compile(
    rf"(?<=[0-9}}])((?:\\[,;: ]|[\s~])*)([A-Za-z](?:[A-Za-z/]|\s(?=\s*[A-Za-z/])|{_POWER})*+\.?)\Z"
)
_VALUE_END = re.compile(r"[0-9A-Za-z})\]%]\Z")
_UNIT_WORD = re.compile(
    r"dollars?|cents?|euros?|pounds?|rupees?|degrees?|radians?|square|cubic|sq|cu"
    r"|sec(?:ond)?s?|min(?:ute)?s?|h(?:ou)?rs?|days?|weeks?|months?|years?|yrs?"
    r"|miles?|mi|feet|foot|ft|inch(?:es)?|in|yards?|yd|acres?|units?|people|persons?|points?|ways?|times|usd"
    r"|(?:ton(?:ne)?|byte|bit|joule|newton|watt|volt|ohm|knot)s?|celsius|fahrenheit|kelvin|mol|rad"
    r"|(?:kilo|centi|milli)?(?:met(?:er|re)s?|grams?|lit(?:er|re)s?)|gallons?|ounces?|oz|lbs?"
    r"|(?:k|c|m)m|k?g|m[gl]|mph|kmh"
)
_UNIT_LETTERS = frozenset("mshglL")  # not M, which is a million
_SCALES = {
    "hundred": 10**2,
    "thousand": 10**3,
    "million": 10**6,
    "billion": 10**9,
    "trillion": 10**12,
    "dozen": 12,
}
_UNFINISHED = ("per", "square", "cubic", "sq", "cu")
# Words of a problem that say something about the number before them.
_NO_UNIT = re.compile(
    r"not|no|non|none|never|nor|and|or|plus|minus|less|more|over|under|above|below|than|only|about"
    r"|almost|nearly|around|approximately|roughly|between|least|most|up|to|from|by|mod|modulo|base"
    r"|negative|squared|cubed|factorial|percent|percentage|half|halves|both|either|false|wrong"
    r"|incorrect|double|twice|triple|if|when|where|unless|except|divided|multiplied|power"
    r"|(?:third|quarter|fourth|fifth|sixth|seventh|eighth|ninth|tenth|hundredth|thousandth"
    r"|millionth)s?|zero|one|two|three|four|five|six|seven|eight|nine|ten|eleven|twelve|\w+teen"
    r"|(?:twen|thir|for|fif|six|seven|eigh|nine)ty"
)
_THOUSANDS = re.compile(
    r"(?<![0-9.,_^])([0-9]{1,3}(?:(?:\\[,;: ]|[ ~])[0-9]{3})++)(?![0-9]|\s*/|\s*\\frac)"
)
_DIGITS = r"(?:\{\s*([0-9]{1,9})\s*\}|([0-9]))"
_FRACTION = rf"(?:\\[dt]?frac\s*{_DIGITS}\s*{_DIGITS})"
_MIXED = re.compile(
    rf"(?<![0-9._^}}A-Za-z])(?<!_\{{)([0-9]{{1,3}}(?:,[0-9]{{3}}){{1,4}}+|[0-9]{{1,15}}+)"
    rf"(?:\\[,;: ]|[\s~])*(?:{_FRACTION}"
    r"|(?<=[\s~])([0-9]{1,9})\s*/\s*([0-9]{1,9}))(?![0-9.]|\s*[A-Za-z\\(^{])"
)
_SPACE = r"(?:\\[,;: ]|\\q?quad(?![a-z])|[\s~])"
_ARGUMENT = r"(?<!frac[0-9])(?<!frac\s[0-9])(?<!binom[0-9])(?<!binom\s[0-9])(?<!_[0-9])"
# math-verify would read 3(\frac12) as 3 1/2, and 3\frac32 as 3 + 3/2.
_PRODUCT = re.compile(
    rf"(?<=[0-9]){_ARGUMENT}\s*(?=(?:\\left\s*)?\(\s*\\[dt]?frac|\\[dt]?frac\s*\{{?\s*[0-9])"
)
_LIST_WORD = re.compile(
    rf",?\s*(?:{_TEXT}\s*(?:,\s*)?(?:and|or)\s*\}}|(?<![A-Za-z\\])(?:and|or)(?![A-Za-z]))\s*"
)
_REWRITES = (
    (re.compile(r"\u00b0|\\degrees?(?![a-z])"), r"^\\circ "),
    (re.compile(rf"(\^\s*\{{?\s*\\circ\s*\}}?)\s*{_TEXT}\s*[CF]\s*\}}"), r"\1"),
    (re.compile(rf"\s*{_TEXT}\s*(?:percent|pct|percentage)\s*\}}"), r"\\%"),
    (re.compile(r"\\(?:varnothing|emptyset)(?![A-Za-z])|\u2205|\A\\\{\s*\\\}\Z"), r"\\emptyset "),
    (re.compile(r"\A(?:=|\\approx(?:eq)?(?![A-Za-z])|\\simeq(?![A-Za-z])|\u2248)"), ""),
    # \boxed{\textbf{(C)}\ 13} is how many published solutions end.
    (re.compile(rf"\A{_TEXT}\([A-E]\)\s*\}}(?:\\[,;: ]|~|\s|\\q?quad(?![a-z]))*(?=\S)"), ""),
    (re.compile(r'\A"([^"]*)"\Z'), r"\1"),
    (re.compile(rf"\A{_TEXT}\s*([^{{}}A-Za-z]*[0-9][^{{}}A-Za-z]*)\}}\Z"), r"\1"),
    (re.compile(r"\A[A-Za-z]\s*\\in(?![A-Za-z])"), ""),
    (re.compile("\u2212"), "-"),
    (re.compile(r"\\!"), ""),
)
_MARKS = re.compile(
    r"""(?P<quote>['"`\u2018-\u201d\u2032\u2033]|\\prime(?![A-Za-z]))"""
    r"|(?P<dots>\\[lcvd]?dots[a-z]?(?![A-Za-z])|\u2026|\.\.)"
    r"|(?P<mod>(?<![A-Za-z])[pb]?mod(?:ulo)?(?![A-Za-z]))"
    r"|(?P<base>(?<=[0-9)}])\s*_\s*(?:\{[^{}]*\}|[^\s{]))"
    r"|(?P<hex>(?<![0-9A-Za-z.])0[xXoObB][0-9A-Fa-f])"
    r"|(?P<points>\.[0-9]+(?=\.[0-9]))"
    rf"|(?P<gap>(?<=[0-9]){_ARGUMENT}(?:{_SPACE}|\{{\s*\}})+(?=\.?[0-9]))"
    rf"|(?P<brace>(?<=[0-9]){_ARGUMENT}{_SPACE}*\{{\s*(?=\.?[0-9]|\\[dt]?frac))"
    r"|(?P<transpose>(?<=[0-9)])\s*\^\s*\{?\s*T(?![A-Za-z]))"
    r"|(?P<phantom>\\[hv]?phantom)"
)


class Reading(NamedTuple):
    """The mathematics of an answer, and the factor of its scale: 5 million dollars is 5, 10^6."""

    body: str
    factor: int


def rewrite(text: str) -> str:
    """One notation for what has several: degrees, the empty set, minus signs, an opening ``=``."""
    for pattern, replacement in _REWRITES:
        text = pattern.sub(replacement, text.strip())
    return text.strip()


def read(text: str, words: Set[str], *, trusted: bool = False) -> Reading:
    """An answer without its unit, with one notation for lists, thousands and mixed numbers.

    Args:
        text: a rewritten answer.
        words: words that count as units besides the common ones, singular, in lower case.
        trusted: the text is a reference: what stands in a text command after a number is a unit,
            and a letter after a number is none.
    """
    body, factor = _without_unit(text, words, trusted=trusted)
    body = _LIST_WORD.sub(", ", body).strip()
    body = _MIXED.sub(_improper, body)
    body = _PRODUCT.sub(r" \\cdot ", body)
    body = _THOUSANDS.sub(lambda match: re.sub(r"[^0-9]", "", match[1]), body)
    # \mathrm{i} is i.
    return Reading(re.sub(rf"{_TEXT}\s*([A-Za-z])\s*\}}", r" \1 ", body), factor)


def number(text: str) -> Fraction | None:
    """The exact value of an integer or decimal, with or without an exponent such as 1e3."""
    text = text.replace("{,}", ",").replace("\\$", "").strip()
    if not _DECIMAL.fullmatch(text):
        return None
    return Fraction(text.replace(",", "").replace("\u2212", "-"))


def marks(text: str) -> Counter[str]:
    """What math-verify would drop or misread, counted by kind; the words of text by themselves."""
    found = Counter(_TEXT_GROUP.findall("".join(text.lower().split())))
    del found[""]
    for match in _MARKS.finditer(_TEXT_GROUP.sub(" ", text)):
        # The base itself is dropped too.
        base = re.sub(r"[\s{}]", "", match["base"] or "")
        found[f"{match.lastgroup}{base}"] += 1
    return found


@lru_cache(maxsize=256)
def singular_words(text: str) -> frozenset[str]:
    """The words of a text that may be units, without their plural's end."""
    return frozenset(
        singular
        for word in re.findall("[a-z]{3,}", text.lower())
        if not _NO_UNIT.fullmatch(word) and word.removesuffix("s") not in _SCALES
        for singular in _singular(word)
    )


def _singular(word: str) -> set[str]:
    return {word, word.removesuffix("s"), word.removesuffix("es")}


def _without_unit(text: str, words: Set[str], *, trusted: bool) -> Reading:
    """The text before its unit; all of it where what follows the last number is no unit."""
    body, tail = text, ""
    while (match := _TEXT_TAIL.search(body)) and match.start():
        body = body[: match.start()].rstrip()
        tail = f"{match[1] or ' '}{match[2]}{match[3] or ''}{tail}"
    if tail:
        body = re.sub(rf"{_SPACE}+\Z", "", body)
        factor = _scale(tail, words, trusted=trusted) if _VALUE_END.search(body) else 0
        return Reading(body, factor) if factor else Reading(text, 1)
    match = _BARE_TAIL.search(text)
    if match is None:
        return Reading(text, 1)
    # 5m may be five times m; so may 5 m of a reference, and 5 in.
    tail = match[2]
    letters = re.fullmatch(rf"([A-Za-z]{{1,2}}){_POWER}?", tail)
    if letters and (
        tail == "in" or (len(letters[1]) == 1 and (trusted or not match[1])) or letters[1] == "mg"
    ):
        return Reading(text, 1)
    factor = _scale(tail, words, trusted=False)
    return Reading(text[: match.start()].rstrip(), factor) if factor else Reading(text, 1)


def _scale(tail: str, words: Set[str], *, trusted: bool) -> int:
    """The factor of what stands after a number; 0 where it is no unit."""
    factor = 1
    tail = re.sub(r"\\cdot|[~\u00b7]|\\[,;: ]", " ", tail).replace("/", " per ")
    tokens = [re.sub(rf"{_POWER}\Z", "", token) for token in re.sub(r"\s+\^", "^", tail).split()]
    tokens = [token.rstrip(".") for token in tokens]
    while tokens and (scale := _SCALES.get(tokens[0].lower().removesuffix("s"))):
        factor *= scale
        tokens.pop(0)
    if tokens and (tokens[0] == "per" or tokens[-1] in _UNFINISHED):
        return 0
    known = all(_is_unit(token, words, trusted=trusted) for token in tokens)
    return factor if known else 0


def _is_unit(token: str, words: Set[str], *, trusted: bool) -> bool:
    word = token.lower()
    if len(token) == 1:
        return token in _UNIT_LETTERS
    if word.removesuffix("s") in _SCALES or _NO_UNIT.fullmatch(word):
        return False
    known = _UNIT_WORD.fullmatch(word) or word == "per" or _singular(word) & words
    return bool(known) or (trusted and word.isalpha() and len(word) > 2)


def _improper(match: re.Match[str]) -> str:
    """A whole number with a proper fraction after it, as one fraction."""
    whole, above = int(match[1].replace(",", "")), int(match[2] or match[3] or match[6])
    below = int(match[4] or match[5] or match[7])
    if not 0 < above < below:
        return match[0]
    return f"\\frac{{{whole * below + above}}}{{{below}}}"
