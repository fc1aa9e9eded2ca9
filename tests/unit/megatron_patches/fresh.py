"""Run a function in a process that has torch but not megatron-core.

What a patch prevents can only be seen where the patch was left out, and megatron-core is imported
once per process. Starting Python and torch for every such case costs seconds, so one server has
torch imported and forks a child for each call.
"""

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]


@dataclass(frozen=True)
class Outcome:
    """What a call came to: its value, or the text ``ErrorType: message``."""

    value: Any = None
    error: str | None = None


class FreshProcesses:
    """Client of the server: ``call`` it, ``close`` it."""

    def __init__(self) -> None:
        self._server = subprocess.Popen(
            [sys.executable, "-m", __name__],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def call(self, function: Callable[..., Any], *args: Any) -> Outcome:
        """Run ``function(*args)`` in a new process; arguments and value travel as JSON."""
        request = [function.__module__, function.__qualname__, args]
        self._server.stdin.write(json.dumps(request) + "\n")
        self._server.stdin.flush()
        return Outcome(**json.loads(self._server.stdout.readline()))

    def close(self) -> None:
        self._server.stdin.close()
        self._server.wait()
        self._server.stdout.close()


def _serve() -> None:
    import torch

    torch.set_num_threads(1)  # forking after OpenMP has run several threads can hang the child
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what the function prints must not look like a reply
    for line in sys.stdin:
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            os.write(writer, json.dumps(_run(*json.loads(line))).encode())
            os._exit(0)
        os.close(writer)
        with os.fdopen(reader) as pipe:
            reply = pipe.read()
        status = os.waitpid(child, 0)[1]
        print(reply or json.dumps({"error": f"died with wait status {status}"}), file=replies)


def outcome_of(function: Callable[..., Any], *args: Any) -> dict[str, Any]:
    """Call a function; what it returned or raised, as the fields of an ``Outcome``."""
    try:
        return {"value": function(*args)}
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}


def _run(module: str, function: str, args: list[Any]) -> dict[str, Any]:
    return outcome_of(lambda: getattr(importlib.import_module(module), function)(*args))


if __name__ == "__main__":
    _serve()
