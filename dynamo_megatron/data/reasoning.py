"""Problems that reasoning-gym generates: a hundred procedural, verifiable tasks."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, NamedTuple

from dynamo_megatron.data.problems import DataError


class ReasoningProblem(NamedTuple):
    """A question, and its entry as JSON: the reference of the ``reasoning_gym`` verifier."""

    question: str
    entry: str


def reasoning_problems(task: str, num_problems: int, *, seed: int) -> Iterator[ReasoningProblem]:
    """Generate problems of one task, the same for the same arguments.

    Args:
        task: reasoning-gym's name of it, such as ``chain_sum``.
        num_problems: how many.
        seed: of the generation.

    Raises:
        DataError: reasoning-gym is missing, there is no such task, or a problem's own answer does
            not get the full score (some tasks have no reference answer).
    """
    try:
        import reasoning_gym
    except ImportError as error:
        raise DataError(
            f"the source of the task {task} needs reasoning-gym, which is not installed: "
            "pip install 'dynamo-megatron[reasoning-gym]'."
        ) from error
    try:
        entries = reasoning_gym.create_dataset(task, seed=seed, size=num_problems)
        score: Any = reasoning_gym.get_score_answer_fn(task)
    except (ValueError, AssertionError) as error:
        raise DataError(
            f"reasoning-gym cannot make the task {task!r}: {error}. Choose another task."
        ) from error
    for number, entry in enumerate(entries):
        text = json.dumps(entry, ensure_ascii=False)
        answer = entry["answer"]
        # As the verifier will see it: some entries do not survive JSON, some have no answer.
        if not isinstance(answer, str) or score(answer, json.loads(text)) < 1.0:
            raise DataError(
                f"the own answer of problem {number} of reasoning-gym's {task} ({answer!r:.80}) "
                "does not get the full score, so no response could be right. Choose another task."
            )
        yield ReasoningProblem(entry["question"], text)
