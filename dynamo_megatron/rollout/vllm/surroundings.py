"""What Ray's start would change in this process, kept as it is."""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager


@contextmanager
def quiet_start() -> Iterator[None]:
    """Keep Ray's hands off this process's signals, and its words off the terminal."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # A call that nobody collects belongs to a replica that is lost; that is said in our words.
    os.environ.setdefault("RAY_IGNORE_UNHANDLED_ERRORS", "1")
    # Ray's 15 would let anything else on the node keep a replica waiting.
    os.environ.setdefault("RAY_worker_niceness", "0")
    main = threading.current_thread() is threading.main_thread()
    kept = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    before = logging.getLogger("ray").level
    logging.getLogger("ray").setLevel(logging.ERROR)
    try:
        yield
    finally:
        logging.getLogger("ray").setLevel(before)
        if main:
            for number, handler in kept.items():
                signal.signal(number, handler)


@contextmanager
def visible(gpu_ids: Sequence[str]) -> Iterator[None]:
    """While Ray starts: the GPUs that it may give out. This process keeps its own."""
    before = os.environ.get("CUDA_VISIBLE_DEVICES")
    if gpu_ids:
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpu_ids)
    try:
        yield
    finally:
        if gpu_ids and before is None:
            del os.environ["CUDA_VISIBLE_DEVICES"]
        elif before is not None:
            os.environ["CUDA_VISIBLE_DEVICES"] = before
