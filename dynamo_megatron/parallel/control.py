"""Waiting for rank 0 without waiting in a collective, and ending together."""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable
from types import TracebackType

import torch
import torch.distributed as dist
from torch.distributed import (
    PrefixStore,  # pyright: ignore[reportPrivateImportUsage]
    ProcessGroup,
    Store,  # pyright: ignore[reportPrivateImportUsage]
)

from dynamo_megatron.parallel.broadcast import broadcast_bytes
from dynamo_megatron.parallel.errors import DivergenceError, PeerError
from dynamo_megatron.parallel.heartbeat import Heartbeat
from dynamo_megatron.parallel.reduce import all_reduce_sum

logger = logging.getLogger(__name__)

FIRST_PHASE = "start"
FINISHED = "finished_on_zero"
SHORTEST_POLL_S = 0.005
LONGEST_POLL_S = 0.25
HURRIED_TIMEOUT_S = 10.0
POLL_SHARE = 0.02
"""A wait is prolonged by polling by at most this share of itself."""


class ControlPlane:
    """Lets rank 0 work alone for minutes, and ends every rank when one is lost.

    Use it as a context manager around the run, on every rank::

        with ControlPlane(store, group=group, timeout_s=45.0) as control:
            payload = control.run_on_zero(lambda: encode_rollouts(engine.generate(...)), "generate")

    Inside, a rank that dies or freezes is noticed by all others within about ``timeout_s`` (one and
    a half of it when the store died with it), even while they are stuck in a collective: each logs
    one line (which rank, host, process, last phase) and its process exits with
    ``PEER_LOST_EXIT_CODE``. An exception that leaves the block on one rank ends the others too. A
    slow rank is not lost: it beats from a thread, and torch releases the interpreter lock.

    Args:
        store: reached by every rank; copies of the connection are made, the given one is not used.
        group: a group of all ranks that take part.
        timeout_s: silence after which a rank counts as lost.

    Collectives on ``group``: on entry, 1 broadcast and 1 SUM.
    """

    def __init__(self, store: Store, *, group: ProcessGroup, timeout_s: float) -> None:
        if timeout_s <= 0:
            raise ValueError(f"timeout_s={timeout_s}: ranks need some time to beat; use 5 or more.")
        self.rank = dist.get_rank(group)
        self.group = group
        self._zero = dist.get_global_rank(group, 0)
        self._given_store = store
        self._timeout_s = timeout_s
        self._phase = FIRST_PHASE
        self._calls = 0
        self._failed = False

    def __enter__(self) -> ControlPlane:
        # A name of its own: the store may still hold the keys of an earlier run (elastic restart).
        name = os.urandom(8).hex().encode() if self.rank == 0 else None
        prefix = f"control/{broadcast_bytes(name, src=self._zero, group=self.group).decode()}"
        # One connection for each thread: a client blocks, and is not safe to share.
        self._store = _connection(self._given_store, prefix)
        self._heartbeat = Heartbeat(
            _connection(self._given_store, prefix),
            rank=self.rank,
            world_size=dist.get_world_size(self.group),
            timeout_s=self._timeout_s,
            phase=FIRST_PHASE,
        )
        self._heartbeat.announce()
        all_reduce_sum(torch.zeros(1), group=self.group)  # all have announced themselves
        self._heartbeat.start()
        return self

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._failed:
            return
        if error is None or (isinstance(error, SystemExit) and not error.code):
            self._heartbeat.farewell()
            return
        if _blames_connection(error):
            # The cause is most likely a dead neighbour. Its name is worth waiting for: the
            # heartbeat ends this process with it, before these seconds are over.
            logger.error("a collective failed; waiting to learn which rank is lost: %s", error)
            time.sleep(2 * self._timeout_s)
        self._accuse(error)

    def blames_another(self, error: BaseException) -> bool:
        """Whether the error is most likely the loss of another rank, which is still to be named."""
        return _blames_connection(error)

    def fail(self, error: BaseException) -> None:
        """This rank ends because of ``error``, and may take its time to close what it holds.

        The others are told now. They end as well, and none of them may be taken for the reason and
        cut this one's closing short. An error of a collective waits for the end of the block: it
        is most likely another rank's.
        """
        if not _blames_connection(error):
            self._accuse(error)

    def _accuse(self, error: BaseException) -> None:
        self._failed = True
        self._heartbeat.accuse_self(f"{type(error).__name__}: {error}")

    def set_phase(self, phase: str) -> None:
        """Report what this rank does from now on; it is named when this rank is lost."""
        self._phase = phase
        self._heartbeat.set_phase(phase)

    def hurry(self) -> None:
        """Be quick about lost ranks: a launcher that asks to stop kills after half a minute.

        torchrun sends SIGTERM to the ranks that are left when one died, and SIGKILL 30 s later. The
        lost rank is to be named before that. Safe in a signal handler.
        """
        self._heartbeat.hurry(HURRIED_TIMEOUT_S)

    def run_on_zero(self, fn: Callable[[], bytes], phase: str) -> bytes:
        """Run ``fn`` on rank 0 alone and give its result to all ranks.

        The others wait on the store, however long it takes: no collective can time out, and they
        notice at once when rank 0 dies.

        Args:
            fn: called on rank 0 only.
            phase: what it does, for messages; equal on every rank.

        Returns:
            What ``fn`` returned, on every rank.

        Raises:
            Exception: what ``fn`` raised, on rank 0.
            PeerError: ``fn`` raised on rank 0, elsewhere; with type and text.
            DivergenceError: rank 0 is at another call than this rank.

        Collectives on the control plane's group: broadcasts only, after ``fn`` is done.
        """
        before = self._phase
        self._calls += 1
        if self.rank == 0:
            self.set_phase(phase)
            payload = self._run_and_tell(fn, phase)
        else:
            self.set_phase(f"wait for rank 0: {phase}")
            self._wait_for_zero()
            payload = self._hear(phase)
        self.set_phase(before)
        return payload

    def _run_and_tell(self, fn: Callable[[], bytes], phase: str) -> bytes:
        payload, failure = b"", None
        try:
            payload = fn()
        except Exception as error:
            failure = error
        said = None if failure is None else [type(failure).__name__, str(failure)]
        header = json.dumps({"call": self._calls, "phase": phase, "error": said}).encode()
        self._store.set(FINISHED, str(self._calls))
        broadcast_bytes(header, src=self._zero, group=self.group)
        if failure is not None:
            raise failure
        return broadcast_bytes(payload, src=self._zero, group=self.group)

    def _wait_for_zero(self) -> None:
        started = time.monotonic()
        while not (self._store.check([FINISHED]) and int(self._store.get(FINISHED)) >= self._calls):
            waited_s = time.monotonic() - started
            time.sleep(min(max(waited_s * POLL_SHARE, SHORTEST_POLL_S), LONGEST_POLL_S))

    def _hear(self, phase: str) -> bytes:
        header = json.loads(broadcast_bytes(None, src=self._zero, group=self.group))
        if (header["call"], header["phase"]) != (self._calls, phase):
            raise DivergenceError(
                f"rank {self.rank} is at call {self._calls} on rank 0, {phase!r}, but rank 0 is at "
                f"call {header['call']}, {header['phase']!r}: the ranks took different branches. "
                "Decide on rank 0 and broadcast, or on values that are equal everywhere."
            )
        if header["error"] is not None:
            raise PeerError(self._zero, phase, *header["error"])
        return broadcast_bytes(None, src=self._zero, group=self.group)


def _connection(store: Store, prefix: str) -> PrefixStore:
    # torch's type stubs lag behind: every store has clone.
    return PrefixStore(prefix, store.clone())  # pyright: ignore[reportAttributeAccessIssue]


def _blames_connection(error: BaseException) -> bool:
    """Whether a collective or the store failed, rather than this rank's own work."""
    if isinstance(error, dist.DistError):
        return True
    return isinstance(error, RuntimeError) and (
        "gloo" in str(error) or "Connection closed by peer" in str(error)
    )
