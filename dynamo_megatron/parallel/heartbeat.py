"""Heartbeats over the store: a rank that dies or freezes ends the run on every rank, by name.

Collectives cannot tell: a rank whose neighbour was killed waits in them for minutes or for ever,
and says nothing of use. So each rank counts up in the store from a thread of its own. Rank 0 reads
all counters and publishes a verdict when one stands still; the others read rank 0's counter and
the verdict. That is one read of W records in a period, not W of them.

Two threads, because a store call can itself block for ever (the host of the store frozen): the
beating thread talks to the store, the guard only watches the clock.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import sys
import threading
import time
from dataclasses import asdict, dataclass, replace

from torch.distributed import Store  # pyright: ignore[reportPrivateImportUsage]

logger = logging.getLogger(__name__)

PEER_LOST_EXIT_CODE = 75
"""Exit code of a rank that ends because another is gone (sysexits' EX_TEMPFAIL: try again)."""
BEATS_PER_TIMEOUT = 8
LONGEST_PERIOD_S = 5.0
FLUSH_LIMIT_S = 2.0
VERDICT = "verdict"


@dataclass(frozen=True, slots=True, kw_only=True)
class Beat:
    """What a rank writes to the store.

    Attributes:
        rank: who.
        host: its host name.
        pid: its process.
        phase: what it was doing.
        count: goes up with every beat.
        farewell: it has left in good order.
    """

    rank: int
    host: str
    pid: int
    phase: str
    count: int = 0
    farewell: bool = False

    def __str__(self) -> str:
        return (
            f"rank {self.rank} (host {self.host}, pid {self.pid}, "
            f"last reported phase {self.phase!r})"
        )


class Silence:
    """For how long nothing new has come from somebody, as far as the observer can tell.

    A gap between two looks counts as two periods at most: an observer that was itself suspended or
    starved has no right to call the others silent.
    """

    def __init__(self, period_s: float) -> None:
        self.seconds = 0.0
        self._period_s = period_s
        self._seen: object = None
        self._looked = time.monotonic()

    def look(self, value: object) -> float:
        """Seconds of silence, given what is seen now."""
        now = time.monotonic()
        gap, self._looked = min(now - self._looked, 2 * self._period_s), now
        self.seconds = self.seconds + gap if value == self._seen else 0.0
        self._seen = value
        return self.seconds


class Heartbeat:
    """This rank's heartbeat, and its watch over the others.

    Args:
        store: a connection that nobody else uses (torch's clients are not safe with two threads).
        rank: this rank, among ``world_size``.
        world_size: number of ranks.
        timeout_s: silence after which a rank counts as lost.
        phase: what this rank does at first.
    """

    def __init__(
        self,
        store: Store,
        *,
        rank: int,
        world_size: int,
        timeout_s: float,
        phase: str,
    ) -> None:
        self.period_s = min(timeout_s / BEATS_PER_TIMEOUT, LONGEST_PERIOD_S)
        self._store = store
        self._world_size = world_size
        self._timeout_s = timeout_s
        self._mine = Beat(rank=rank, host=socket.gethostname(), pid=os.getpid(), phase=phase)
        self._watched = [r for r in (range(world_size) if rank == 0 else (0,)) if r != rank]
        self._silence = {r: Silence(self.period_s) for r in self._watched}
        self._peers: dict[int, Beat] = {}
        self._rounds = 0
        self._store_error = ""
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._stop = threading.Event()
        self._all_left = threading.Event()
        self._sentenced = threading.Lock()
        self._beater = threading.Thread(target=self._beat_on, name="heartbeat", daemon=True)
        self._guard = threading.Thread(target=self._guard_on, name="heartbeat-guard", daemon=True)

    def announce(self) -> None:
        """Write the first beat; every rank must have done so before any starts to watch."""
        self._write()

    def start(self) -> None:
        """Start beating and watching."""
        self._beater.start()
        self._guard.start()

    def set_phase(self, phase: str) -> None:
        """Report what this rank does from now on."""
        with self._lock:
            self._mine = replace(self._mine, phase=phase)
        self._wake.set()

    def hurry(self, timeout_s: float) -> None:
        """From now on be less patient. Only sets a number: safe in a signal handler."""
        self._timeout_s = min(self._timeout_s, timeout_s)

    def farewell(self) -> None:
        """Leave in good order: no other rank will miss this one. Rank 0 leaves last.

        Rank 0 may host the store, so it keeps on watching until all the others have left.
        """
        if self._watched and self._mine.rank == 0:
            while not self._all_left.wait(self._timeout_s):
                logger.info("rank 0 is done and waits for the others to finish")
        with self._lock:
            self._mine = replace(self._mine, farewell=True)
        self.stop()

    def accuse_self(self, reason: str) -> None:
        """Tell every rank that this one fails, so that none waits for it. Then stop."""
        try:
            self._publish(f"{self._mine} failed: {reason}", fatal=False)
        except RuntimeError:
            logger.warning("the store is gone; the other ranks were not told of this failure")
        if self._mine.rank == 0:
            time.sleep(2 * self.period_s)  # the store may end with this process: let them read
        self.stop()

    def stop(self) -> None:
        """End both threads; the last beat says whether this was a farewell."""
        self._stop.set()
        self._wake.set()
        for thread in (self._beater, self._guard):
            if thread.is_alive():
                thread.join(self._timeout_s)

    def _beat_on(self) -> None:
        while not self._stop.is_set():
            try:
                self._round()
                self._rounds += 1
            except RuntimeError as error:  # torch's store errors; the guard counts the time
                self._store_error = str(error).splitlines()[0]
            self._wake.wait(self.period_s)
            self._wake.clear()
        if self._mine.farewell:
            try:
                self._write()
            except RuntimeError:
                logger.warning("the store is gone; this rank's farewell was not recorded")

    def _round(self) -> None:
        self._write()
        if self._store.check([VERDICT]):
            self._obey(json.loads(self._store.get(VERDICT)))
            return
        if not self._watched:  # a single rank; an empty multi_get never returns
            return
        beats = self._store.multi_get([_key(rank) for rank in self._watched])
        for beat in (Beat(**json.loads(text)) for text in beats):
            self._peers[beat.rank] = beat
            silent_s = self._silence[beat.rank].look(beat.count)
            if silent_s > self._timeout_s and not beat.farewell:
                self._publish(f"{beat} has been silent for {silent_s:.1f} s", fatal=True)
        if all(peer.farewell for peer in self._peers.values()):
            self._all_left.set()

    def _write(self) -> None:
        with self._lock:
            self._mine = replace(self._mine, count=self._mine.count + 1)
            text = json.dumps(asdict(self._mine))
        self._store.set(_key(self._mine.rank), text)

    def _publish(self, reason: str, *, fatal: bool) -> None:
        """Write the verdict, unless there is one; the first is nearest to the cause."""
        verdict = json.dumps({"reason": reason, "fatal": fatal})
        self._store.compare_set(VERDICT, "", verdict)

    def _obey(self, verdict: dict) -> None:
        """End this process, at once when a rank is lost.

        A rank that failed by itself may have done so together with all others: they get half the
        time-out to end by their own exception, which says more.
        """
        if not verdict["fatal"] and self._stop.wait(self._timeout_s / 2):
            return
        if verdict["fatal"] and self._mine.rank == 0:
            time.sleep(2 * self.period_s)  # the store may end with this process: let them read
        self._end(verdict["reason"])

    def _guard_on(self) -> None:
        silence = Silence(self.period_s)
        while not self._stop.wait(self.period_s):
            silent_s = silence.look(self._rounds)
            if silent_s > 1.5 * self._timeout_s:
                host = self._peers.get(0)
                named = f"{host} is gone, or its host" if host else "its host is gone"
                said = f" ({self._store_error})" if self._store_error else ""
                self._end(f"the store has not answered for {silent_s:.1f} s{said}: {named}")

    def _end(self, reason: str) -> None:
        """Log one line, flush, exit. Runs in a thread: the main one may be stuck for good."""
        if not self._sentenced.acquire(blocking=False):
            return
        line = (
            f"{reason}. Rank {self._mine.rank} was in phase {self._mine.phase!r} and cannot go on "
            f"without it: exiting with code {PEER_LOST_EXIT_CODE}."
        )
        # Somebody stuck may hold a logging lock, so the line gets a thread and a time limit.
        speaker = threading.Thread(target=_log_and_flush, args=(line,), daemon=True)
        speaker.start()
        speaker.join(FLUSH_LIMIT_S)
        if speaker.is_alive():
            os.write(sys.__stderr__.fileno() if sys.__stderr__ else 2, f"{line}\n".encode())
        os._exit(PEER_LOST_EXIT_CODE)


def _key(rank: int) -> str:
    return f"beat/{rank}"


def _log_and_flush(line: str) -> None:
    logger.critical(line)
    for handler in (*logger.handlers, *logging.getLogger().handlers):
        handler.flush()
