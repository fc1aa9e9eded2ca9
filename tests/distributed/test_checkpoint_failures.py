"""Full disks, killed saves and unshared folders: every rank says the same, nothing old is lost."""

from __future__ import annotations

import multiprocessing.process
import os
import resource
import signal
import subprocess
import sys

import psutil
import pytest
import torch.distributed as dist

from dynamo_megatron.checkpoint.errors import CheckpointError
from tests.policies import Layout, write_qwen3
from tests.ranks import RankFailed, run_on_ranks
from tests.unit.checkpoint.helpers import assert_same, checkpointer, everything, policy, train

TWO = Layout(data=2)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return write_qwen3(tmp_path_factory.mktemp("qwen3"))


def _names(folder):
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("full_rank", [0, 1])
def test_a_rank_that_cannot_write_fails_the_save_on_all_ranks_alike(full_rank, model_dir, tmp_path):
    """Files of this rank may not exceed 8 KiB: the kernel refuses the write, as with a quota."""

    def work():
        with policy(model_dir, TWO) as run:
            train(run, range(1))
            saved = checkpointer(run, tmp_path)
            old = saved.save(1, {"step": 1})
            train(run, range(1, 2))
            before = everything(run)
            unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
            if dist.get_rank() == full_rank:
                resource.setrlimit(resource.RLIMIT_FSIZE, (8 << 10, unlimited[1]))
            with pytest.raises(CheckpointError) as caught:
                saved.save(2, {"step": 2})
            resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
            dist.barrier()
            left, latest = _names(tmp_path), saved.latest()
            assert_same(everything(run), before)
            dist.barrier()
            saved.save(2, {"step": 2})
            return str(caught.value), left, latest == old, dict(saved.load(saved.latest()))

    ranks = run_on_ranks(work, 2, timeout=180)
    message = ranks[0][0]
    assert ranks[1][0] == message
    assert f"failed on rank {full_rank}" in message
    assert "File too large" in message and "free some space" in message
    assert [rank[1:] for rank in ranks] == [(["step_00000001"], True, {"step": 2})] * 2


def test_a_full_disk_is_named_and_the_save_succeeds_once_there_is_space(model_dir, tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(disk)], capture_output=True
    )
    if mounted.returncode:
        pytest.skip(f"a small file system cannot be mounted here: {mounted.stderr.decode()}")

    def work():
        with policy(model_dir, TWO) as run:
            train(run, range(1))
            saved = checkpointer(run, disk, keep=1)
            saved.save(1, {})
            filler = disk / "filler"
            if dist.get_rank() == 0:
                statistics = os.statvfs(disk)
                filler.write_bytes(bytes(statistics.f_bavail * statistics.f_frsize - (64 << 10)))
            dist.barrier()
            with pytest.raises(CheckpointError) as caught:
                saved.save(2, {})
            dist.barrier()
            left = _names(disk)
            dist.barrier()
            if dist.get_rank() == 0:
                filler.unlink()
            dist.barrier()
            return str(caught.value), left, saved.save(2, {}).name, _names(disk)

    try:
        ranks = run_on_ranks(work, 2, timeout=180)
    finally:
        subprocess.run(["umount", str(disk)], check=True)
    assert ranks[0] == ranks[1]
    message, left, name, after = ranks[0]
    assert "No space left on device" in message and "free some space" in message
    assert left == ["filler", "step_00000001"]
    assert (name, after) == ("step_00000002", ["step_00000002"])


def _kill_at(event: str, argument: int, ending: str) -> None:
    """End this process with SIGKILL just before the system call that matches."""

    def hook(name, arguments):
        if name == event and str(arguments[argument]).endswith(ending):
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)


POINTS = {
    "tensors half written": ("open", 0, "__0_0.distcp"),
    "index not written": ("os.rename", 1, "/.metadata"),
    "everything but the marker": ("os.rename", 1, "complete.json"),
}


@pytest.mark.parametrize("point", POINTS)
def test_kill_9_in_a_save_loses_nothing_but_that_save(point, model_dir, tmp_path, caplog):
    def killed():
        with policy(model_dir, TWO) as run:
            train(run, range(1))
            saved = checkpointer(run, tmp_path)
            saved.save(1, {"step": 1})
            train(run, range(1, 2))
            if dist.get_rank() == 0:
                _kill_at(*POINTS[point])
            saved.save(2, {"step": 2})

    def resumed():
        with policy(model_dir, TWO) as run:
            saved = checkpointer(run, tmp_path)
            latest = saved.latest()
            state = dict(saved.load(latest))
            dist.barrier()
            left = _names(tmp_path)
            dist.barrier()
            train(run, range(1, 2))
            saved.save(2, {"step": 2})
            return latest.name, state, left, _names(tmp_path), everything(run)

    def uninterrupted():
        with policy(model_dir, TWO) as run:
            train(run, range(2))
            return everything(run)

    with pytest.raises(RankFailed, match="died without reporting"):
        run_on_ranks(killed, 2)
    assert psutil.Process().children(recursive=True) == []
    want = run_on_ranks(uninterrupted, 2)
    for (latest, state, left, after, got), end in zip(run_on_ranks(resumed, 2), want, strict=True):
        assert (latest, state) == ("step_00000001", {"step": 1})
        assert len(left) == 2 and left[1].startswith("step_00000002.tmp-")
        assert after == ["step_00000001", "step_00000002"]
        assert_same(got, end)


def test_kill_9_between_the_marker_and_the_renaming_loses_nothing(model_dir, tmp_path):
    def killed():
        with policy(model_dir) as run:
            saved = checkpointer(run, tmp_path)
            saved.save(1, {"step": 1})
            _kill_at("os.rename", 1, "step_00000002")
            saved.save(2, {"step": 2})

    def resumed():
        with policy(model_dir) as run:
            saved = checkpointer(run, tmp_path, keep=2)
            latest = saved.latest()
            state = dict(saved.load(latest))
            saved.save(3, {"step": 3})
            return latest.name, state, _names(tmp_path)

    with pytest.raises(RankFailed, match="died without reporting"):
        run_on_ranks(killed, 1)
    ((latest, state, after),) = run_on_ranks(resumed, 1)
    assert latest.startswith("step_00000002.tmp-") and state == {"step": 2}
    assert after == [latest, "step_00000003"]


def test_a_save_starts_no_process(model_dir, tmp_path, monkeypatch):
    def refuse(process):
        raise AssertionError(f"{process} was started")

    def work():
        monkeypatch.setattr(multiprocessing.process.BaseProcess, "start", refuse)
        with policy(model_dir, TWO) as run:
            checkpointer(run, tmp_path).save(1, {})

    run_on_ranks(work, 2, timeout=180)


def test_a_folder_that_the_ranks_do_not_share_is_refused_when_saving(model_dir, tmp_path):
    def work():
        with policy(model_dir, TWO) as run:
            saved = checkpointer(run, tmp_path / f"disk of rank {dist.get_rank()}")
            with pytest.raises(CheckpointError) as caught:
                saved.save(1, {})
            return str(caught.value), saved.latest()

    ranks = run_on_ranks(work, 2, timeout=180)
    assert ranks[0] == ranks[1]
    assert "not on a file system that all ranks share" in ranks[0][0]
    assert ranks[0][1] is None


def test_rank_0_decides_which_checkpoint_is_the_latest(model_dir, tmp_path):
    def work():
        with policy(model_dir, TWO) as run:
            checkpointer(run, tmp_path / "0").save(7, {})
            mine = checkpointer(run, tmp_path / str(dist.get_rank()))
            return mine.latest().name

    assert run_on_ranks(work, 2, timeout=180) == ["step_00000007"] * 2
