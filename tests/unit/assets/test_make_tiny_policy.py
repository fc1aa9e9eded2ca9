"""The script that makes the tiny policy: its tokenizer is shipped, its slips are lost carries."""

import json
import random

import pytest

from dynamo_megatron.assets import TINY_POLICY
from dynamo_megatron.data.arithmetic import arithmetic_problems
from tools.make_tiny_policy import (
    MAX_NEW_TOKENS,
    answer_of,
    build_config,
    build_tokenizer,
    careless_sum,
    worked_solution,
)


def test_the_script_builds_the_shipped_tokenizer_and_shape(tmp_path):
    tokenizer = build_tokenizer()
    tokenizer.save_pretrained(tmp_path)
    for name in ("tokenizer.json", "chat_template.jinja"):
        assert (tmp_path / name).read_text() == (TINY_POLICY / name).read_text()
    shipped = json.loads((TINY_POLICY / "config.json").read_text())
    built = json.loads(build_config(tokenizer).to_json_string(use_diff=False))
    for key in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "head_dim"):
        assert built[key] == shipped[key]


@pytest.mark.parametrize(
    ("total", "operand", "without_any_carry"),
    [
        (385, 47, 322),  # 5+7=12 -> 2, 8+4=12 -> 2, 3
        (432, -29, 413),  # 2-9 -> 3, 3-2 = 1, 4
        (99, 1, 90),
        (100, -1, 109),
        (120, 35, 155),
        (50, -50, 0),
        (7, 0, 7),
    ],
)
def test_a_calculator_that_always_slips_drops_every_carry(total, operand, without_any_carry):
    assert careless_sum(total, operand, random.Random(0), 1.0) == without_any_carry


def test_a_calculator_that_never_slips_is_right():
    rng = random.Random(0)
    for total in range(0, 1000, 7):
        for operand in range(-total, 1000 - total, 11):
            assert careless_sum(total, operand, rng, 0.0) == total + operand


def test_worked_solutions_are_written_line_by_line():
    rng = random.Random(0)
    assert worked_solution((385, 47, -29), rng, 0.0) == "385+47=432\n432-29=403\nAnswer: 403"
    assert worked_solution((385, 47, -29), rng, 1.0) == "385+47=322\n322-29=303\nAnswer: 303"


def test_a_slip_that_would_leave_the_range_is_not_made():
    # 95+7 without its carry is 92, from which 93 cannot be taken.
    solution = worked_solution((95, 7, -93), random.Random(0), 1.0)
    assert solution.startswith("95+7=102\n102-93=")
    assert worked_solution((95, 7, -90), random.Random(0), 1.0).startswith("95+7=92\n")


def test_every_solution_fits_the_response_limit():
    tokenizer, rng = build_tokenizer(), random.Random(0)
    for problem in arithmetic_problems(2000, seed=8, split="train"):
        solution = worked_solution(problem.operands, rng, 0.5)
        assert len(tokenizer.encode(solution)) + 1 <= MAX_NEW_TOKENS


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("3+4=7\nAnswer: 7", "7"),
        ("Answer: 403", "403"),
        ("3+4=7", None),
        ("Answer: 7\n", None),
        ("Answer: ", None),
        ("Answer: 7 ", None),
        ("the Answer: 7", None),
        ("7", None),
    ],
)
def test_only_a_last_line_with_an_integer_is_the_right_format(text, answer):
    assert answer_of(text) == answer
