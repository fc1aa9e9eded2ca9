"""The worker process of the reward pool: loads one verifier, then verifies what it is sent.

Started as ``python -P -m dynamo_megatron.reward.worker PARENT_PID MEMORY_LIMIT VERIFIER``. Standard
library only: a worker that imported torch would take seconds and gigabytes to replace.
"""

from __future__ import annotations

import ctypes
import importlib
import inspect
import io
import math
import os
import resource
import signal
import sys
from collections.abc import Callable
from numbers import Real
from typing import Any

from dynamo_megatron.reward.verification import Verification
from dynamo_megatron.reward.wire import FrameReader, encode_frame

EXIT_OUT_OF_MEMORY = 77
"""Exit status of a worker whose verification hit the memory limit."""

READY, FAILED = "ready", "failed"
"""First field of the one message that a worker sends of its own accord."""

MAX_PRINTED = 4096
"""Characters that the verifier of one worker may print: thousands of verifications follow."""

_PR_SET_PDEATHSIG = 1
_MAX_TEXT = 1000
_READ_BYTES = 1 << 20


def load_verifier(spec: str) -> Callable[[str, str, str], Any]:
    """Import ``module:function``.

    Raises:
        TypeError: what it names is no function of (response, answer, prompt).
        ImportError, AttributeError: it is not there.
    """
    module_name, _, name = spec.partition(":")
    function = getattr(importlib.import_module(module_name), name)
    if not callable(function):
        raise TypeError(f"{name} is a {type(function).__name__}, not a function")
    try:
        signature = inspect.signature(function)
    except ValueError:  # some built-in functions have none to check
        return function
    try:
        signature.bind("response", "answer", "prompt")
    except TypeError as error:
        raise TypeError(
            f"{name}{signature} cannot be called as f(response, answer, prompt): {error}"
        ) from error
    return function


def verify(
    verifier: Callable[[str, str, str], Any], response: str, answer: str, prompt: str
) -> tuple[str, float, bool, str, str]:
    """Run the verifier once.

    Returns:
        Status (``ok`` or ``error``), reward, formatted, extracted answer, failure message.

    Raises:
        MemoryError: the process is at its memory limit and has to be replaced.
    """
    try:
        result = verifier(response, answer, prompt)
        if not isinstance(result, Verification):
            result = Verification(reward=result)
        if not isinstance(result.reward, Real):
            raise TypeError(
                f"the verifier returned a {type(result.reward).__name__}, not a number: "
                f"{result.reward!r}"
            )
        reward = float(result.reward)
        if not math.isfinite(reward):
            raise ValueError(f"the verifier returned {reward}, which is not a finite reward")
        return "ok", reward, bool(result.formatted), str(result.extracted)[:_MAX_TEXT], ""
    except MemoryError:
        raise
    # BaseException: a verifier that calls sys.exit() has failed on this item, and only on it.
    except BaseException as error:
        return "error", 0.0, False, "", f"{type(error).__name__}: {error}"[:_MAX_TEXT]


def main(parent_pid: int, memory_limit: int, spec: str) -> None:
    """Serve until the parent closes the pipe or ends; never returns."""
    incoming, outgoing = _take_over_pipes()
    _end_with_parent(parent_pid)
    _limit_resources(memory_limit)
    try:
        verifier = load_verifier(spec)
    except BaseException as error:  # whatever its import does, the parent must hear of it
        _send(outgoing, [FAILED, f"{type(error).__name__}: {error}"[:_MAX_TEXT]])
        os._exit(1)
    own_pid = os.getpid()
    _send(outgoing, [READY, own_pid])
    reader = FrameReader()
    while data := os.read(incoming, _READ_BYTES):
        for chunk in reader.feed(data):
            for index, response, answer, prompt in chunk:
                result = verify(verifier, response, answer, prompt)
                if os.getpid() != own_pid:
                    os._exit(0)  # a child that the verifier forked must not answer as well
                # One frame an item, at once: the parent's clock restarts when it arrives.
                _send(outgoing, [index, *result])
    # No clean-up: a verifier's threads or exit handlers must not keep the process alive.
    os._exit(0)


def _take_over_pipes() -> tuple[int, int]:
    """Keep the pipes to the parent, and give the verifier's own input and output other ends."""
    incoming, outgoing = os.dup(0), os.dup(1)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(2, 1)  # a verifier that prints must not write into the protocol
    sys.stdout = sys.stderr = _FirstWords(MAX_PRINTED)
    return incoming, outgoing


class _FirstWords(io.TextIOBase):
    """What is printed goes to the error output, up to a limit."""

    encoding = "utf-8"
    errors = "backslashreplace"

    def __init__(self, limit: int) -> None:
        self._left = limit

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return 2

    def write(self, text: str, /) -> int:
        if self._left > 0:
            shown = text[: self._left]
            self._left -= len(shown)
            if not self._left:
                shown += f"... (a verifier printed more than {MAX_PRINTED} characters)\n"
            os.write(2, shown.encode(errors="backslashreplace"))
        return len(text)


def _end_with_parent(parent_pid: int) -> None:
    """Have the kernel kill this process when the parent ends, however it ends.

    The end of the pipe alone would not do: nobody reads it while a verification hangs.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:  # it ended before the call above
        os._exit(1)


def _limit_resources(memory_limit: int) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = memory_limit if hard == resource.RLIM_INFINITY else min(memory_limit, hard)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    # A verifier that crashes a thousand times must not fill the disk with core files.
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _send(pipe: int, message: Any) -> None:
    frame = memoryview(encode_frame(message))
    while frame:
        frame = frame[os.write(pipe, frame) :]


if __name__ == "__main__":
    try:
        main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
    except MemoryError:
        # Python may limp on after a MemoryError, but the next item would pay for it.
        os._exit(EXIT_OUT_OF_MEMORY)
    except (BrokenPipeError, KeyboardInterrupt):
        os._exit(0)
