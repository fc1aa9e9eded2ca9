"""Ranks that die, freeze, fail or are slow, with real processes and real signals."""

import logging
import os
import re
import signal
import socket
import time
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import get_context
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from dynamo_megatron.parallel.control import ControlPlane
from dynamo_megatron.parallel.errors import DivergenceError, PeerError
from dynamo_megatron.parallel.heartbeat import PEER_LOST_EXIT_CODE

TIMEOUT_S = 2.0
LIMIT_S = 30.0


@dataclass
class Ended:
    """How one rank's process ended."""

    code: int | None
    log: str
    seconds: float


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


@contextmanager
def ranks_under_control(
    folder: Path, world_size: int, body: Callable, *, tcp: bool, collective_limit_s: float = 60.0
):
    """Fork ranks that run ``body(control)``; yields their processes."""
    torch.set_num_threads(1)
    port = free_port() if tcp else 0
    processes = [
        get_context("fork").Process(
            target=_rank, args=(folder, rank, world_size, body, port, collective_limit_s)
        )
        for rank in range(world_size)
    ]
    for process in processes:
        process.start()
    try:
        yield processes
    finally:
        for process in processes:
            if process.is_alive():
                process.kill()
            process.join()


def _rank(folder, rank: int, world_size: int, body: Callable, port: int, limit_s: float) -> None:
    logging.basicConfig(filename=folder / f"log{rank}", level=logging.INFO, force=True)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if port:
        store = dist.TCPStore(
            "127.0.0.1", port, world_size, rank == 0, timedelta(seconds=60), multi_tenant=True
        )
    else:
        store = dist.FileStore(str(folder / "store"), world_size)
    dist.init_process_group(
        "gloo",
        store=store,
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=limit_s),
    )
    try:
        with ControlPlane(store, group=dist.group.WORLD, timeout_s=TIMEOUT_S) as control:
            (folder / f"ready{rank}").touch()
            body(control)
    except Exception as error:
        logging.error("raised %s: %s", type(error).__name__, error)
        logging.shutdown()
        os._exit(1)
    logging.shutdown()
    os._exit(0)


def wait_until_ready(folder: Path, world_size: int) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not all((folder / f"ready{rank}").exists() for rank in range(world_size)):
        assert time.monotonic() < deadline, "the ranks did not start"
        time.sleep(0.02)
    time.sleep(0.5)  # into the body


def how_they_end(folder: Path, processes, ranks=None) -> dict[int, Ended]:
    """Wait for the processes (all, or the given ranks); a rank that hangs has code None."""
    start = time.monotonic()
    ended = {}
    for rank in ranks if ranks is not None else range(len(processes)):
        processes[rank].join(max(LIMIT_S - (time.monotonic() - start), 0))
        ended[rank] = Ended(
            code=processes[rank].exitcode,
            log=(folder / f"log{rank}").read_text(),
            seconds=time.monotonic() - start,
        )
    return ended


def in_a_collective(control: ControlPlane) -> None:
    control.set_phase("all-reduce")
    if control.rank == 1:
        time.sleep(60)
    dist.all_reduce(torch.ones(4))


def in_run_on_zero(control: ControlPlane) -> None:
    control.run_on_zero(lambda: time.sleep(60) or b"", "generate")


@pytest.mark.parametrize(
    "body,sign,tcp",
    [
        (in_a_collective, signal.SIGKILL, True),
        (in_a_collective, signal.SIGSTOP, False),
        (in_run_on_zero, signal.SIGKILL, False),
        (in_run_on_zero, signal.SIGSTOP, True),
    ],
)
def test_a_lost_rank_ends_all_others_with_its_name(tmp_path, body, sign, tcp):
    with ranks_under_control(tmp_path, 3, body, tcp=tcp) as processes:
        wait_until_ready(tmp_path, 3)
        os.kill(processes[1].pid, sign)
        ended = how_they_end(tmp_path, processes, ranks=(0, 2))
        pid = processes[1].pid
    phase = "all-reduce" if body is in_a_collective else "wait for rank 0: generate"
    for end in ended.values():
        assert end.code == PEER_LOST_EXIT_CODE, end.log
        assert end.seconds < 4 * TIMEOUT_S  # 1.4 on a quiet machine
        lines = [line for line in end.log.splitlines() if line.startswith("CRITICAL")]
        assert len(lines) == 1, end.log
        assert f"rank 1 (host {socket.gethostname()}, pid {pid}" in lines[0]
        assert f"last reported phase {phase!r}" in lines[0]


@pytest.mark.parametrize(
    "sign,tcp", [(signal.SIGKILL, True), (signal.SIGSTOP, True), (signal.SIGKILL, False)]
)
def test_losing_rank_zero_and_its_store_ends_all_others_with_its_name(tmp_path, sign, tcp):
    with ranks_under_control(tmp_path, 3, in_run_on_zero, tcp=tcp) as processes:
        wait_until_ready(tmp_path, 3)
        os.kill(processes[0].pid, sign)
        ended = how_they_end(tmp_path, processes, ranks=(1, 2))
        pid = processes[0].pid
    for end in ended.values():
        assert end.code == PEER_LOST_EXIT_CODE, end.log
        assert end.seconds < 4 * TIMEOUT_S  # 1.7 on a quiet machine
        lines = [line for line in end.log.splitlines() if line.startswith("CRITICAL")]
        assert len(lines) == 1, end.log
        assert f"rank 0 (host {socket.gethostname()}, pid {pid}" in lines[0]
        assert "last reported phase 'generate'" in lines[0]


@pytest.mark.parametrize("tcp", [False, True])
def test_an_exception_on_one_rank_ends_the_others_without_waiting_for_the_time_out(tmp_path, tcp):
    def body(control):
        control.set_phase("load data")
        if control.rank == 2:
            raise KeyError("no such column")
        time.sleep(60)

    with ranks_under_control(tmp_path, 3, body, tcp=tcp) as processes:
        ended = how_they_end(tmp_path, processes)
    assert ended[2].code == 1
    for rank in (0, 1):
        assert ended[rank].code == PEER_LOST_EXIT_CODE
        assert "rank 2" in ended[rank].log and "KeyError: 'no such column'" in ended[rank].log
        assert "last reported phase 'load data'" in ended[rank].log


def test_ranks_that_fail_together_each_end_by_their_own_exception(tmp_path):
    def body(control):
        time.sleep(control.rank * 0.2 * TIMEOUT_S)
        raise ValueError(f"the reason of rank {control.rank}")

    with ranks_under_control(tmp_path, 2, body, tcp=True) as processes:
        ended = how_they_end(tmp_path, processes)
    assert [end.code for end in ended.values()] == [1, 1]
    assert "the reason of rank 1" in ended[1].log and "CRITICAL" not in ended[1].log


def test_a_failed_rank_may_take_longer_to_close_than_the_others_to_end(tmp_path):
    def body(control):
        error = ValueError(f"the reason of rank {control.rank}")
        control.fail(error)
        if control.rank == 0:
            time.sleep(2.5 * TIMEOUT_S)  # the others are gone by then
        raise error

    with ranks_under_control(tmp_path, 2, body, tcp=True) as processes:
        ended = how_they_end(tmp_path, processes)
    assert [end.code for end in ended.values()] == [1, 1]
    assert "the reason of rank 0" in ended[0].log and "CRITICAL" not in ended[0].log


def test_an_exception_in_rank_zeros_work_is_raised_on_every_rank(tmp_path):
    def body(control):
        def fails() -> bytes:
            raise FileNotFoundError("model is missing")

        with pytest.raises(FileNotFoundError if control.rank == 0 else PeerError) as caught:
            control.run_on_zero(fails, "load")
        assert "model is missing" in str(caught.value)
        if control.rank != 0:
            assert caught.value.rank == 0 and caught.value.error_type == "FileNotFoundError"
        assert control.run_on_zero(lambda: b"next", "go on") == b"next"

    with ranks_under_control(tmp_path, 2, body, tcp=True) as processes:
        ended = how_they_end(tmp_path, processes)
    assert [end.code for end in ended.values()] == [0, 0], [end.log for end in ended.values()]


def test_slow_work_is_waited_for_outside_collectives_and_reaches_every_rank(tmp_path):
    def body(control):
        def slow() -> bytes:
            time.sleep(2 * TIMEOUT_S)  # longer than a rank may be silent or a collective may last
            return bytes(range(256)) * 1000

        for call in range(20):
            assert control.run_on_zero(lambda n=call: str(n).encode(), "quick") == b"%d" % call
        assert control.run_on_zero(slow, "generate") == bytes(range(256)) * 1000
        time.sleep(control.rank * 0.75 * TIMEOUT_S)  # leaving far apart trips nobody

    with ranks_under_control(
        tmp_path, 4, body, tcp=True, collective_limit_s=1.5 * TIMEOUT_S
    ) as processes:
        ended = how_they_end(tmp_path, processes)
    assert [end.code for end in ended.values()] == [0] * 4, [end.log for end in ended.values()]
    assert "CRITICAL" not in "".join(end.log for end in ended.values())


def test_a_rank_busy_in_torch_for_longer_than_the_time_out_is_not_lost(tmp_path):
    def body(control):
        if control.rank == 1:
            square = torch.ones(400, 400)
            until = time.monotonic() + 1.5 * TIMEOUT_S
            while time.monotonic() < until:
                square = square @ square * 0.0 + 1.0
        dist.barrier()

    with ranks_under_control(tmp_path, 2, body, tcp=True) as processes:
        ended = how_they_end(tmp_path, processes)
    assert [end.code for end in ended.values()] == [0, 0], [end.log for end in ended.values()]


def test_ranks_at_different_calls_are_told_apart(tmp_path):
    def body(control):
        if control.rank == 0:
            control.run_on_zero(lambda: b"a", "score")
        else:
            with pytest.raises(DivergenceError, match=r"call 1 on rank 0, 'save'.*call 1, 'score'"):
                control.run_on_zero(lambda: b"a", "save")
            raise SystemExit(0)

    with ranks_under_control(tmp_path, 2, body, tcp=False) as processes:
        ended = how_they_end(tmp_path, processes, ranks=(1,))
    assert ended[1].code == 0, ended[1].log


def test_a_collective_failing_for_another_reason_is_reported_as_it_is(tmp_path):
    def body(control):
        if control.rank == 1:
            raise RuntimeError("gloo is unhappy")
        time.sleep(60)

    with ranks_under_control(tmp_path, 2, body, tcp=False) as processes:
        ended = how_they_end(tmp_path, processes)
    assert ended[1].code == 1
    assert ended[0].code == PEER_LOST_EXIT_CODE
    assert re.search("rank 1 .* failed: RuntimeError: gloo is unhappy", ended[0].log)
