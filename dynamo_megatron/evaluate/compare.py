"""Two evaluations of the same problems: is one model better than the other?

Problems differ in difficulty far more than models differ in skill. Compared problem by problem that
spread drops out; the intervals of two separate pass@1 may overlap where this one is clear of 0.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from dynamo_megatron.algo.passk import Interval, paired_difference
from dynamo_megatron.evaluate.run import SAMPLES_NAME, SETTINGS_NAME
from dynamo_megatron.evaluate.samples import RIGHT_FROM, Sample, SamplesError, read_samples
from dynamo_megatron.evaluate.summary import ALL, repeats, tallies

OF_THE_MODEL = ("model", "weights", "text_files", "engine", "dtype", "seed")
"""Settings that are expected to differ, or change no distribution."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """What one evaluation left.

    Attributes:
        samples: all of them.
        settings: how they were made.
    """

    samples: tuple[Sample, ...]
    settings: Mapping[str, Any]

    @property
    def right_from(self) -> float:
        """Reward from which a sample is right."""
        return float(self.settings.get("right_from", RIGHT_FROM))


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """One problem in both evaluations; success rates over its verified samples."""

    id: str
    source: str
    problem: str
    before: float
    after: float

    @property
    def gain(self) -> float:
        """How much better the second is."""
        return self.after - self.before


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """The second evaluation against the first, over the problems of one source, or of all.

    Attributes:
        source: its name.
        num_problems: problems with a verified sample in both.
        before: mean success rate of the first.
        after: of the second.
        gain: mean of the differences, with a 95 % interval over problems; without one, None, where
            every difference is the same: such problems tell nothing of the spread.
        better: problems at which the second does better.
        worse: problems at which it does worse.
    """

    source: str
    num_problems: int
    before: float
    after: float
    gain: Interval | None
    better: int
    worse: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Pairing:
    """The problems of two evaluations, matched.

    Attributes:
        pairs: verified in both, in the first one's order.
        only_first: problems that the second has not.
        only_second: problems that the first has not.
        unverified: in both, but with every verification failed in one.
    """

    pairs: tuple[Pair, ...]
    only_first: int
    only_second: int
    unverified: int


def read_evaluation(folder: Path) -> Evaluation:
    """What ``dynamo-megatron eval``, or a run's evaluation, left in a folder.

    Raises:
        SamplesError: it holds no evaluation, or one without samples.
    """
    path = folder / SETTINGS_NAME
    if not (folder / SAMPLES_NAME).is_file() or not path.is_file():
        raise SamplesError(
            f"{folder} is no evaluation: it needs {SAMPLES_NAME} and {SETTINGS_NAME}, as "
            "'dynamo-megatron eval --out' and a run's evaluations/step_N hold them."
        )
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(settings, dict):
            raise ValueError(f"it holds a {type(settings).__name__}")
        right_from = settings.get("right_from", RIGHT_FROM)
        if isinstance(right_from, bool) or not isinstance(right_from, int | float):
            raise ValueError(f"its right_from is {right_from!r}, not a number")
    except ValueError as error:
        raise SamplesError(f"{path} cannot be read: {error}.") from error
    samples = tuple(read_samples(folder / SAMPLES_NAME))
    if not samples:
        raise SamplesError(f"{folder / SAMPLES_NAME} holds no sample: the evaluation never began.")
    return Evaluation(samples=samples, settings=settings)


def differing_settings(first: Evaluation, second: Evaluation) -> list[str]:
    """Settings beside the model that differ: what they change is counted as the model's doing."""
    names = sorted({*first.settings, *second.settings} - {*OF_THE_MODEL, "right_from"})
    pairs = [(name, first.settings.get(name), second.settings.get(name)) for name in names]
    # The training's own record names more than the command's; what one does not say is its default.
    both = [
        (name, a, b)
        for name, a, b in pairs
        if a != b and (name in first.settings) == (name in second.settings)
    ]
    if first.right_from != second.right_from:
        both.append(("right_from", first.right_from, second.right_from))
    return [f"{name}: {a!r} and {b!r}" for name, a, b in both]


def match(first: Evaluation, second: Evaluation) -> Pairing:
    """Match the problems by id, which is made of their text and answer.

    Raises:
        SamplesError: they have no verified problem in common, or one id stands for two problems.
    """
    _require_same_problems(first, second)
    a = {t.id: t for t in tallies(first.samples, right_from=first.right_from)}
    b = {t.id: t for t in tallies(second.samples, right_from=second.right_from)}
    texts = {sample.id: sample.problem for sample in first.samples}
    common = [id for id in a if id in b]
    pairs = tuple(
        Pair(
            id=id,
            source=a[id].source,
            problem=texts[id],
            before=a[id].right / a[id].valid,
            after=b[id].right / b[id].valid,
        )
        for id in common
        if a[id].valid and b[id].valid
    )
    if not pairs:
        raise SamplesError(
            f"of {len(a)} and {len(b)} problems {len(common)} are the same, and none of them was "
            "verified in both: there is nothing to compare. Evaluate both models on the same data."
        )
    return Pairing(
        pairs=pairs,
        only_first=len(a) - len(common),
        only_second=len(b) - len(common),
        unverified=len(common) - len(pairs),
    )


def _require_same_problems(first: Evaluation, second: Evaluation) -> None:
    """Ids are made of text and answer: one that stands for two problems was not made by us."""
    problems: dict[str, tuple[str, str]] = {}
    for sample in (*first.samples, *second.samples):
        problem = (sample.problem, sample.answer)
        before = problems.setdefault(sample.id, problem)
        if before != problem:
            what, a, b = ("problem", before[0], problem[0])
            if a == b:
                what, a, b = ("answer", before[1], problem[1])
            raise SamplesError(
                f"the id {sample.id} stands for two problems: its {what} is {a[:80]!r} in one "
                f"sample and {b[:80]!r} in another. A samples.jsonl was edited, or joined from "
                "different data; evaluate again with the same data."
            )


def compare(pairs: Sequence[Pair]) -> list[Comparison]:
    """One comparison for each source, in order of first appearance; then all, if there are more.

    A problem that several sources hold is counted once over all of them, in the first.
    """
    names = list(dict.fromkeys(pair.source for pair in pairs))
    result = [_compare(name, [p for p in pairs if p.source == name]) for name in names]
    if len(names) == 1:
        return result
    repeated = repeats((pair.id, pair.source, pair.problem) for pair in pairs)
    return [*result, _compare(ALL, [pair for pair in pairs if pair.id not in repeated])]


def _compare(source: str, pairs: Sequence[Pair]) -> Comparison:
    before = torch.tensor([pair.before for pair in pairs], dtype=torch.float64)
    after = torch.tensor([pair.after for pair in pairs], dtype=torch.float64)
    alike = bool(torch.equal(after - before, (after - before)[:1].expand_as(after)))
    return Comparison(
        source=source,
        num_problems=len(pairs),
        before=before.mean().item(),
        after=after.mean().item(),
        gain=None if alike else paired_difference(after, before),
        better=int((after > before).sum()),
        worse=int((after < before).sum()),
    )


def most_changed(pairs: Sequence[Pair], count: int) -> list[Pair]:
    """The problems whose success rates differ most, either way; those alike are none."""
    changed = [pair for pair in pairs if pair.gain]
    return sorted(changed, key=lambda pair: (-abs(pair.gain), pair.id))[:count]
