"""Which wrong answers are one."""

from fractions import Fraction

import pytest

from dynamo_megatron.evaluate.answers import normal_form


@pytest.mark.parametrize(
    "spellings",
    [
        ["1/2", "0.5", ".50", r"\frac{1}{2}", r"\frac12", r"\frac 1 2", r"$\dfrac{1}{2}$", "+1/2"],
        ["-1/2", "-0.5", r"-\frac12", r"\frac{-1}{2}", r"\tfrac{1}{-2}", "\u22120.50", "2/-4"],
        ["10000", "10,000", "10{,}000", r"10\,000", r"10,\!000", "10 000", "10000.0", "010000."],
        ["1234567.5", "1,234,567.50", r"\$1,234,567.5"],
        [
            "5",
            "5.",
            " 5 ",
            "$5$",
            r"\(5\)",
            r"\text{5}",
            "**5**",
        ],
        ["0", "-0", "0.00", "0/7"],
        ["50%", r"50\%", r"50.0 \%", "$50$%"],
        ["(1,2)", "( 1, 2 )", r"\left(1,2\right)", r"$\left( 1,\, 2 \right)$"],
        ["Evelyn", r"\text{Evelyn}", r"\textbf{ Evelyn }.", r"\mathrm{Evelyn}"],
        [r"\frac{\pi}{2}", r"\dfrac{\pi}{2}", r"\frac { \pi } 2"],
        [r"1\frac12", r"1\frac{1}{2}"],
    ],
)
def test_spellings_of_one_answer_have_one_form(spellings):
    assert len({normal_form(text) for text in spellings}) == 1


def test_different_answers_stay_different():
    texts = [
        "50",
        "50%",
        "0.5",
        "1 2",
        "12",
        "1 1/2",
        "11/2",
        "1, 234",
        "1,234",
        "1,23",
        "1/0",
        "x",
    ]
    texts += [
        "-50",
        "0/0",
        "(1,2)",
        "[1,2]",
        r"\frac{1}{x}",
        "1e5",
        "100000",
        r"\leftarrow",
        "arrow",
    ]
    assert len({normal_form(text) for text in texts}) == len(texts)


def test_a_number_is_exact_however_long():
    digits = "1" * 900
    assert normal_form(f"0.{digits}").value == Fraction(int(digits), 10**900)
    assert normal_form(f"{digits}1") != normal_form(f"{digits}2")
    # Beyond what a verifier extracts it is text, not hours of arithmetic.
    assert normal_form("7 " * 100_000).value == "7" * 100_000
