"""Work beside the main thread that may never come back."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


def in_daemon(fn: Callable[[], T], name: str) -> Future[T]:
    """Run something in a thread of its own that keeps nobody waiting, not even this process's end.

    An executor's threads are waited for: one that calls a Ray which is gone would keep this process
    for ever.
    """
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(fn())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future
