"""The reference answers of AIME, AMC, MATH500 and GSM8K, in the worker processes of a run.

The files are not part of the project: the tests run where they lie beside it.
"""

import time
from itertools import count
from pathlib import Path

import pytest

from dynamo_megatron.data.files import Record, read_problem_file
from dynamo_megatron.reward.pool import INTEGER_ANSWER, MATH, RewardPool
from dynamo_megatron.types import FinishReason, Prompt, Rollout, VerdictStatus

from .near_misses import INTEGER_PHRASINGS, LATEX_PHRASINGS, near_misses

FOLDER = Path(__file__).parents[4] / "shared" / "data"
SETS = ("aime", "amc", "math", "gsm8k")
SAMPLE_EVERY = 19  # about a hundred answers
pytestmark = pytest.mark.skipif(
    not FOLDER.is_dir(), reason=f"the published problem sets are not in {FOLDER}"
)
_IDS = count()


def records(*names: str) -> list[tuple[str, Record]]:
    return [
        (f"{name}[{place}] {record.label}".strip(), record)
        for name in names
        for place, record in enumerate(read_problem_file(FOLDER / f"{name}.json", kind="json"))
    ]


def item(answer: str, response: str) -> tuple[Prompt, Rollout]:
    prompt = Prompt(id=f"p{next(_IDS)}", text="", token_ids=(1,), answer=answer, source="s")
    rollout = Rollout(
        prompt_id=prompt.id,
        index=0,
        token_ids=(2,),
        logprobs=(-1.0,),
        finish_reason=FinishReason.STOP,
        weight_version=0,
        seed=0,
        text=response,
    )
    return prompt, rollout


def check(chosen, phrasings, verifier) -> None:
    """Every phrasing of each answer is right, and its near misses, phrased in turn, are wrong."""
    names, items, wanted = [], [], []
    for place, (name, record) in enumerate(chosen):
        misses = near_misses(record.answer)
        assert len(misses) >= 5 and record.answer not in misses, name
        texts = [(phrase % record.answer, 1.0) for phrase in phrasings]
        texts += [(phrasings[(place + k) % 2] % miss, 0.0) for k, miss in enumerate(misses)]
        for text, reward in texts:
            names.append(name)
            items.append(item(record.answer, text))
            wanted.append(reward)
    with RewardPool(verifier, workers=2, timeout_s=30) as pool:
        verdicts = pool.score(items)
    wrong = [
        (name, prompt.answer, rollout.text, verdict)
        for name, (prompt, rollout), verdict, reward in zip(
            names, items, verdicts, wanted, strict=True
        )
        if verdict.status is not VerdictStatus.OK or verdict.reward != reward
    ]
    assert wrong == []


def test_a_sample_of_the_published_answers_verifies_and_its_near_misses_do_not():
    start = time.monotonic()
    check(records(*SETS)[::SAMPLE_EVERY], LATEX_PHRASINGS, MATH)
    assert time.monotonic() - start < 60


@pytest.mark.slow
@pytest.mark.parametrize("name", SETS)
def test_every_published_answer_verifies_and_its_near_misses_do_not(name):
    check(records(name), LATEX_PHRASINGS, MATH)


@pytest.mark.parametrize("name", ["aime", "amc"])
def test_every_integer_answer_verifies_exactly_and_its_near_misses_do_not(name):
    check(records(name), INTEGER_PHRASINGS, INTEGER_ANSWER)


def test_the_answers_that_math_verify_cannot_read_are_these():
    chosen = records(*SETS)
    prompts = [item(record.answer, "")[0] for _, record in chosen]
    with RewardPool(MATH, workers=2, timeout_s=30) as pool:
        unreadable = {prompt.id for prompt in pool.check(prompts)}
    listed = [
        name for (name, _), prompt in zip(chosen, prompts, strict=True) if prompt.id in unreadable
    ]
    assert listed == []
