"""One worker process of the reward pool, as its parent sees it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any

from dynamo_megatron.reward.wire import FrameReader, WireError, encode_frame
from dynamo_megatron.reward.worker import EXIT_OUT_OF_MEMORY

MAX_RESULT_BYTES = 1 << 20
"""Longest frame accepted from a worker; its texts are cut to a thousand characters each."""

_READ_BYTES = 1 << 16
_REAP_LIMIT_S = 5.0
_EXIT_GRACE_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One verification.

    Attributes:
        index: place in the caller's list of items.
        response: decoded response.
        answer: reference answer.
        prompt: problem text.
        deaths: workers that died over it.
    """

    index: int
    response: str
    answer: str
    prompt: str
    deaths: int = 0

    @property
    def num_chars(self) -> int:
        """Size of what is sent for it."""
        return len(self.response) + len(self.answer) + len(self.prompt)


class WorkerProcess:
    """A worker, its pipes, the tasks it holds and the clock of the first of them.

    Args:
        verifier: ``module:function``.
        memory_limit: bytes of address space.
        start_limit_s: seconds until it has to report for work.
        launcher: runs the launch on a thread that lives as long as the workers may: the kernel
            sends the parent-death signal when the *thread* that created the child ends.
    """

    def __init__(
        self, verifier: str, *, memory_limit: int, start_limit_s: float, launcher: Executor
    ) -> None:
        self._process: subprocess.Popen[bytes] = launcher.submit(
            _launch, verifier, memory_limit
        ).result()
        assert self._process.stdin is not None and self._process.stdout is not None
        self._stdin, self._stdout = self._process.stdin, self._process.stdout
        self._reader = FrameReader(MAX_RESULT_BYTES)
        self._outbox = memoryview(b"")
        os.set_blocking(self._stdin.fileno(), False)
        os.set_blocking(self._stdout.fileno(), False)
        self.tasks: deque[Task] = deque()
        self.ready = False
        self.gone = False
        self.fault = ""
        self.deadline = time.monotonic() + start_limit_s

    @property
    def pid(self) -> int:
        """Process id, and the id of its process group."""
        return self._process.pid

    @property
    def readable(self) -> int:
        """File descriptor to wait on for results."""
        return self._stdout.fileno()

    @property
    def writable(self) -> int | None:
        """File descriptor to wait on for sending, while there is something to send."""
        return self._stdin.fileno() if self._outbox else None

    def assign(self, tasks: Sequence[Task], *, timeout_s: float) -> None:
        """Hand over tasks, as one message, and start the clock of the first."""
        self.tasks = deque(tasks)
        self._outbox = memoryview(
            encode_frame([[t.index, t.response, t.answer, t.prompt] for t in tasks])
        )
        self.deadline = time.monotonic() + timeout_s

    def exchange(self, *, timeout_s: float) -> list[Any]:
        """Send and receive what can be without waiting; return the complete messages.

        Sets ``gone`` when the process has ended or broke the protocol (then ``fault`` says how).
        """
        # Before reading: all that an ended process wrote is then in the pipe. The end of the pipe
        # is no sign to rely on, since a child of the verifier may hold it open.
        ended = self._has_ended()
        if self._send_some():
            self.deadline = time.monotonic() + timeout_s
        messages: list[Any] = []
        while True:
            try:
                data = os.read(self._stdout.fileno(), _READ_BYTES)
            except BlockingIOError:
                break
            if not data:
                ended = True
                break
            try:
                messages += self._reader.feed(data)
            except WireError as error:
                self.fault = f"broke the protocol ({error})"
                ended = True
                break
        self.gone = ended
        return messages

    def end(self) -> str:
        """Kill the process and its children, reap it, and say how it had ended.

        Returns:
            For example ``exited with status 3`` or ``was killed by SIGSEGV``.
        """
        fault = self.fault
        if self.gone and not fault:
            # A process closes its pipes a moment before it is over: wait for the true reason.
            deadline = time.monotonic() + _EXIT_GRACE_S
            while not self._has_ended() and time.monotonic() < deadline:
                time.sleep(0.001)
        alive = not self._has_ended()
        if self._process.returncode is None:
            # The group, while its leader is unreaped and so the id cannot be another's.
            os.killpg(self.pid, signal.SIGKILL)
        try:
            status = self._process.wait(timeout=_REAP_LIMIT_S)
        except subprocess.TimeoutExpired:
            return "does not end after SIGKILL (is it waiting for a file system?)"
        finally:
            self._stdin.close()
            self._stdout.close()
        return fault or ("closed its pipes" if alive else _describe_exit(status))

    def _has_ended(self) -> bool:
        """Whether the process has ended, without reaping it: its group id has to stay taken."""
        if self._process.returncode is not None:
            return True
        flags = os.WEXITED | os.WNOHANG | os.WNOWAIT
        return os.waitid(os.P_PID, self.pid, flags) is not None

    def _send_some(self) -> int:
        """Write what the pipe takes now; return the number of bytes."""
        sent = 0
        while self._outbox:
            try:
                count = os.write(self._stdin.fileno(), self._outbox[:_READ_BYTES])
            except (BlockingIOError, BrokenPipeError):  # a broken pipe: the reads will tell
                break
            sent += count
            self._outbox = self._outbox[count:]
        return sent


def _launch(verifier: str, memory_limit: int) -> subprocess.Popen[bytes]:
    environment = {
        **os.environ,
        # The worker imports what this process could import, and what lies in the working folder: a
        # console script, unlike `python -m`, does not have that on its path.
        "PYTHONPATH": os.pathsep.join([*(p or os.getcwd() for p in sys.path), os.getcwd()]),
        # Verifications run side by side, one thread each.
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
    }
    module = "dynamo_megatron.reward.worker"
    return subprocess.Popen(
        [sys.executable, "-P", "-m", module, str(os.getpid()), str(memory_limit), verifier],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        bufsize=0,
        env=environment,
        # Its own group: to kill with its children, and out of reach of a Ctrl-C in the terminal.
        start_new_session=True,
    )


def _describe_exit(status: int) -> str:
    if status == EXIT_OUT_OF_MEMORY:
        return "ran into its memory limit"
    if status >= 0:
        return f"exited with status {status}"
    name = signal.Signals(-status).name
    hint = " (often the kernel, out of memory)" if -status == signal.SIGKILL else ""
    return f"was killed by {name}{hint}"
