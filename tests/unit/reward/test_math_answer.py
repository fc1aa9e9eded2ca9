"""Mathematical answers: what is equal, and what only looks like it."""

import subprocess
import sys

import pytest

from dynamo_megatron.reward.math_answer import answers_agree, check_reference, verify_math
from dynamo_megatron.reward.pool import MATH, RewardPool
from dynamo_megatron.reward.verification import Verification
from dynamo_megatron.types import VerdictStatus

from .test_pool import item


@pytest.mark.parametrize(
    ("found", "reference"),
    [
        ("142.0", "142"),
        ("025", "25"),
        ("25", "025"),
        ("1,234", "1234"),
        ("1{,}234", "1234"),
        ("-4", "\u22124"),
        ("0.5", r"\frac{1}{2}"),
        (r"\dfrac12", r"\frac{1}{2}"),
        ("1/2", r"\frac{1}{2}"),
        (r"\sqrt{9} \cdot \sqrt{13}", r"3\sqrt{13}"),
        (r"\frac{\sqrt{2}}{2}", r"\frac{1}{\sqrt{2}}"),
        ("-q + p", "p - q"),
        ("(x+1)^2", "x^2 + 2x + 1"),
        ("9i + 6", "6+9i"),
        ("-2, 1", "1,-2"),
        (r"(3, \pi/2)", r"\left( 3, \frac{\pi}{2} \right)"),
        ("5", "x=5"),
        ("90", r"90^\circ"),
        ("Evelyn", r"\text{Evelyn}"),
        (r"\text{(C)}", r"\text{(C)}"),
        ("EVEN", r"\text{even}"),
        ("52_{8}", "52_8"),
        ("18 dollars", "18"),
        (r"18\text{ dollars}", "18"),
        ("3.5 km", "3.5"),
        ("17 + 1 = 18", "18"),  # the last side of an equation is its result
        (r"\$32,348", r"\$32,\!348"),
        ("106\u00b0", r"106^\circ"),
        (r"106^\circ", "106\u00b0"),
        (r"106\degree", "106"),
        ("15 cm^2", r"15\mbox{ cm}^2"),
        ("15 cm\u00b2", r"15\mbox{ cm}^2"),
        ("15", r"15\mbox{ cm}^2"),
        ("864 in^2", r"864 \mbox{ inches}^2"),
        ("15 square centimeters", "15"),
        ("3m^{2}", "3m^2"),  # here it is a variable
        ("2m^2+m^2", "3m^2"),
        ("(E)", r"\text{(E)}"),
        ("E", r"\text{(E)}"),
        (r"\textbf{(E)}", r"\text{E}"),
        (r"\text{E}", "(E)"),
        (r"10\%", "10"),
        (r"10\%", "0.1"),
        ("0.1", r"10\%"),
        (r"5\text{ m}", r"5\text{ cm}"),  # units are not compared
        (r"18\text{ million}", r"18 \text{ million}"),
        (r"[2, \infty)", r"[2,\infty)"),
        (r"\begin{pmatrix} 1 \\ 2/4 \end{pmatrix}", r"\begin{pmatrix} 1 \\ 1/2 \end{pmatrix}"),
    ],
)
def test_equal_answers_agree_however_they_are_written(found, reference):
    assert answers_agree(found, reference)


@pytest.mark.parametrize(
    ("found", "reference"),
    [
        ("142.1", "142"),
        ("142.0000001", "142"),
        ("12 or 13", "12"),
        ("18 million", "18"),
        (r"18\text{ million}", "18"),
        ("18", r"18\text{ thousand}"),
        (r"1.5\text{ dozen}", "1.5"),
        ("225", r"15\mbox{ cm}^2"),
        ("5 m^2", "5m"),
        ("F", r"\text{(E)}"),
        ("e", r"\text{(E)}"),
        ("EE", r"\text{(E)}"),
        ("E or F", r"\text{(E)}"),
        (r"11\%", "10"),
        ("0.01", r"10\%"),
        ("18 dollars or 19", "18"),
        (r"17 \le x \le 19", "18"),
        (r"\{17, 18\}", "18"),
        (r"\pm 18", "18"),
        (r"\frac{1799999999999}{100000000000}", "18"),
        ("12, 13", "12"),
        ("-12", "12"),
        ("0.3333333", "0.33333333"),
        (r"\frac{2}{1}", r"\frac{1}{2}"),
        ("p - q - 1", "p - q"),
        (r"(\pi/2, 3)", r"\left( 3, \frac{\pi}{2} \right)"),
        ("1", "1,-2"),
        ("nyleve", r"\text{Evelyn}"),
        ("Silent", "Listen"),  # as products of letters they would be equal
        ("not even", r"\text{even}"),
        ("52_9", "52_8"),
        ("52", "52_8"),
        ("17 = 18", "18"),
        (r"(2, \infty)", r"[2,\infty)"),
        (r"\text{anything}", "5"),
        ("x", "5"),
        ("", "5"),
    ],
)
def test_different_answers_do_not_agree(found, reference):
    assert not answers_agree(found, reference)


def test_the_verification_says_what_was_extracted_and_whether_it_stood_in_the_format():
    assert verify_math(r"\boxed{0.5}", r"\frac12", "") == Verification(1.0, True, "0.5")
    assert verify_math("Answer: 3", "4", "") == Verification(0.0, True, "3")
    assert verify_math("we get 4.", "4", "") == Verification(1.0, False, "4")
    assert verify_math("no idea", "4", "") == Verification(0.0, False, "")


@pytest.mark.parametrize(
    ("response", "reward"),
    [
        ("The answer is 12 marbles.", 1.0),
        ("#### 12 red marbles", 1.0),
        (r"\boxed{12 marble}", 1.0),
        ("The answer is 13 marbles.", 0.0),
        ("The answer is 12 bananas.", 0.0),  # the problem knows of none
        ("The answer is 12 thousand marbles.", 0.0),
        ("The answer is 12 and half.", 0.0),
        ("The answer is 12 or marbles", 0.0),
    ],
)
def test_what_the_problem_counts_is_a_unit(response, reward):
    problem = "He has a thousand and a half. How many red marbles or blue marbles are left?"
    assert verify_math(response, "12", problem).reward == reward


@pytest.mark.parametrize(
    ("reference", "readable"),
    [("142", 1.0), (r"\frac{1}{2}", 1.0), (r"\text{even}", 1.0), (r"\frac{1}{", 0.0), ("}{", 0.0)],
)
def test_a_reference_is_readable_or_is_compared_as_text_alone(reference, readable):
    assert check_reference("", reference, "").reward == readable
    assert answers_agree(reference, reference)


def test_the_pool_names_the_references_that_are_compared_as_text(caplog):
    prompts = [item("", answer)[0] for answer in ("142", r"\frac{1}{2}", r"\frac{1}{")]
    with RewardPool(MATH, workers=1, timeout_s=30) as pool:
        assert pool.check(prompts) == (prompts[2],)
    assert "1 of 3 reference answers cannot be read as mathematics" in caplog.text
    assert "test/p" in caplog.text


def test_without_math_verify_the_error_says_what_to_install():
    code = (
        "import sys; sys.modules['math_verify'] = None; import dynamo_megatron.reward.math_answer"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "pip install 'dynamo-megatron[math]'" in done.stderr


def test_a_comparison_without_end_is_a_time_out_and_not_a_wrong_answer():
    tower = r"\boxed{9^{9^{9^{9^{9}}}} - \sqrt{2}}"
    items = [item(r"\boxed{\frac{2}{4}}", r"\frac{1}{2}"), item(tower, r"\sqrt{3}")]
    items.append(item("Answer: 7/14", r"\frac{1}{2}"))
    with RewardPool(MATH, workers=1, timeout_s=5) as pool:
        verdicts = pool.score(items)
    assert [v.reward for v in verdicts] == [1.0, 0.0, 1.0]
    assert verdicts[1].status in (VerdictStatus.TIMEOUT, VerdictStatus.CRASH)
