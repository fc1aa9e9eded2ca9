"""Samples with little to say."""

from __future__ import annotations

from dynamo_megatron.evaluate.samples import Sample
from dynamo_megatron.types import FinishReason, VerdictStatus


def sample(outcome: str = "right", *, id: str = "p", k: int = 0, **values) -> Sample:
    """A right, wrong or unverified ("error") sample."""
    facts = {
        "id": id,
        "k": k,
        "source": "s",
        "problem": "Compute 1+1",
        "answer": "2",
        "response": "Answer: 2",
        "extracted": {"right": "2", "wrong": "3", "error": ""}[outcome],
        "formatted": outcome != "error",
        "reward": float(outcome == "right"),
        "status": VerdictStatus.TIMEOUT if outcome == "error" else VerdictStatus.OK,
        "message": "not verified within 1 s" if outcome == "error" else "",
        "finish_reason": FinishReason.STOP,
        "num_tokens": 4,
        "seed": 1,
    }
    return Sample(**{**facts, **values})


def problem(outcomes: str, *, id: str, source: str = "s") -> list[Sample]:
    """One problem's samples, a letter each: r, w, e."""
    names = {"r": "right", "w": "wrong", "e": "error"}
    text = f"Compute 1+1 ({id})"
    return [
        sample(names[c], id=id, k=k, source=source, problem=text) for k, c in enumerate(outcomes)
    ]
