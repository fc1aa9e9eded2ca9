"""Samples and verifies every problem, a few at a time, going on where an earlier run stopped."""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tqdm import tqdm

from dynamo_megatron.evaluate.heldout import SAMPLING_STEP, equal_sizes
from dynamo_megatron.evaluate.samples import Sample, SampleFile, SamplesError, sample_of
from dynamo_megatron.protocols import Reward, RolloutEngine
from dynamo_megatron.types import Prompt

SAMPLES_NAME = "samples.jsonl"
SETTINGS_NAME = "settings.json"
_LINE_EVERY_S = 5.0

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What to sample.

    Attributes:
        prompts: the problems.
        samples: of each.
        temperature: of the sampled policy; None decodes greedily.
        seed: with prompt id and k it fixes each sample.
        batch: samples asked of the engine at a time, at least one problem's; they are written
            when they are done.
        labels: the data set's own names of problems, by prompt id.
    """

    prompts: tuple[Prompt, ...]
    samples: int
    temperature: float | None
    seed: int
    batch: int
    labels: Mapping[str, str] = field(default_factory=dict)


def evaluate(
    plan: Plan, engine: RolloutEngine, reward: Reward, out: Path, settings: Mapping[str, Any]
) -> list[Sample]:
    """Every sample of the plan; those that ``out`` holds already are not made again.

    Args:
        plan: what to sample.
        engine: with the weights to evaluate.
        reward: verifies.
        out: folder of the samples.
        settings: whatever decides what a sample is, but the problems and their number, which may
            grow; samples made with other settings are refused.

    Raises:
        SamplesError: ``out`` holds samples of other settings, or a file that is none of ours.
    """
    _require_settings(out, settings)
    with SampleFile(out / SAMPLES_NAME) as file:
        done = {(sample.id, sample.k): sample for sample in file.read()}
        wanted = [(prompt.id, k) for prompt in plan.prompts for k in range(plan.samples)]
        held = [key for key in wanted if key in done]
        if held:
            logger.info("%d of %d samples are there already", len(held), len(wanted))
        with _Progress(len(wanted), [done[key] for key in held]) as progress:
            for prompts in _portions(plan, done.keys()):
                fresh = _sample(plan, prompts, engine, reward, done.keys())
                file.append(fresh)
                done.update({(sample.id, sample.k): sample for sample in fresh})
                progress.add(fresh)
    return [done[key] for key in wanted]


def _portions(plan: Plan, done: Any) -> Iterator[list[Prompt]]:
    """The problems that miss a sample, as many at a time as make a batch."""
    missing = [
        prompt
        for prompt in plan.prompts
        if any((prompt.id, k) not in done for k in range(plan.samples))
    ]
    # Of like length together: the engine pads to the longest. Stable, so the order is repeatable.
    missing.sort(key=lambda prompt: len(prompt.token_ids))
    step = max(1, plan.batch // plan.samples)
    for start in range(0, len(missing), step):
        yield missing[start : start + step]


def _sample(
    plan: Plan, prompts: Sequence[Prompt], engine: RolloutEngine, reward: Reward, done: Any
) -> list[Sample]:
    """What these problems miss. An interrupted problem is sampled whole: its seeds are the same."""
    rollouts = engine.generate(
        prompts,
        equal_sizes(prompts, plan.samples),
        step=SAMPLING_STEP,
        temperature=plan.temperature,
        seed=plan.seed,
    )
    by_id = {prompt.id: prompt for prompt in prompts}
    fresh = [r for r in rollouts if (r.prompt_id, r.index) not in done]
    verdicts = reward.score([(by_id[r.prompt_id], r) for r in fresh])
    return [
        sample_of(by_id[r.prompt_id], r, verdict, label=plan.labels.get(r.prompt_id, ""))
        for r, verdict in zip(fresh, verdicts, strict=True)
    ]


def write_settings(out: Path, settings: Mapping[str, Any]) -> None:
    """Write into the folder what decided its samples."""
    text = json.dumps(settings, indent=2, sort_keys=True) + "\n"
    (out / SETTINGS_NAME).write_text(text, encoding="utf-8")


def _require_settings(out: Path, settings: Mapping[str, Any]) -> None:
    path = out / SETTINGS_NAME
    if not path.exists():
        if (out / SAMPLES_NAME).exists():
            raise SamplesError(
                f"{out} holds {SAMPLES_NAME} but no {SETTINGS_NAME}: what made them is not known. "
                "Choose another --out."
            )
        out.mkdir(parents=True, exist_ok=True)
        write_settings(out, settings)
        return
    now = json.loads(json.dumps(settings))
    try:
        before = json.loads(path.read_text(encoding="utf-8"))
        changed = [
            f"{name} was {before.get(name)!r}, is {now.get(name)!r}"
            for name in sorted({*before, *now})
            if before.get(name) != now.get(name)
        ]
    except (ValueError, AttributeError) as error:
        raise SamplesError(f"{path} cannot be read: {error}. Choose another --out.") from error
    if changed:
        raise SamplesError(
            f"{out} holds samples of another evaluation ({'; '.join(changed)}): mixed with them, "
            "the result would describe neither. Choose another --out, or the same settings."
        )


class _Progress:
    """A bar on a terminal, a line every few seconds elsewhere; the pass rate so far beside it."""

    def __init__(self, total: int, done: Sequence[Sample]) -> None:
        self._bar = tqdm(
            total=total, unit="sample", file=sys.stderr, dynamic_ncols=True, disable=None
        )
        self._total = total
        self._count = 0
        self._right = self._errors = 0
        self._last_line = time.monotonic()
        self.add(done)

    def __enter__(self) -> _Progress:
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()

    def add(self, samples: Sequence[Sample]) -> None:
        """Show that these are done."""
        outcomes = [sample.outcome() for sample in samples]
        self._count += len(samples)
        self._right += outcomes.count("right")
        self._errors += outcomes.count("error")
        verified = self._count - self._errors
        shown = {"right": f"{self._right / verified:.1%}" if verified else "-"}
        if self._errors:
            shown["errors"] = str(self._errors)
        self._bar.set_postfix(shown, refresh=False)
        self._bar.update(len(samples))
        now = time.monotonic()
        if self._bar.disable and samples and now - self._last_line >= _LINE_EVERY_S:
            self._last_line = now
            logger.info("%d of %d samples, %s right", self._count, self._total, shown["right"])
