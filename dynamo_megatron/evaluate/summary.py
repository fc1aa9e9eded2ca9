"""What samples say of a model: pass@1, pass@k, maj@k, lengths, truncation, failures.

A failed verification is no wrong answer: it is left out of every rate and counted. Intervals are
over problems, the sample of all problems of their kind that the data is. A problem that several
sources hold is one problem: the row over all of them counts it once, in the first that has it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from dynamo_megatron.algo.passk import Interval, pass_at_k, wilson_interval
from dynamo_megatron.evaluate.answers import NormalForm, normal_form
from dynamo_megatron.evaluate.samples import RIGHT_FROM, Sample

ALL = "all"
"""Name of the row over all sources."""
RESAMPLES = 2000
_CHUNK = 1 << 22


@dataclass(frozen=True, slots=True, kw_only=True)
class Tally:
    """What came of one problem's samples.

    Attributes:
        id: prompt id.
        source: data source.
        right: right samples.
        valid: verified samples.
        failed: samples whose verification failed.
        majority: share of the most frequent answers that are right (1 or 0 but for ties); None
            where the verifier extracts no answers, so that there is nothing to vote on.
    """

    id: str
    source: str
    right: int
    valid: int
    failed: int
    majority: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """Results over the problems of one source, or of all.

    Attributes:
        source: its name.
        num_problems: problems with a verified sample; the rates are over these.
        num_samples: samples, failed verifications included.
        pass_at_1: mean over problems of the share of right samples.
        pass_at_k: by k, the unbiased chance that one of k samples is right, over the problems with
            at least k verified samples; k = 2, 4, 8, ... and the number of samples.
        maj_at_k: share of problems whose most frequent answer is right; ties count in part.
        mean_tokens: mean length of a response.
        truncation_rate: share of responses cut by the token limit.
        format_rate: share of verified samples with the answer in the expected format.
        errors: failed verifications; only mean_tokens and truncation_rate include them.
        unverified_problems: problems of which no sample was verified.
        repeated_problems: problems that are in no other figure of this row, since an earlier source
            has the same text; only over all sources.
    """

    source: str
    num_problems: int
    num_samples: int
    pass_at_1: Interval | None
    pass_at_k: dict[int, Interval]
    maj_at_k: Interval | None
    mean_tokens: float
    truncation_rate: float
    format_rate: float
    errors: int
    unverified_problems: int
    repeated_problems: int = 0


def tallies(samples: Iterable[Sample], *, right_from: float = RIGHT_FROM) -> list[Tally]:
    """Count by problem, in order of first appearance."""
    by_problem: dict[str, list[Sample]] = {}
    for sample in samples:
        by_problem.setdefault(sample.id, []).append(sample)
    result = []
    for prompt_id, group in by_problem.items():
        outcomes = Counter(sample.outcome(right_from) for sample in group)
        result.append(
            Tally(
                id=prompt_id,
                source=group[0].source,
                right=outcomes["right"],
                valid=outcomes["right"] + outcomes["wrong"],
                failed=outcomes["error"],
                majority=majority(group, right_from=right_from),
            )
        )
    return result


def majority(samples: Sequence[Sample], *, right_from: float = RIGHT_FROM) -> float | None:
    """The share of right answers among the most frequent ones of one problem.

    All right samples are one answer, however they write it: each equals the reference. So that
    wrong ones do not split their votes over spellings, they are counted by ``answers.normal_form``:
    numbers by value, others by text without spacing and markup. Expressions that are equal without
    being written alike (``x+1`` and ``1+x``) still count apart. Samples without an answer do not
    vote; nor do failed verifications.

    Returns:
        1.0 or 0.0, a fraction in a tie; None where no verified sample has an extracted answer.
    """
    votes: Counter[NormalForm | None] = Counter()
    for sample in samples:
        outcome = sample.outcome(right_from)
        if outcome == "error" or not sample.extracted:
            continue
        # None stands for the right answer: no text can be mistaken for it.
        votes[None if outcome == "right" else normal_form(sample.extracted)] += 1
    if not votes:
        return None
    most = max(votes.values())
    winners = [answer for answer, count in votes.items() if count == most]
    return (None in winners) / len(winners)


def summarise(
    samples: Sequence[Sample], *, right_from: float = RIGHT_FROM, seed: int = 0
) -> list[Summary]:
    """One summary for each source, in order of first appearance; then all, where there are more.

    Args:
        samples: at least one.
        right_from: reward from which a sample is right.
        seed: of the bootstrap.
    """
    counted = tallies(samples, right_from=right_from)
    names = list(dict.fromkeys(sample.source for sample in samples))
    result = [
        _summary(
            name,
            [sample for sample in samples if sample.source == name],
            [tally for tally in counted if tally.source == name],
            seed,
        )
        for name in names
    ]
    if len(names) == 1:
        return result
    repeated = repeats((sample.id, sample.source, sample.problem) for sample in samples)
    total = _summary(
        ALL,
        [sample for sample in samples if sample.id not in repeated],
        [tally for tally in counted if tally.id not in repeated],
        seed,
    )
    return [*result, replace(total, repeated_problems=len(repeated))]


def repeats(problems: Iterable[tuple[str, str, str]]) -> set[str]:
    """Ids of the problems whose text an earlier source has already.

    An id is made of text, answer, source and system message: the same problem has another one in
    every source. Problems of the same source are never repeats: its own row counts them too.

    Args:
        problems: id, source and text of each, in order; an id may come again.
    """
    home: dict[str, str] = {}
    return {
        prompt_id
        for prompt_id, source, text in problems
        if home.setdefault(" ".join(text.split()), source) != source
    }


def _summary(
    source: str, samples: Sequence[Sample], counted: Sequence[Tally], seed: int
) -> Summary:
    verified = [tally for tally in counted if tally.valid]
    votes = [tally.majority for tally in verified if tally.majority is not None]
    valid = sum(tally.valid for tally in counted)
    formatted = sum(sample.formatted for sample in samples if sample.outcome() != "error")
    return Summary(
        source=source,
        num_problems=len(verified),
        num_samples=len(samples),
        pass_at_1=bootstrap_mean([t.right / t.valid for t in verified], seed=seed),
        pass_at_k={
            k: interval
            for k in _ks(max((t.valid + t.failed for t in counted), default=0))
            if (interval := _pass_at(k, verified, seed)) is not None
        },
        # A problem without any answer is not solved by a vote.
        maj_at_k=bootstrap_mean([t.majority or 0.0 for t in verified], seed=seed)
        if votes
        else None,
        mean_tokens=_share(sum(sample.num_tokens for sample in samples), len(samples)),
        truncation_rate=_share(sum(sample.truncated for sample in samples), len(samples)),
        format_rate=_share(formatted, valid),
        errors=sum(tally.failed for tally in counted),
        unverified_problems=len(counted) - len(verified),
    )


def _pass_at(k: int, verified: Sequence[Tally], seed: int) -> Interval | None:
    enough = [tally for tally in verified if tally.valid >= k]
    if not enough:
        return None
    rates = pass_at_k(
        torch.tensor([tally.right for tally in enough]),
        torch.tensor([tally.valid for tally in enough]),
        k,
    )
    return bootstrap_mean(rates.tolist(), seed=seed)


def _ks(samples: int) -> list[int]:
    """2, 4, 8, ... up to the number of samples, and that number."""
    powers = [2**i for i in range(1, max(samples, 1).bit_length()) if 2**i <= samples]
    return sorted({*powers, samples} - {0, 1})


def bootstrap_mean(
    values: Sequence[float], *, seed: int, resamples: int = RESAMPLES
) -> Interval | None:
    """Mean of one value per problem with its percentile bootstrap 95 % interval.

    Args:
        values: one for each problem, in [0, 1].
        seed: of the resampling; equal seeds give equal intervals.
        resamples: drawn, problems with replacement.

    Returns:
        None without values. Where all values are alike, resampling gives no width and would claim
        that nothing else is possible; then Wilson's interval for as many trials.

    Source: Efron, "Bootstrap methods", 1979, doi:10.1214/aos/1176344552.
    """
    if not len(values):
        return None
    data = np.asarray(values, dtype=np.float64)
    if bool((data == data[0]).all()):
        return wilson_interval(float(data[0]), len(data))
    generator = np.random.default_rng(seed)
    means = np.empty(resamples)
    step = max(1, _CHUNK // len(data))
    for start in range(0, resamples, step):
        rows = min(step, resamples - start)
        places = generator.integers(len(data), size=(rows, len(data)))
        means[start : start + rows] = data[places].mean(axis=1)
    low, high = np.quantile(means, [0.025, 0.975])
    return Interval(mean=math.fsum(values) / len(values), low=float(low), high=float(high))


def _share(part: float, whole: int) -> float:
    return part / whole if whole else 0.0
