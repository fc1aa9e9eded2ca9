"""Sampled responses with their verdicts, for people to read."""

from __future__ import annotations

import json
import os
import random
import re
import unicodedata
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dynamo_megatron.observe.sinks import json_value
from dynamo_megatron.types import Rollout, RolloutGroup, Verdict

_PAGE_STEPS = 3
"""Steps on the readable page."""
_PAGE_CHARS = 3000
"""Characters of one response on the readable page; the JSON lines have all of it."""


class GenerationLog:
    """Keeps a few responses of every step under ``generations/`` of a run's folder.

    ``step_000012.jsonl`` holds a step's samples in full; ``generations.md`` shows those of the
    latest steps for reading.
    """

    def __init__(
        self, run_dir: str | Path, *, per_step: int, seed: int, success_threshold: float = 0.5
    ) -> None:
        """Write under ``run_dir``.

        Args:
            run_dir: the run's folder.
            per_step: samples kept of each step; 0 keeps none.
            seed: with the step it fixes which responses are kept.
            success_threshold: a reward at or above it is right.
        """
        self._folder = Path(run_dir) / "generations"
        self._per_step = per_step
        self._seed = seed
        self._threshold = success_threshold

    def write(self, step: int, groups: Sequence[RolloutGroup]) -> None:
        """Keep samples of one step; right, wrong and unverified ones in turn."""
        if self._per_step == 0:
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        records = sample_generations(
            step,
            groups,
            count=self._per_step,
            seed=self._seed,
            success_threshold=self._threshold,
        )
        lines = [json.dumps(record, ensure_ascii=False) + "\n" for record in records]
        _write_whole(self._folder / f"step_{step:06d}.jsonl", "".join(lines))
        _write_whole(self._folder / "generations.md", self._page(step))

    def _page(self, step: int) -> str:
        steps = sorted(
            number
            for path in self._folder.glob("step_*.jsonl")
            if (number := _step_of(path)) is not None and number <= step
        )
        parts = ["# Sampled responses\n\nWhat the policy writes, as it is.\n"]
        for number in reversed(steps[-_PAGE_STEPS:]):
            text = (self._folder / f"step_{number:06d}.jsonl").read_text(encoding="utf-8")
            parts.append(f"\n## Step {number}\n")
            parts += [_render(json.loads(line)) for line in text.split("\n") if line]
        return "".join(parts)


def sample_generations(
    step: int,
    groups: Sequence[RolloutGroup],
    *,
    count: int,
    seed: int,
    success_threshold: float = 0.5,
) -> list[dict[str, Any]]:
    """Records of ``count`` responses: right, wrong and unverified ones in turn, prompts mixed.

    The choice depends on ``(seed, step)`` and the responses alone.
    """
    # A string seeds the same generator in every process, unlike hash().
    generator = random.Random(f"{seed}/{step}")
    queues: dict[str, list[dict[str, Any]]] = {"right": [], "wrong": [], "unverified": []}
    for group in groups:
        valid = [verdict.reward for verdict in group.verdicts if verdict.valid]
        right = sum(reward >= success_threshold for reward in valid)
        facts = {
            "step": step,
            "group_size": len(group.rollouts),
            "pass_rate": right / len(valid) if valid else None,
        }
        for rollout, verdict in zip(group.rollouts, group.verdicts, strict=True):
            outcome = _outcome(verdict, success_threshold)
            queues[outcome].append(facts | _record(group, rollout, verdict, outcome))
    orderly = [_spread_over_prompts(queue, generator) for queue in queues.values()]
    return _in_turn(orderly, count)


def _outcome(verdict: Verdict, success_threshold: float) -> str:
    if not verdict.valid:
        return "unverified"
    return "right" if verdict.reward >= success_threshold else "wrong"


def _record(
    group: RolloutGroup, rollout: Rollout, verdict: Verdict, outcome: str
) -> dict[str, Any]:
    return {
        "prompt_id": group.prompt.id,
        "source": group.prompt.source,
        "index": rollout.index,
        "outcome": outcome,
        "reward": json_value(verdict.reward) if verdict.valid else None,
        "status": str(verdict.status),
        "formatted": verdict.formatted,
        "extracted": verdict.extracted,
        "answer": group.prompt.answer,
        "message": verdict.message,
        "finish_reason": str(rollout.finish_reason),
        "num_tokens": len(rollout.token_ids),
        "seed": rollout.seed,
        "weight_version": rollout.weight_version,
        "prompt": group.prompt.text,
        "response": rollout.text,
    }


def _spread_over_prompts(
    records: list[dict[str, Any]], generator: random.Random
) -> list[dict[str, Any]]:
    """Shuffled, a prompt's second response after every prompt's first."""
    shuffled = generator.sample(records, len(records))
    seen: Counter[str] = Counter()
    ranked = []
    for record in shuffled:
        ranked.append((seen[record["prompt_id"]], record))
        seen[record["prompt_id"]] += 1
    return [record for _, record in sorted(ranked, key=lambda pair: pair[0])]


def _in_turn(queues: Sequence[list[dict[str, Any]]], count: int) -> list[dict[str, Any]]:
    longest = max(len(queue) for queue in queues)
    rounds = (queue[i] for i in range(longest) for queue in queues if i < len(queue))
    return [record for record, _ in zip(rounds, range(count), strict=False)]


def _render(record: Mapping[str, Any]) -> str:
    rate = record["pass_rate"]
    facts = [
        f"group of {record['group_size']}",
        "pass rate unknown" if rate is None else f"pass rate {rate:.0%}",
        f"{record['num_tokens']} tokens ({record['finish_reason']})",
        f"source {_inline(record['source'])}",
    ]
    if record["status"] == "ok":
        verdict = f"reward {record['reward']}, extracted {_inline(record['extracted'])}"
    else:
        verdict = f"verification ended with {record['status']}: {_inline(record['message'])}"
    return (
        f"\n### {record['outcome'].upper()} · {' · '.join(facts)}\n\n"
        f"Verdict: {verdict}, expected {_inline(record['answer'])}\n\n"
        f"Prompt\n\n{_block(record['prompt'])}\n\nResponse\n\n{_block(record['response'])}\n"
    )


def _inline(text: str) -> str:
    flat = _visible(text).replace("\n", " ").strip()
    if not flat:
        return "nothing"
    fence = "`" * (_longest_run(flat) + 1)
    pad = " " if len(fence) > 1 else ""
    return f"{fence}{pad}{flat[:200]}{pad}{fence}"


def _block(text: str) -> str:
    """A code block that its content cannot leave."""
    shown = _visible(text)
    left_out = len(shown) - _PAGE_CHARS
    if left_out > 0:
        half = _PAGE_CHARS // 2
        shown = f"{shown[:half]}\n[... {left_out} characters left out ...]\n{shown[-half:]}"
    fence = "`" * max(3, _longest_run(shown) + 1)
    return f"{fence}text\n{shown}\n{fence}"


def _longest_run(text: str) -> int:
    return max((len(run) for run in re.findall("`+", text)), default=0)


def _visible(text: str) -> str:
    """Control and invisible characters spelt out: a response must not drive a terminal."""
    return "".join(_spelt(character) for character in text)


def _spelt(character: str) -> str:
    # Cc control, Cf direction marks and zero-width, Cs lone surrogates, Co private use,
    # Zl and Zp line breaks that editors and renderers treat differently.
    hidden = unicodedata.category(character) in ("Cc", "Cf", "Cs", "Co", "Zl", "Zp")
    if hidden and character not in "\n\t":
        return character.encode("unicode_escape").decode("ascii")
    return character


def _step_of(path: Path) -> int | None:
    match = re.fullmatch(r"step_(\d+)\.jsonl", path.name)
    return int(match[1]) if match else None


def _write_whole(path: Path, text: str) -> None:
    partial = path.with_name(f".{path.name}.partial")
    # A lone surrogate has no UTF-8; its backslash form is also how JSON spells it.
    with partial.open("w", encoding="utf-8", errors="backslashreplace", newline="\n") as file:
        file.write(text)
    os.replace(partial, path)
