"""Verifiers for the pool's tests: well-behaved, failing, hanging and dying ones.

What each call does is read from the response, so that one pool meets all of them.
"""

import ctypes
import os
import signal
import sys
import time

from dynamo_megatron.reward.verification import Verification

NOT_A_FUNCTION = 3


def length(response: str, answer: str, prompt: str) -> float:
    return float(len(response))


def echo(response: str, answer: str, prompt: str) -> Verification:
    """The code points of what arrived, to compare with what was sent."""
    points = ",".join(f"{ord(c):x}" for c in response[:20] + "|" + answer + "|" + prompt)
    return Verification(reward=float(len(response)), formatted=True, extracted=points)


def same_text(response: str, answer: str, prompt: str) -> Verification:
    """Right is the reference itself; a question mark cannot be verified."""
    if response == "?":
        raise ValueError("no answer")
    return Verification(reward=float(response == answer), formatted=True, extracted=response)


def two_arguments(response: str, answer: str) -> float:
    return 0.0


def behave(response: str, answer: str, prompt: str):
    """Do what the first word of the response says; the second is an argument."""
    action, _, argument = response.partition(" ")
    return _ACTIONS[action](argument)


def _value(argument: str):
    return {
        "true": True,
        "int": 2,
        "nan": float("nan"),
        "inf": float("inf"),
        "none": None,
        "text": "1.0",
        "list": [1.0],
        "overflow": 10**400,
    }[argument]


def _raise(argument: str) -> float:
    raise ZeroDivisionError(argument)


def _exit(argument: str) -> float:
    sys.exit(int(argument))


def _die(argument: str) -> float:
    os._exit(int(argument))


def _segfault(argument: str) -> float:
    ctypes.string_at(0)
    return 1.0


def _hang(argument: str) -> float:
    # In C code that holds the interpreter lock: no Python signal handler or thread could stop it.
    return float(sum(iter(int, 1)))


def _sleep(argument: str) -> float:
    time.sleep(float(argument))
    return 1.0


def _die_once(path: str) -> float:
    """Die on the first call, recorded in a file; succeed on the second."""
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return 1.0
    os.kill(os.getpid(), signal.SIGKILL)
    return 0.0


def _mark(path: str) -> float:
    """Leave a file, so that others see that this verification was done."""
    os.close(os.open(path, os.O_CREAT | os.O_EXCL))
    return 1.0


def _eat_memory(argument: str) -> float:
    kept = []
    while True:
        kept.append(bytearray(1 << 24))


def _print(argument: str) -> float:
    print(argument)
    sys.stdout.flush()
    os.write(1, b"\0\0\0\0\0\0\0\3[1]")
    return 1.0


def _read_input(argument: str) -> float:
    return float(len(sys.stdin.read()))


def _leave_child_and_die(path: str) -> float:
    """Fork a child that keeps every pipe open, then die; the child's pid goes to a file."""
    child = os.fork()
    if child == 0:
        time.sleep(60)
    with open(path, "w") as file:
        file.write(str(child))
    os._exit(9)


def _fork_through(argument: str) -> float:
    """Let a forked child return through the worker's own loop, a moment later."""
    if os.fork() == 0:
        time.sleep(0.2)
    return 5.0


def _modules(argument: str) -> Verification:
    heavy = sorted({"torch", "numpy", "transformers", "megatron", "pydantic"} & set(sys.modules))
    return Verification(reward=float(len(sys.modules)), extracted=",".join(heavy))


_ACTIONS = {
    "value": _value,
    "raise": _raise,
    "exit": _exit,
    "die": _die,
    "segfault": _segfault,
    "hang": _hang,
    "sleep": _sleep,
    "die_once": _die_once,
    "mark": _mark,
    "eat_memory": _eat_memory,
    "print": _print,
    "read_input": _read_input,
    "leave_child": _leave_child_and_die,
    "fork": _fork_through,
    "modules": _modules,
}
