"""Run a function in a forked process without a process group of its own."""

from __future__ import annotations

import pickle
import traceback
import warnings
from collections.abc import Callable
from multiprocessing import get_context
from typing import Any

import torch


def in_child(fn: Callable[[], Any], *, timeout: float = 120.0) -> Any:
    """What ``fn`` returns, or what it raises, in a forked process.

    Conversions make Megatron-Core's groups; those of the tests' own process stay unmade, since
    other tests fork it.
    """
    torch.set_num_threads(1)
    context = get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_child, args=(fn, sender))
    with warnings.catch_warnings():
        # Megatron-Core's own, about its arguments; and Python >= 3.12's, about threads.
        warnings.simplefilter("ignore", DeprecationWarning)
        process.start()
    sender.close()
    try:
        if not receiver.poll(timeout):
            raise AssertionError(f"the child did not finish in {timeout} s")
        value, error = pickle.loads(receiver.recv_bytes())
    except EOFError:
        raise AssertionError("the child died without a word") from None
    finally:
        process.join(1.0)
        if process.is_alive():
            process.kill()
            process.join()
    if error is not None:
        raise error
    return value


def _child(fn: Callable[[], Any], sender) -> None:
    torch.set_num_threads(1)
    try:
        message = (fn(), None)
    except BaseException as error:
        error.add_note(traceback.format_exc())
        message = (None, error)
    sender.send_bytes(pickle.dumps(message))
    sender.close()
