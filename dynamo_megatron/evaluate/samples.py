"""Evaluated samples: one generation with its verdict, and the JSON lines that hold them."""

from __future__ import annotations

import fcntl
import json
import logging
import math
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, BinaryIO, Literal

from dynamo_megatron.types import (
    FinishReason,
    Prompt,
    Rollout,
    RolloutGroup,
    Verdict,
    VerdictStatus,
)

Outcome = Literal["right", "wrong", "error"]

RIGHT_FROM = 0.5
"""Reward from which a sample is right, unless a run says otherwise."""


_JSON_TYPES = {"k": int, "formatted": bool, "reward": float, "num_tokens": int, "seed": int}
"""Fields of a sample that are no text."""

logger = logging.getLogger(__name__)


class SamplesError(ValueError):
    """The samples in a folder cannot be used or added to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One generation with its verdict; a line of ``samples.jsonl``.

    Attributes:
        id: prompt id.
        k: number within the prompt's samples, from 0.
        source: data source.
        label: the data set's own name for the problem, or "".
        problem: what was asked.
        answer: reference answer.
        response: what the model wrote.
        extracted: the answer the verifier found, or "".
        formatted: it stood in the expected format.
        reward: 0.0 where the verification failed.
        status: how the verification ended.
        message: its failure, or "".
        finish_reason: why the model stopped.
        num_tokens: length of the response.
        seed: what it was sampled with.
    """

    id: str
    k: int
    source: str
    label: str = ""
    problem: str
    answer: str
    response: str
    extracted: str
    formatted: bool
    reward: float
    status: VerdictStatus
    message: str
    finish_reason: FinishReason
    num_tokens: int
    seed: int

    @property
    def truncated(self) -> bool:
        """The token limit cut the response."""
        return self.finish_reason is FinishReason.LENGTH

    def outcome(self, right_from: float = RIGHT_FROM) -> Outcome:
        """Right, wrong, or not verified."""
        if self.status is not VerdictStatus.OK:
            return "error"
        return "right" if self.reward >= right_from else "wrong"

    def line(self) -> str:
        """As JSON; a lone surrogate, which UTF-8 has no bytes for, as its escape."""
        text = json.dumps(asdict(self), ensure_ascii=False)
        return text.encode("utf-8", "backslashreplace").decode() + "\n"


def sample_of(prompt: Prompt, rollout: Rollout, verdict: Verdict, *, label: str = "") -> Sample:
    """The sample that a rollout and its verdict make."""
    return Sample(
        id=prompt.id,
        k=rollout.index,
        source=prompt.source,
        label=label,
        problem=prompt.text,
        answer=prompt.answer,
        response=rollout.text,
        extracted=verdict.extracted,
        formatted=verdict.formatted,
        reward=verdict.reward,
        status=verdict.status,
        message=verdict.message,
        finish_reason=rollout.finish_reason,
        num_tokens=len(rollout.token_ids),
        seed=rollout.seed,
    )


def samples_of(groups: Sequence[RolloutGroup]) -> list[Sample]:
    """All samples of scored groups."""
    return [
        sample_of(group.prompt, rollout, verdict)
        for group in groups
        for rollout, verdict in zip(group.rollouts, group.verdicts, strict=True)
    ]


class SampleFile:
    """JSON lines that samples are appended to as they come; one process at a time has the file.

    A line that an interrupted run left incomplete is cut off; everything before it is kept. A file
    that is left empty is removed.

    Args:
        path: the file; made when it is not there.

    Raises:
        SamplesError: another evaluation has the file open, or a line before the last is no sample.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self._file = _open_locked(path)
        try:
            complete = _complete_bytes(path)
            if self._file.seek(0, os.SEEK_END) > complete:
                self._file.truncate(complete)
        except BaseException:
            self._file.close()
            raise

    def read(self) -> Iterator[Sample]:
        """The samples written so far, each (id, k) once."""
        return read_samples(self.path)

    def append(self, samples: Iterable[Sample]) -> None:
        """Write samples; they survive the end of this process."""
        self._file.write("".join(sample.line() for sample in samples).encode())
        self._file.flush()

    def close(self) -> None:
        """Write through to the disk, and let others have the file."""
        with self._file:
            self._file.flush()
            os.fsync(self._file.fileno())
            if not os.fstat(self._file.fileno()).st_size:
                self.path.unlink(missing_ok=True)

    def __enter__(self) -> SampleFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read_samples(path: Path) -> Iterator[Sample]:
    """The samples of a file, each (id, k) once, without a last line that is not complete.

    Raises:
        SamplesError: a line is no sample.
    """
    seen: set[tuple[str, int]] = set()
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.endswith(b"\n"):
                return
            sample = _parse(line, f"{path}, line {number}")
            if (sample.id, sample.k) not in seen:
                seen.add((sample.id, sample.k))
                yield sample


def _open_locked(path: Path) -> BinaryIO:
    """Open for appending, for this process alone until it is closed or the process ends."""
    while True:
        file = path.open("ab")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            file.close()
            raise SamplesError(
                f"another evaluation is writing {path} at this moment: the samples of both would "
                "be mixed. Wait for it or stop it, or choose another folder (--out)."
            ) from error
        except OSError as error:
            # Some network file systems have no locks; an evaluation can do without.
            logger.warning(
                "%s cannot be locked (%s): start no second evaluation there meanwhile", path, error
            )
            return file
        # Whoever had it may have removed it between our opening and our locking.
        try:
            if os.path.samestat(os.fstat(file.fileno()), path.stat()):
                return file
        except FileNotFoundError:
            pass
        file.close()


def _complete_bytes(path: Path) -> int:
    """Bytes up to the last end of line."""
    size, block = path.stat().st_size, 1 << 16
    with path.open("rb") as file:
        while size:
            start = max(0, size - block)
            file.seek(start)
            end = file.read(size - start).rfind(b"\n")
            if end >= 0:
                return start + end + 1
            size = start
    return 0


def _parse(line: bytes, where: str) -> Sample:
    try:
        values: dict[str, Any] = json.loads(line)
        _require_types(values)
        values["reward"] = float(values["reward"])
        values["status"] = VerdictStatus(values["status"])
        values["finish_reason"] = FinishReason(values["finish_reason"])
        return Sample(**values)
    except (ValueError, TypeError, OverflowError, RecursionError) as error:
        raise SamplesError(
            f"{where} is no sample of an evaluation: {error}. Choose another --out, or remove the "
            "file to start again."
        ) from error


def _require_types(values: dict[str, Any]) -> None:
    """Have every field there with a value of its type; a string stands for an enumeration's."""
    if set(values) != {field.name for field in fields(Sample)}:
        raise ValueError(f"its keys are {sorted(values)}")
    for name, value in values.items():
        wanted = _JSON_TYPES.get(name, str)
        if type(value) is not wanted and not (wanted is float and type(value) is int):
            raise ValueError(f"its {name} is {value!r:.80}, not of type {wanted.__name__}")
    if not math.isfinite(values["reward"]):
        raise ValueError(f"its reward is {values['reward']}, not a finite number")
    for name in ("k", "num_tokens"):
        if values[name] < 0:
            raise ValueError(f"its {name} is {values[name]}, which is negative")
