"""A lost replica's process is ended for certain, and no other."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace

import psutil
import pytest

from dynamo_megatron.rollout.vllm.processes import ProcessId, end_process, is_gone, own_process

DEAF = """
import signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
print(child.pid, flush=True)
time.sleep(60)
"""


@contextmanager
def deaf() -> Iterator[tuple[ProcessId, psutil.Process]]:
    """A process that ignores requests to end, and its child."""
    with subprocess.Popen([sys.executable, "-c", DEAF], stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            child = psutil.Process(int(process.stdout.readline()))
            started = psutil.Process(process.pid).create_time()
            yield replace(own_process(), pid=process.pid, started_s=started), child
        finally:
            process.kill()
            with suppress(psutil.NoSuchProcess):
                child.kill()


def runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_a_process_and_what_it_started_end():
    with deaf() as (process, child):
        end_process(process)
        assert not runs(process.pid) and not runs(child.pid)
        assert is_gone(process)
        end_process(process)  # there is nothing left to do


@pytest.mark.parametrize(
    "other", [{"host": "another-node"}, {"namespace": "pid:[1]"}, {"started_s": 1_000_000.0}]
)
def test_a_process_that_only_has_the_number_is_left_alone(other):
    with deaf() as (process, child):
        end_process(replace(process, **other))
        assert is_gone(replace(process, **other)) == ("started_s" in other)
        assert not is_gone(process)
        assert runs(process.pid) and runs(child.pid)


def test_this_process_is_known_and_left_alone():
    own = own_process()
    assert (own.host, own.pid) == (socket.gethostname(), os.getpid())
    end_process(own)


def test_one_that_cannot_be_killed_is_named(monkeypatch):
    with deaf() as (process, child), monkeypatch.context() as patched:
        patched.setattr(psutil.Process, "kill", lambda self: None)
        with pytest.raises(
            RuntimeError, match=rf"process {process.pid}, {child.pid} on .* did not end"
        ):
            end_process(process, timeout_s=0.2)
