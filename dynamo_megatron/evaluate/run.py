"""Samples and verifies every problem, a few at a time, going on where an earlier run stopped."""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tqdm import tqdm

from dynamo_megatron.evaluate.heldout import SAMPLING_STEP, equal_sizes
from dynamo_megatron.evaluate.samples import (
    RIGHT_FROM,
    Sample,
    SampleFile,
    SamplesError,
    sample_of,
)
from dynamo_megatron.protocols import Reward, RolloutEngine
from dynamo_megatron.types import Prompt

SAMPLES_NAME = "samples.jsonl"
SETTINGS_NAME = "settings.json"
_MEANINGS = {
    "weights": "of the model folder",
    "text_files": "tokenizer, chat template and configuration of the model folder",
    "verifier_source": "the file that defines the verifier",
}
_OF_THE_COUNT = ("right_from",)
"""Settings that decide how samples are counted and not what they are."""
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
        right_from: reward from which a sample is right, for the rate shown meanwhile.
    """

    prompts: tuple[Prompt, ...]
    samples: int
    temperature: float | None
    seed: int
    batch: int
    labels: Mapping[str, str] = field(default_factory=dict)
    right_from: float = RIGHT_FROM


@contextmanager
def open_samples(out: Path, settings: Mapping[str, Any]) -> Iterator[SampleFile]:
    """Have the samples of a folder for this process alone.

    Args:
        out: folder of the samples.
        settings: whatever decides what a sample is, but the problems and their number, which may
            grow; samples made with other settings are refused. The reward from which a sample is
            right (``right_from``) may change: it decides how samples are counted.

    Raises:
        SamplesError: ``out`` holds samples of other settings, or a file that is none of ours, or
            another evaluation is writing there. Nothing is changed.
    """
    _require_settings(out, settings)
    with SampleFile(out / SAMPLES_NAME) as file:
        # Again: another may have written, and ended, in between.
        _require_settings(out, settings)
        yield file


def evaluate(
    plan: Plan,
    engine: RolloutEngine,
    reward: Reward,
    file: SampleFile,
    settings: Mapping[str, Any],
) -> list[Sample]:
    """Every sample of the plan; those that the file holds already are not made again.

    Args:
        plan: what to sample.
        engine: with the weights to evaluate.
        reward: verifies.
        file: as ``open_samples`` gives it.
        settings: what it was opened with; written beside it.

    Raises:
        SamplesError: a line of the file is no sample.
    """
    done = {(sample.id, sample.k): sample for sample in file.read()}
    write_settings(file.path.parent, settings)
    wanted = [(prompt.id, k) for prompt in plan.prompts for k in range(plan.samples)]
    held = [key for key in wanted if key in done]
    if held:
        logger.info("%d of %d samples are there already", len(held), len(wanted))
    with _Progress(len(wanted), [done[key] for key in held], plan.right_from) as progress:
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
    """Refuse a folder whose samples were made with other settings, or nobody knows how."""
    path, samples = out / SETTINGS_NAME, out / SAMPLES_NAME
    if not samples.exists() or not samples.stat().st_size:
        return
    if not path.exists():
        raise SamplesError(
            f"{out} holds {SAMPLES_NAME} but no {SETTINGS_NAME}: what made them is not known. "
            "Choose another --out."
        )
    now = json.loads(json.dumps(settings))
    try:
        before = json.loads(path.read_text(encoding="utf-8"))
        changed = [
            f"{_named(name)} was {before.get(name)!r}, is {now.get(name)!r}"
            for name in sorted({*before, *now} - {*_OF_THE_COUNT})
            if before.get(name) != now.get(name)
        ]
    except (ValueError, AttributeError) as error:
        raise SamplesError(f"{path} cannot be read: {error}. Choose another --out.") from error
    if changed:
        raise SamplesError(
            f"{out} holds samples of another evaluation ({'; '.join(changed)}): mixed with them, "
            "the result would describe neither. Choose another --out, or the same settings."
        )


def _named(setting: str) -> str:
    return f"{setting} ({_MEANINGS[setting]})" if setting in _MEANINGS else setting


class _Progress:
    """A bar on a terminal, a line every few seconds elsewhere; the pass rate so far beside it."""

    def __init__(self, total: int, done: Sequence[Sample], right_from: float) -> None:
        self._bar = tqdm(
            total=total, unit="sample", file=sys.stderr, dynamic_ncols=True, disable=None
        )
        self._total = total
        self._right_from = right_from
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
        outcomes = [sample.outcome(self._right_from) for sample in samples]
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
