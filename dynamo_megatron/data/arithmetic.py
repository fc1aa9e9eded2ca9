"""Generated addition and subtraction chains with exactly known answers.

The task a run can train on without any download: ``Compute 385+47-29``, answered by
``Answer: 403``. Problems have 3 or 4 terms of 1 to 3 digits, so that one policy meets easy and
hard ones in the same batch. Every partial sum lies in 0..999, which bounds a worked solution
(one line a step) to a few dozen characters.

The training and the held-out problems are disjoint by construction: a hash of the expression
decides the side, not the seed, the count or the order in which problems are drawn.
"""

import hashlib
import random
from collections.abc import Collection
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

Split = Literal["train", "heldout"]

MAX_PARTIAL_SUM = 999
"""Largest partial sum, and so the largest answer."""

_TERM_COUNTS = (3, 4)
_DIGIT_COUNTS = (1, 2, 3)
_DIGIT_COUNT_WEIGHTS = (1, 3, 2)
_HELDOUT_ONE_IN = 4
_MAX_CONSECUTIVE_REJECTIONS = 20_000


@dataclass(frozen=True, slots=True, kw_only=True)
class ArithmeticProblem:
    """One chain of additions and subtractions.

    Attributes:
        problem: the text put to the policy, for example ``Compute 385+47-29``; unique in a list.
        answer: the value as decimal digits, for example ``403``.
        operands: the signed terms from left to right, for example ``(385, 47, -29)``.
    """

    problem: str
    answer: str
    operands: tuple[int, ...]

    @property
    def num_terms(self) -> int:
        """Number of terms, 3 or 4: one more than the steps of a worked solution."""
        return len(self.operands)

    @property
    def num_carries(self) -> int:
        """Decimal places that carry or borrow, over all steps: the measure of difficulty."""
        partial_sums = tuple(accumulate(self.operands))
        return sum(
            count_carries(total, operand)
            for total, operand in zip(partial_sums, self.operands[1:], strict=False)
        )


def count_carries(total: int, operand: int) -> int:
    """Count the decimal places that carry (or borrow) when ``operand`` is added to ``total``.

    Args:
        total: the running sum, >= 0.
        operand: the signed number to add; ``total + operand`` must be >= 0.
    """
    if operand < 0:
        # a - b = c borrows exactly where c + b = a carries.
        total, operand = total + operand, -operand
    carries, carry = 0, 0
    while operand or carry:
        carry = int(total % 10 + operand % 10 + carry >= 10)
        carries += carry
        total, operand = total // 10, operand // 10
    return carries


def split_of(operands: tuple[int, ...]) -> Split:
    """Tell which side an expression belongs to, whatever the seed that drew it.

    The hash is taken over the sorted signed terms, so that ``12+7-3`` and ``7-3+12`` fall on the
    same side: no held-out problem is a reordering of a training one. One in four is held out.

    Args:
        operands: the signed terms, in any order.
    """
    canonical = "".join(f"{operand:+d}" for operand in sorted(operands))
    digest = hashlib.sha256(canonical.encode("ascii")).digest()
    return "heldout" if digest[0] % _HELDOUT_ONE_IN == 0 else "train"


def arithmetic_problems(
    num_problems: int, *, seed: int, split: Split, exclude: Collection[str] = frozenset()
) -> list[ArithmeticProblem]:
    """Draw distinct problems of one split, the same list for the same arguments.

    Args:
        num_problems: how many to draw, >= 0.
        seed: seed of the draw; a longer list with the same seed starts with the shorter one.
        split: ``train`` or ``heldout``; the two never share an expression, see ``split_of``.
        exclude: problem texts that must not be drawn.

    Raises:
        ValueError: ``num_problems`` is negative, ``split`` is unknown, or ``exclude`` leaves fewer
            problems than asked for.
    """
    if num_problems < 0:
        raise ValueError(f"num_problems is {num_problems}; ask for zero or more problems.")
    if split not in ("train", "heldout"):
        raise ValueError(f"split is {split!r}; the task has the splits 'train' and 'heldout'.")
    rng = random.Random(seed)
    drawn: set[str] = set()
    problems: list[ArithmeticProblem] = []
    rejections = 0
    while len(problems) < num_problems:
        candidate = _draw(rng)
        text = candidate.problem
        if text in exclude or text in drawn or split_of(candidate.operands) != split:
            rejections += 1
            if rejections > _MAX_CONSECUTIVE_REJECTIONS:
                raise ValueError(
                    f"found {len(problems)} of {num_problems} {split} problems with seed {seed}, "
                    f"then {rejections} draws in a row were taken or excluded: the task has no "
                    f"more of them. Ask for fewer, or shorten exclude ({len(exclude)} texts)."
                )
            continue
        rejections = 0
        drawn.add(text)
        problems.append(candidate)
    return problems


def _draw(rng: random.Random) -> ArithmeticProblem:
    """Draw one problem of either split."""
    num_terms = rng.choice(_TERM_COUNTS)
    operands = [_draw_operand(rng)]
    total = operands[0]
    while len(operands) < num_terms:
        operand = _draw_operand(rng) * rng.choice((1, -1))
        if 0 <= total + operand <= MAX_PARTIAL_SUM:
            operands.append(operand)
            total += operand
    expression = "".join(f"{operand:+d}" for operand in operands).removeprefix("+")
    return ArithmeticProblem(
        problem=f"Compute {expression}", answer=str(total), operands=tuple(operands)
    )


def _draw_operand(rng: random.Random) -> int:
    """Draw a number of 1 to 3 digits, the number of digits first."""
    (num_digits,) = rng.choices(_DIGIT_COUNTS, _DIGIT_COUNT_WEIGHTS)
    return rng.randint(max(1, 10 ** (num_digits - 1)), 10**num_digits - 1)
