"""Processes, known by number and start: a number alone is given out again."""

from __future__ import annotations

import os
import socket
import time
from dataclasses import dataclass

import psutil

END_TIMEOUT_S = 20.0
"""A killed process that holds GPU memory takes seconds until its driver has let go."""

CLOCK_S = 2.0
"""A correction of the system's clock moves the start that it tells."""


@dataclass(frozen=True, slots=True)
class ProcessId:
    """A process on some node.

    Attributes:
        host: name of its node.
        pid: its number there.
        started_s: when it began (seconds since the epoch, as the system tells it).
        namespace: in which the number counts; containers of a node may each have their own.
    """

    host: str
    pid: int
    started_s: float
    namespace: str


def own_process() -> ProcessId:
    """This process."""
    return ProcessId(
        socket.gethostname(), os.getpid(), psutil.Process().create_time(), _namespace()
    )


def end_process(process: ProcessId, timeout_s: float = END_TIMEOUT_S) -> None:
    """See to it that a process of this node, and what it started, has ended.

    Nothing happens where it has ended already, or ran on another node.

    Raises:
        RuntimeError: it does not end within ``timeout_s`` of being killed.
    """
    found = _found(process)
    if found is None or process.pid == os.getpid():
        return
    try:
        tree = [found, *found.children(recursive=True)]
    except psutil.NoSuchProcess:
        return
    for each in tree:
        try:
            each.kill()
        except psutil.NoSuchProcess:
            continue
    deadline = time.monotonic() + timeout_s
    while (alive := [each for each in tree if _runs(each)]) and time.monotonic() < deadline:
        time.sleep(0.02)
    if alive:
        raise RuntimeError(
            f"process {', '.join(str(each.pid) for each in alive)} on {process.host} did not end "
            f"within {timeout_s:g} s of being killed, and its memory stays taken: a driver or a "
            "file system of that node hangs. Restart the node, or take it out of the cluster."
        )


def is_gone(process: ProcessId) -> bool:
    """Whether it ran on this node and has ended; False for one of another node."""
    if not _is_near(process):
        return False
    found = _found(process)
    return found is None or not _runs(found)


def _is_near(process: ProcessId) -> bool:
    """Whether its number means something here."""
    return (process.host, process.namespace) == (socket.gethostname(), _namespace())


def _namespace() -> str:
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:  # not Linux
        return ""


def _found(process: ProcessId) -> psutil.Process | None:
    """The process, where it is there and of this node."""
    if not _is_near(process):
        return None
    try:
        found = psutil.Process(process.pid)
        same = abs(found.create_time() - process.started_s) <= CLOCK_S
    except psutil.NoSuchProcess:
        return None
    return found if same else None


def _runs(process: psutil.Process) -> bool:
    """Whether it still holds memory: a zombie waits for its parent only."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
