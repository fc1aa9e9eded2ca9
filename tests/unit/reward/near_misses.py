"""Phrasings of a right answer, and wrong answers that look like it."""

import re

LATEX_PHRASINGS = (
    r"Therefore the answer is $\boxed{%s}$.",
    "We add them up.\nAnswer: %s",
    "**Answer:** $%s$",
    "The final answer is $%s$. I hope it is correct.",
    "2 + 2 = 4, and so on.\n#### %s",
    r"Answer: \boxed{%s}",
    "Hence, after 3 steps, we get $%s$.",
    "Thus\n\\[ \\boxed{%s} \\]\nas was to be shown.",
    r"Answer: \(%s\).",
)
INTEGER_PHRASINGS = (
    "We add them up.\nAnswer: %s",
    "**Answer:** $%s$",
    r"Answer: \boxed{%s}",
    "3 steps.\n**Answer**: %s.",
    r"Answer: \(%s\).",
    r"Therefore the answer is $\boxed{%s}$.",
)


def near_misses(answer: str) -> list[str]:
    """At least five wrong answers, different from ``answer`` by construction."""
    digits = answer.replace(",", "").replace("\\!", "")
    if re.fullmatch(r"-?\d+", digits):
        return integer_misses(int(digits))
    words = re.fullmatch(r"\\text\{\(?([A-Za-z ]+)\)?\}", answer)
    if words:
        return word_misses(words[1])
    changed = [
        f"{answer[: m.start()]}{int(m[0]) + 1}{answer[m.end() :]}"
        # Not in the power of a unit: units are not compared.
        for m in re.finditer(r"(?<![\d.])(?<!\}\^)\d+", answer)
    ]
    return [
        *changed,
        f"{answer}+1",
        f"{answer}\\text{{k}}",
        f"{answer}\\ldots",
        f"7919, {answer}",
        f"{answer} \\text{{ or }} 7919",
        f"3 + {answer}",
        f"\\frac{{{answer}}}{{7}}",
        "7919",
    ]


def integer_misses(n: int) -> list[str]:
    return [
        str(n + 1),
        str(n - 1),
        str(-n) if n else "10",
        f"{n}1",
        f"{n}.5",
        f"{n} or {n + 1}",
        f"{n}, {n + 1}",
        f"\\frac{{{n}}}{{7}}" if n else "\\frac{1}{7}",
        f"{n}+1",
        f"{n}x" if n else "x",
        f"{n}_{{12}}",
        f"{n}\\text{{k}}",
        f"{n} {n}",
        f"{n} = {n + 1}",
    ]


def word_misses(word: str) -> list[str]:
    other = "ABCDEFG"["BCDEFGA".index(word)] if word in "ABCDEFG" else "none"
    return [word[:-1] + "zq", f"not {word}", f"{word} or {other}", other, "7", f"{word}{word}"]
