"""Literal cases of the integer verifier."""

import time

import pytest

from dynamo_megatron.reward.integer_answer import (
    extract_integer_answer,
    parse_reference,
    verify_integer_answer,
)
from dynamo_megatron.reward.verification import Verification


@pytest.mark.parametrize(
    ("response", "integer"),
    [
        ("Answer: 403", "403"),
        ("385+47=432\n432-29=403\nAnswer: 403", "403"),
        ("Answer:403", "403"),
        ("Answer :  403  ", "403"),
        ("Answer: 403.", "403"),
        ("Answer: 403\n", "403"),
        ("Answer: 403\r\nbye", "403"),
        ("Answer:\n\n403\nbye", "403"),
        ("Final Answer: 7", "7"),
        ("the Answer: 7", "7"),
        # signs
        ("Answer: -5", "-5"),
        ("Answer: +5", "5"),
        ("Answer: \u22125", "-5"),
        ("Answer: -0", "0"),
        # zeros
        ("Answer: 0", "0"),
        ("Answer: 000", "0"),
        ("Answer: 007", "7"),
        ("Answer: -007", "-7"),
        # thousands
        ("Answer: 1,234", "1234"),
        ("Answer: 12,345,678.", "12345678"),
        ("Answer: -1,000", "-1000"),
        (r"Answer: $1{,}234$", "1234"),
        # decoration
        (r"Answer: \boxed{12}", "12"),
        (r"Answer: $\boxed{ -12 }$.", "-12"),
        (r"Answer: \(12\)", "12"),
        (r"Answer: \[ \boxed{1,234} \]", "1234"),
        ("Answer: $12$", "12"),
        ("**Answer:** 12", "12"),
        ("**Answer**: 12", "12"),
        ("Answer: **12**.", "12"),
        ("Answer: **12.**", "12"),
        ("Answer: `12`", "12"),
        # the last one counts
        ("Answer: 1\nno, wait\nAnswer: 2", "2"),
        ("Answer: 1 Answer: 2", "2"),
        ("Answer: 12 apples\nAnswer: 12", "12"),
        # without a marker the last box
        (r"so $\boxed{1}$, no, $\boxed{025}$.", "25"),
        (r"\boxed{1{,}234}", "1234"),
        (r"\boxed{1} Answer: 2", "2"),
        ("Answer: 5\nThe answer: a prime", "5"),
        ("\x00\ud800 Answer: 3", "3"),
        ("Answer: " + "9" * 5000, "9" * 5000),
    ],
)
def test_the_last_integer_answer_is_extracted(response, integer):
    assert extract_integer_answer(response) == integer


@pytest.mark.parametrize(
    "response",
    [
        "",
        "403",
        r"\boxed{403} Answer: x",
        r"\boxed{403} \boxed{4.5}",
        r"\boxed{403",
        r"\boxed{\text{403}}",
        "The result is 403.",
        "Answer 403",
        "Answer = 403",
        "answer: 403",
        "ANSWER: 403",
        "MyAnswer: 403",
        "Answer:",
        "Answer: ",
        "Answer: none",
        # not integers
        "Answer: 12.5",
        "Answer: 12.0",
        "Answer: .5",
        "Answer: 1/2",
        "Answer: 1e3",
        "Answer: 0x10",
        "Answer: 12%",
        r"Answer: \frac{1}{2}",
        r"Answer: \boxed{12.5}",
        r"Answer: \boxed{}",
        r"Answer: \boxed{12",
        r"Answer: \boxed{1}{2}",
        # not one integer
        "Answer: 12 or 13",
        "Answer: 12, 13",
        "Answer: 12 13",
        "Answer: 12-3",
        "Answer: 3+4",
        "Answer: 403 apples",
        "Answer: x = 403",
        "Answer: 12. It is even.",
        # broken separators and signs
        "Answer: 12,34",
        "Answer: 1,2345",
        "Answer: ,123",
        "Answer: 123,",
        "Answer: 1234,567",
        "Answer: 1_000",
        "Answer: --5",
        "Answer: - 5",
        "Answer: 5-",
        "Answer: 12..",
        # other digits than 0-9
        "Answer: \u0661\u0662",
        "Answer: \uff11",
        "Answer: \u00b2",
        # an earlier answer is not fallen back to
        "Answer: 12\nAnswer: 12.5",
        "Answer: 12\nAnswer:",
    ],
)
def test_anything_but_one_integer_is_no_answer(response):
    assert extract_integer_answer(response) is None


@pytest.mark.parametrize(
    ("response", "answer", "verification"),
    [
        ("Answer: 403", "403", Verification(1.0, True, "403")),
        ("Answer: 404", "403", Verification(0.0, True, "404")),
        ("403", "403", Verification(0.0, False, "")),
        ("Answer: 12.5", "12", Verification(0.0, False, "")),
        ("Answer: 33", "033", Verification(1.0, True, "33")),
        ("Answer: 1,234", "1234", Verification(1.0, True, "1234")),
        ("Answer: 1234", "1,234", Verification(1.0, True, "1234")),
        ("Answer: 5", "-5", Verification(0.0, True, "5")),
        ("Answer: -5", "$-5$", Verification(1.0, True, "-5")),
        ("Answer: 40", "403", Verification(0.0, True, "40")),
    ],
)
def test_the_reward_is_one_exactly_for_the_reference(response, answer, verification):
    assert verify_integer_answer(response, answer, "Compute 385+47-29") == verification


@pytest.mark.parametrize("answer", ["12.5", "", "x", r"\frac{1}{2}", "1 2", "None"])
def test_a_reference_that_is_no_integer_is_an_error_and_not_a_wrong_answer(answer):
    with pytest.raises(ValueError, match="is not an integer"):
        verify_integer_answer("Answer: 12", answer, "")
    with pytest.raises(ValueError, match="is not an integer"):
        parse_reference(answer)


@pytest.mark.parametrize(
    "hostile",
    [
        "Answer: " * 200_000,
        "Answer:" + " " * 1_000_000 + "x",
        "Answer: 1" + "* " * 500_000 + "x",
        "Answer: " + "1" * 1_000_000 + "x",
        "Answer: " + "1,111" * 200_000 + "x",
        "Answer" + " " * 1_000_000,
        r"Answer: \boxed{" * 100_000,
    ],
)
def test_extraction_is_linear_in_the_response(hostile):
    start = time.process_time()
    assert extract_integer_answer(hostile) is None
    assert time.process_time() - start < 1.0
