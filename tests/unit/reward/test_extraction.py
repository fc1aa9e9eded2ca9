"""The final answer of a solution in free form."""

import time

import pytest

from dynamo_megatron.reward.extraction import MAX_ANSWER_CHARS, extract_answer


@pytest.mark.parametrize(
    ("response", "text", "formatted"),
    [
        (r"so $\boxed{\frac{1}{2}}$.", r"\frac{1}{2}", True),
        (r"\boxed{1} no, \boxed{ 2 }", "2", True),
        (r"\boxed{\left\{ 1, 2 \right\}}", r"\left\{ 1, 2 \right\}", True),
        (r"\boxed 5 of them", "5", True),
        (r"Answer: \boxed{7}.", "7", True),
        (r"\boxed{7} and Answer: 8", "7", True),
        ("Answer: 1\nno, wait\n**Answer:** $x + 1$.", "x + 1", True),
        ("Answer:\n\n  **12.** \nGood luck.", "12", True),
        ("Answer: \\(12\\)", "12", True),
        ("Answer: $\\$5.00$", "\\$5.00", True),
        ("The answer is 12. I hope it is correct.", "12", False),
        ("The final answer is: $\\frac{1}{2}$, since 2 is even.", r"\frac{1}{2}", False),
        ("the answer is 3.5.", "3.5", False),
        ("2+2=4\n#### 1,234", "1,234", False),
        ("First 3, then $x = 4$, all of 5 apples.", "5", False),
        ("First 3 and so $x = 4$.", "x = 4", False),
        ("It costs $\\$32,\\!348$.", "\\$32,\\!348", False),
        ("It costs $1,234.50 today", "1,234.50", False),
        ("we get -7/2!", "-7/2", False),
        ("a total of .5", ".5", False),
        ("about 40% of it", "40%", False),
        ("\\[ x^2 \\] hence \\[ y \\]", "y", False),
    ],
)
def test_the_last_answer_is_found(response, text, formatted):
    assert extract_answer(response) == (text, formatted)


@pytest.mark.parametrize(
    "response",
    [
        "",
        "no idea",
        "3a x4 v1.2b",
        r"the number 5, so \boxed{",  # a cut response has no answer, whatever stood before
        r"\boxed{1} \boxed{2",
        r"\boxed{}",
        "Answer: 5\nAnswer:",
        "12 apples. Answer: " + "9" * (MAX_ANSWER_CHARS + 1),
    ],
)
def test_without_a_final_answer_there_is_none(response):
    assert extract_answer(response) is None


@pytest.mark.parametrize(
    "hostile",
    [
        r"\boxed{" * 200_000,
        r"\boxed{" + "{" * 1_000_000,
        "Answer: " * 200_000,
        "Answer: " + "** " * 500_000,
        "the answer is " * 100_000,
        "\\[" * 300_000,
        "\\(" * 300_000,
        "$" * 1_000_000,
        "$$ x " * 200_000,
        "$x " * 300_001,
        "1,111" * 200_000,
        "1" * 1_000_000 + "x",
        "-" * 1_000_000,
        "\n####" * 200_000,
    ],
)
def test_extraction_is_linear_in_the_response(hostile):
    start = time.process_time()
    extract_answer(hostile)
    assert time.process_time() - start < 2.0
