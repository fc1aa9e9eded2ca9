"""Run a test function on several gloo ranks: forked, on one machine, with a time limit.

Forking costs 0.2 to 0.8 s a test where spawning costs half a minute (every child imports torch
again). The store is a file, so parallel test runs cannot collide on a port.
"""

import faulthandler
import os
import pickle
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from multiprocessing import connection, get_context
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

# How long the other ranks may take to report after one failed, so that the first cause is not
# hidden behind a neighbour's "connection closed".
GRACE_S = 0.5


class RankFailed(AssertionError):
    """A rank raised, died or ran out of time; the message holds every rank's traceback."""


def run_on_ranks(
    fn: Callable[..., Any], world_size: int, *args: Any, timeout: float = 60.0
) -> list[Any]:
    """Call ``fn(*args)`` in ``world_size`` forked processes that share a gloo world group.

    ``fn`` asks ``dist.get_rank()`` who it is. It may be a closure: nothing is pickled on the way
    in. Each rank runs one thread, with ``RANK``, ``LOCAL_RANK`` and ``WORLD_SIZE`` set.

    Args:
        fn: The function; what it returns must be picklable.
        world_size: Number of ranks.
        *args: Passed to ``fn`` on every rank.
        timeout: Seconds for all ranks together, start included.

    Returns:
        What each rank returned, by rank.

    Raises:
        RankFailed: A rank raised (its traceback is in the message), died without a word, or did
            not finish in time (the message shows where each such rank was). No process is left.
    """
    torch.set_num_threads(1)  # forking after OpenMP has run several threads can hang the child
    context = get_context("fork")
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        pipes, processes = [], []
        for rank in range(world_size):
            receiver, sender = context.Pipe(duplex=False)
            process = context.Process(
                target=_rank_main,
                args=(fn, args, rank, world_size, Path(folder), timeout, sender),
                name=f"rank{rank}",
            )
            with warnings.catch_warnings():
                # Python >= 3.12 warns that the process has threads; the children use none of them.
                warnings.simplefilter("ignore", DeprecationWarning)
                process.start()
            sender.close()
            pipes.append(receiver)
            processes.append(process)
        try:
            results, failures = _collect(pipes, time.monotonic() + timeout)
        finally:
            for process in processes:
                process.join(GRACE_S)
                if process.is_alive():
                    process.kill()
                process.join()
        if failures or len(results) < world_size:
            raise RankFailed(_report(failures, results, processes, Path(folder), timeout))
    return [results[rank] for rank in range(world_size)]


def _rank_main(fn, args, rank, world_size, folder, timeout, sender) -> None:
    """The child: join the group, run, send ``(ok, payload)``."""
    stacks = (folder / f"stack{rank}").open("w")
    faulthandler.dump_traceback_later(max(timeout - 1.0, 0.5 * timeout), file=stacks)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            "gloo",
            store=dist.FileStore(str(folder / "store"), world_size),
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=timeout),
        )
        # A rank that returned while its peers still connect would break their connections.
        dist.barrier()
        message = (True, fn(*args))
        dist.destroy_process_group()
    except BaseException:
        message = (False, traceback.format_exc())
    faulthandler.cancel_dump_traceback_later()
    # Plain pickle: multiprocessing's own would pass tensors as handles that die with this process.
    sender.send_bytes(pickle.dumps(message))
    sender.close()


def _collect(pipes, deadline) -> tuple[dict[int, Any], dict[int, str]]:
    """Read the ranks' messages until all have spoken, one has failed, or time is up."""
    results: dict[int, Any] = {}
    failures: dict[int, str] = {}  # in order of arrival: the first is most likely the cause
    waiting = {pipe: rank for rank, pipe in enumerate(pipes)}
    while waiting:
        for pipe in connection.wait(list(waiting), max(deadline - time.monotonic(), 0.0)) or [None]:
            if pipe is None:  # time is up
                return results, failures
            rank = waiting.pop(pipe)
            try:
                ok, payload = pickle.loads(pipe.recv_bytes())
            except EOFError:
                ok, payload = False, "the process died without reporting (killed or crashed)"
            if ok:
                results[rank] = payload
            else:
                failures[rank] = payload
                deadline = min(deadline, time.monotonic() + GRACE_S)
    return results, failures


def _report(failures, results, processes, folder, timeout) -> str:
    """The message of `RankFailed`."""
    parts = [
        f"rank {rank} failed (exit code {processes[rank].exitcode}):\n{text}"
        for rank, text in failures.items()
    ]
    missing = [r for r in range(len(processes)) if r not in results and r not in failures]
    for rank in missing:
        stack = (folder / f"stack{rank}").read_text() if not failures else ""
        why = (
            "was still running when another failed"
            if failures
            else f"did not finish in {timeout} s"
        )
        parts.append(f"rank {rank} {why}\n{stack}")
    return "\n".join(parts)
