"""All problems of a run's data sources."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from dynamo_megatron.config import ArithmeticSource, FileSource, ReasoningGymSource, Source
from dynamo_megatron.data.arithmetic import arithmetic_problems
from dynamo_megatron.data.files import read_problem_file
from dynamo_megatron.data.problems import DataError, Problem
from dynamo_megatron.data.reasoning import reasoning_problems

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedProblems:
    """What the sources hold.

    Attributes:
        problems: all problems, source by source, each content once.
        counts: problems kept, by source name.
        duplicates: records left out because the same source holds the same text and answer already.
        contradictions: texts that a source holds with more than one answer (all are kept).
    """

    problems: tuple[Problem, ...]
    counts: Mapping[str, int]
    duplicates: int
    contradictions: int


def load_problems(sources: Sequence[Source]) -> LoadedProblems:
    """Read and generate the problems of all sources.

    A problem that occurs twice in a source is kept once: published files repeat problems (every
    problem of DAPO-Math-17k comes about a hundred times), and an allocator that keeps a history per
    problem would see one as many. The same problem in two sources is two problems, so that metrics
    per source stay complete.

    Args:
        sources: in order. Sources given the same name are read as one. Where a source has no name,
            the ``data_source`` of a record is taken, then the file's stem.

    Raises:
        DataError: a file cannot be used, or two files fall back on the same name.
    """
    names = _source_names(sources)
    problems: dict[str, Problem] = {}
    total = 0
    for source, name in zip(sources, names, strict=True):
        for problem in _read(source, name):
            total += 1
            problems.setdefault(problem.id, problem)
    answers = Counter((problem.source, problem.text) for problem in problems.values())
    contradictions = sum(count > 1 for count in answers.values())
    if contradictions:
        example = next(text for (_, text), count in answers.items() if count > 1)
        _LOG.warning(
            "%d problem(s) come with more than one reference answer, such as %r: a response can "
            "only be right for one of them",
            contradictions,
            example[:80],
        )
    counts = Counter(problem.source for problem in problems.values())
    return LoadedProblems(
        problems=tuple(problems.values()),
        counts=dict(counts),
        duplicates=total - len(problems),
        contradictions=contradictions,
    )


def _source_names(sources: Sequence[Source]) -> list[str]:
    names = [source.name or Path(_path(source)).stem for source in sources]
    for i, source in enumerate(sources):
        if source.name is None and names.count(names[i]) > 1:
            raise DataError(
                f"the source {_path(source)} has no name, and its default {names[i]!r} (the "
                "file's stem) is another source's too: their metrics and problems could not be "
                "told apart. Give it a name, or both the same name on purpose."
            )
    return names


def _path(source: Source) -> str:
    if isinstance(source, ReasoningGymSource):
        return source.task
    return source.path if isinstance(source, FileSource) else source.kind


def _read(source: Source, name: str) -> Iterator[Problem]:
    if isinstance(source, ArithmeticSource):
        for generated in arithmetic_problems(
            source.num_problems, seed=source.seed, split=source.split
        ):
            yield Problem(text=generated.problem, answer=generated.answer, source=name)
        return
    if isinstance(source, ReasoningGymSource):
        for made in reasoning_problems(source.task, source.num_problems, seed=source.seed):
            yield Problem(text=made.question, answer=made.entry, source=name)
        return
    for record in read_problem_file(
        Path(source.path).expanduser(),
        kind=source.kind,
        problem_key=source.problem_key,
        answer_key=source.answer_key,
        limit=source.limit,
    ):
        yield Problem(
            text=record.problem,
            answer=record.answer,
            source=name if source.name else record.source or name,
            system=record.system,
            label=record.label,
        )
