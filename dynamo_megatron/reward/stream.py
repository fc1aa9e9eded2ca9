"""Verification while responses still arrive."""

from __future__ import annotations

from collections.abc import Callable
from threading import Thread
from types import TracebackType

from dynamo_megatron.reward.job import Job
from dynamo_megatron.types import Prompt, Rollout, Verdict


class ScoringSession:
    """Takes rollouts one at a time and has them verified meanwhile: ``protocols.Scoring``.

    A thread of its own feeds the workers from entry to exit; nobody else may use the pool in
    between. ``submit`` and ``verdicts`` belong to one thread.

    Args:
        work: works on a job until it is closed and done, or cancelled.
    """

    def __init__(self, work: Callable[[Job], None]) -> None:
        self._work = work
        self._job = Job(growing=True)
        self._failure: BaseException | None = None
        self._thread = Thread(target=self._run, name="reward-feeder", daemon=True)

    def __enter__(self) -> ScoringSession:
        self._thread.start()
        return self

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._job.cancel()
        self._thread.join()
        self._job.release()

    def submit(self, prompt: Prompt, rollout: Rollout) -> None:
        """Have a rollout verified; returns at once.

        Raises:
            RewardError: verification has failed altogether: nothing is gained by sampling on.
        """
        self._raise_failure()
        self._job.add(prompt, rollout)

    def verdicts(self) -> list[Verdict]:
        """Wait for the rest: one verdict for each rollout, in the order of submission.

        Nothing may be submitted afterwards.

        Raises:
            RewardError: workers no longer start.
        """
        self._job.close()
        self._thread.join()
        self._raise_failure()
        return self._job.in_order()

    def _run(self) -> None:
        try:
            self._work(self._job)
        except BaseException as error:  # raised in the thread that submits
            self._failure = error

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure
