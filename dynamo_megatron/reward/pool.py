"""The reward pool: verification in worker processes that can be killed.

A verifier handles what a policy wrote, so it may raise, hang or take its process with it. None of
that may stop a run, charge another item or pass for a wrong answer. Threads cannot be killed and
``signal.alarm`` works in the main thread only (verl#5635: every score silently 0), hence processes.
"""

from __future__ import annotations

import logging
import os
import re
import select
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from dynamo_megatron.reward.integer_answer import parse_reference
from dynamo_megatron.reward.job import Job
from dynamo_megatron.reward.process import Task, WorkerProcess
from dynamo_megatron.reward.stream import ScoringSession
from dynamo_megatron.reward.worker import FAILED, READY
from dynamo_megatron.types import Prompt, Rollout, Verdict, VerdictStatus

INTEGER_ANSWER = "dynamo_megatron.reward.integer_answer:verify_integer_answer"
CHECK_REFERENCE = "dynamo_megatron.reward.math_answer:check_reference"
MATH = "dynamo_megatron.reward.math_answer:verify_math"
VERIFIERS = {
    "integer_answer": INTEGER_ANSWER,
    "math": MATH,
    "reasoning_gym": "dynamo_megatron.reward.reasoning_gym_answer:verify_reasoning_gym",
}
"""The built-in verifiers; nothing but their names sets them apart from a user's."""

MEMORY_LIMIT_BYTES = 4 << 30
"""Address space of a worker."""

START_LIMIT_S = 60.0
"""How long a worker may take to import its verifier."""

MAX_DEATHS = 2
"""An item over which so many workers died is scored CRASH: the first may be an accident."""

MAX_FAILED_STARTS = 3
"""So many workers in a row that do not start end the run."""

# How the two callers name a user's verifier, and a built-in one.
_OPTION = "reward.function of a run, --verifier of eval"
_KIND = "reward.kind of a run, --verifier of eval"
_POLL_S = 0.1
_SPEC = re.compile(r"[^\W\d]\w*(?:\.[^\W\d]\w*)*:[^\W\d]\w*")
_LOG = logging.getLogger(__name__)


class RewardError(RuntimeError):
    """Verification cannot work at all, as opposed to failing on one response."""


class RewardPool:
    """Scores rollouts in killable worker processes. Implements ``protocols.Reward``.

    Each item gets exactly one verdict. A verifier that raises, or returns what is not a finite
    number, gives ERROR; one that takes longer than ``timeout_s`` gives TIMEOUT (to this item
    alone) and its worker is replaced; a worker that dies is replaced and its item tried once more,
    then CRASH. Reaching the memory limit counts as a death. Not thread-safe. Linux.

    Args:
        verifier: ``module:function``, called in a worker as f(response, answer, prompt); returns a
            number or a ``Verification``. Imported there, with this process's ``sys.path`` and the
            working folder.
        workers: number of processes, started on first use.
        timeout_s: wall-clock seconds for one verification.
        memory_limit_bytes: address space of a worker.

    Raises:
        ValueError: ``verifier`` is not written as module:function.
    """

    def __init__(
        self,
        verifier: str = INTEGER_ANSWER,
        *,
        workers: int,
        timeout_s: float,
        memory_limit_bytes: int = MEMORY_LIMIT_BYTES,
    ) -> None:
        if not _SPEC.fullmatch(verifier):
            raise ValueError(
                f"the verifier {verifier!r} is not of the form module:function, such as "
                f"my_rewards.math:score. Change it ({_OPTION})."
            )
        if workers < 1 or not timeout_s > 0:
            raise ValueError(
                f"a reward pool needs at least one worker and a positive time limit, got "
                f"{workers} and {timeout_s}."
            )
        self._verifier = verifier
        self._num_workers = workers
        self._timeout_s = timeout_s
        self._memory_limit = memory_limit_bytes
        self._workers: list[WorkerProcess] = []
        self._failed_starts = 0
        self._streaming = False
        self._launcher: ThreadPoolExecutor | None = ThreadPoolExecutor(
            max_workers=1, thread_name_prefix="reward-launcher"
        )

    def __enter__(self) -> RewardPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def worker_pids(self) -> tuple[int, ...]:
        """Process ids of the workers that run now."""
        return tuple(worker.pid for worker in self._workers)

    def check(self, prompts: Sequence[Prompt] = ()) -> tuple[Prompt, ...]:
        """Start every worker and wait until all have imported the verifier.

        Args:
            prompts: problems whose reference answers a built-in verifier must be able to read.

        Returns:
            Problems whose reference the math verifier cannot read as mathematics: a response is
            right there only if it writes the same text. They are logged as well.

        Raises:
            RewardError: the verifier cannot be imported, or references are not integers.
        """
        as_text: tuple[Prompt, ...] = ()
        if self._verifier == INTEGER_ANSWER:
            _check_references(prompts)
        if self._verifier == MATH:
            as_text = self._unreadable(prompts)
        self._begin()
        self._run(Job(), await_start=True)
        return as_text

    def score(self, items: Sequence[tuple[Prompt, Rollout]]) -> list[Verdict]:
        """One verdict for each item, in order.

        Raises:
            RewardError: workers no longer start, or the pool is closed.
        """
        tasks = [
            Task(index=i, response=rollout.text, answer=prompt.answer, prompt=prompt.text)
            for i, (prompt, rollout) in enumerate(items)
        ]
        return self._verify(tasks)

    @contextmanager
    def stream(self) -> Iterator[ScoringSession]:
        """Verify rollouts while they arrive.

        The verdicts are those of ``score``. No other method may be called until it is left; leaving
        it before ``verdicts()`` drops what is under way.

        Raises:
            RewardError: the pool is closed, or a session is open.
        """
        self._begin()
        self._streaming = True
        try:
            with ScoringSession(self._run) as session:
                yield session
        finally:
            self._streaming = False

    def _verify(self, tasks: Sequence[Task]) -> list[Verdict]:
        self._begin()
        job = Job(tasks)
        self._run(job)
        return job.in_order()

    def _unreadable(self, prompts: Sequence[Prompt]) -> tuple[Prompt, ...]:
        """Problems whose reference math-verify cannot read, found in a worker of their own."""
        doubtful = [prompt for prompt in prompts if not _is_integer(prompt.answer)]
        if not doubtful:
            return ()
        with RewardPool(
            CHECK_REFERENCE, workers=self._num_workers, timeout_s=self._timeout_s
        ) as checker:
            verdicts = checker._verify(
                [
                    Task(index=i, response="", answer=p.answer, prompt="")
                    for i, p in enumerate(doubtful)
                ]
            )
        found = tuple(
            prompt
            for prompt, verdict in zip(doubtful, verdicts, strict=True)
            if not (verdict.valid and verdict.reward)
        )
        if found:
            _LOG.warning(
                "%d of %d reference answers cannot be read as mathematics; responses to them are "
                "compared as text: %s",
                len(found),
                len(prompts),
                ", ".join(f"{p.source}/{p.id} {p.answer[:40]!r}" for p in found),
            )
        return found

    def close(self) -> None:
        """End the worker processes. May be called again."""
        if self._launcher is None:
            return
        self._end_workers()
        self._launcher.shutdown()
        self._launcher = None

    def _run(self, job: Job, *, await_start: bool = False) -> None:
        """Work until nothing waits, is under way or can still come."""
        try:
            while True:
                # Taken before the pipes are read, so that a result that is there is never late.
                now = time.monotonic()
                for worker in list(self._workers):
                    self._serve(worker, now, job)
                growing = job.growing  # before looking at what waits: the last item is not missed
                # Only now, when workers that died idle are replaced: no item is charged for them.
                self._assign(job)
                starting = await_start and not all(worker.ready for worker in self._workers)
                busy = any(worker.tasks for worker in self._workers)
                if not (job.waiting or starting or busy or growing):
                    return
                if job.cancelled:
                    self._end_workers()  # they may be in the middle of something
                    return
                self._wait(job)
        except BaseException:
            # The workers are in the middle of something: the next call must not see its results.
            self._end_workers()
            raise

    def _assign(self, job: Job) -> None:
        for worker in self._workers:
            if job.waiting and worker.ready and not worker.tasks:
                worker.assign(job.take(self._num_workers), timeout_s=self._timeout_s)

    def _wait(self, job: Job) -> None:
        """Sleep until a worker can be served, a deadline passes, or a moment has gone by."""
        poll = select.poll()
        deadline = time.monotonic() + _POLL_S
        if job.bell is not None:
            poll.register(job.bell, select.POLLIN)
        for worker in self._workers:
            if not worker.ready or worker.tasks:
                poll.register(worker.readable, select.POLLIN)
                deadline = min(deadline, worker.deadline)
            if worker.writable is not None:
                poll.register(worker.writable, select.POLLOUT)
        poll.poll(max(0.0, deadline - time.monotonic()) * 1000)
        job.hush()

    def _serve(self, worker: WorkerProcess, now: float, job: Job) -> None:
        """Take a worker's messages, then deal with its end or its deadline."""
        for message in worker.exchange(timeout_s=self._timeout_s):
            if not worker.ready:
                self._take_start(worker, message)
            elif not self._take_result(worker, message, job):
                worker.gone, worker.fault = True, "broke the protocol"
                break
        if worker.gone:
            self._bury(worker, job)
        elif now > worker.deadline and (worker.tasks or not worker.ready):
            self._time_out(worker, job)

    def _take_start(self, worker: WorkerProcess, message: Any) -> None:
        kind, detail = message
        if kind == READY:
            worker.ready = True
            self._failed_starts = 0
        elif kind == FAILED:
            worker.fault = str(detail)

    def _take_result(self, worker: WorkerProcess, message: Any, job: Job) -> bool:
        """Record the result of the worker's first task; False where it is none."""
        match message:
            case [int(index), str(status), float(reward), bool(formatted), str(found), str(text)]:
                pass
            case _:
                return False
        if not worker.tasks or index != worker.tasks[0].index:
            return False
        job.verdicts[worker.tasks.popleft().index] = Verdict(
            reward=reward,
            status=VerdictStatus(status),
            formatted=formatted,
            extracted=found,
            message=text,
        )
        worker.deadline = time.monotonic() + self._timeout_s
        return True

    def _bury(self, worker: WorkerProcess, job: Job) -> None:
        """Replace a worker that ended; the task it was at is tried once more."""
        how = self._remove(worker)
        if not worker.ready:
            self._count_failed_start(how)
        elif worker.tasks:
            first = worker.tasks.popleft()
            again = replace(first, deaths=first.deaths + 1)
            _LOG.warning("a reward worker %s on item %d (death %d)", how, again.index, again.deaths)
            job.put_back(worker.tasks)
            if again.deaths < MAX_DEATHS:
                job.put_back([again])
            else:
                job.verdicts[again.index] = Verdict(
                    reward=0.0,
                    status=VerdictStatus.CRASH,
                    message=f"the worker {how}; tried {again.deaths} times",
                )
        self._start_workers()

    def _time_out(self, worker: WorkerProcess, job: Job) -> None:
        """Kill a worker that is too slow; the task it was at is the only one to pay."""
        self._remove(worker)
        if not worker.ready:
            self._count_failed_start(f"was not ready after {START_LIMIT_S:g} s")
        else:
            first = worker.tasks.popleft()
            job.verdicts[first.index] = Verdict(
                reward=0.0,
                status=VerdictStatus.TIMEOUT,
                message=f"not verified within {self._timeout_s:g} s",
            )
            job.put_back(worker.tasks)
        self._start_workers()

    def _remove(self, worker: WorkerProcess) -> str:
        self._workers.remove(worker)
        return worker.end()

    def _count_failed_start(self, how: str) -> None:
        self._failed_starts += 1
        _LOG.warning("a reward worker did not start: %s", how)
        if self._failed_starts < MAX_FAILED_STARTS:
            return
        module = self._verifier.partition(":")[0]
        raise RewardError(
            f"no worker can start with the verifier {self._verifier!r}; the last one: {how}. "
            f"Workers run {sys.executable} and import {module!r} along sys.path = {sys.path} and "
            f"the working folder {os.getcwd()}. "
            f"Correct it ({_OPTION}), or put the module's folder on PYTHONPATH; "
            f"`{sys.executable} -c 'import {module}'` shows the import on its own."
        )

    def _begin(self) -> None:
        if self._streaming:
            raise RewardError(
                "a streaming session of this reward pool is open, and its thread has the workers. "
                "Leave the session first."
            )
        self._start_workers()

    def _start_workers(self) -> None:
        if self._launcher is None:
            raise RewardError(
                "the reward pool is closed: score() and the like come before close()."
            )
        while len(self._workers) < self._num_workers:
            self._workers.append(
                WorkerProcess(
                    self._verifier,
                    memory_limit=self._memory_limit,
                    start_limit_s=START_LIMIT_S,
                    launcher=self._launcher,
                )
            )

    def _end_workers(self) -> None:
        while self._workers:
            self._workers.pop().end()


def _is_integer(answer: str) -> bool:
    try:
        parse_reference(answer)
    except ValueError:
        return False
    return True


def _check_references(prompts: Sequence[Prompt]) -> None:
    unreadable = [prompt for prompt in prompts if not _is_integer(prompt.answer)]
    if unreadable:
        examples = "; ".join(f"{p.source}/{p.id}: {p.answer[:60]!r}" for p in unreadable[:3])
        raise RewardError(
            f"the verifier is integer_answer, but {len(unreadable)} of {len(prompts)} reference "
            f"answers are not integers ({examples}): no response to them could ever be right. "
            f"Leave these problems out, or choose math or your own verifier ({_KIND})."
        )
