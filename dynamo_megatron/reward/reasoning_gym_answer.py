"""Verifier for reasoning-gym's generated tasks.

The reference answer is the task's whole entry as JSON, because each task scores in its own way.
Only a full score of 1.0 is a reward: the default scorer pays in part for an answer that merely
contains the right one. Scored is the extracted answer, never the whole response.
"""

from __future__ import annotations

import json
import re
from functools import lru_cache
from typing import Any

from dynamo_megatron.reward.extraction import extract_answer
from dynamo_megatron.reward.verification import Verification

# Here and not on first use: a worker's start has a long time limit, a verification a short one.
try:
    import reasoning_gym
except ImportError as error:
    raise ImportError(
        "the reasoning_gym verifier needs reasoning-gym, which is not installed: "
        "pip install 'dynamo-megatron[reasoning-gym]'"
    ) from error

FULL_SCORE = 1.0

_TAGGED = re.compile(r"<answer>((?:[^<]|<(?!/?answer>))*+)</answer>")


def verify_reasoning_gym(response: str, answer: str, prompt: str) -> Verification:
    """Reward 1.0 where the task gives the response's answer its full score, else 0.0.

    The answer is what the last ``<answer>`` tags hold, else what ``extraction`` finds.

    Args:
        response: decoded response.
        answer: the entry as JSON: question, answer, metadata with the name of the task.
        prompt: not used.

    Raises:
        ValueError: the reference is no entry.
    """
    entry = read_entry(answer)
    tagged = _TAGGED.findall(response)
    if tagged:
        text, formatted = tagged[-1].strip(), True
    else:
        found = extract_answer(response)
        if found is None:
            return Verification(reward=0.0)
        text, formatted = found
    score = _scorer(entry["metadata"]["source_dataset"])(text, entry)
    return Verification(reward=float(score >= FULL_SCORE), formatted=formatted, extracted=text)


def read_entry(answer: str) -> dict[str, Any]:
    """The entry that a reference answer holds.

    Raises:
        ValueError: it is none.
    """
    try:
        entry = json.loads(answer)
        if isinstance(entry["metadata"]["source_dataset"], str):
            return entry
    except (ValueError, KeyError, TypeError):
        pass
    raise ValueError(
        f"the reference {answer[:80]!r} is no reasoning-gym entry (JSON with "
        "metadata.source_dataset). Take problems that reasoning_gym generates, or choose another "
        "verifier."
    )


@lru_cache(maxsize=128)
def _scorer(task: str) -> Any:
    return reasoning_gym.get_score_answer_fn(task)
