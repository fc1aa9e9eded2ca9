"""Every launch script, as a user calls it, with the real torchrun."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.launch import metrics_of

ROOT = Path(__file__).parents[2]
SCRIPTS = ROOT / "launchers" / "torchrun"
SHORT = [
    "--config",
    str(ROOT / "configs" / "quickstart.yaml"),
    "run.num_steps=1",
    "data.prompts_per_step=4",
    "data.heldout.0.num_problems=4",
    "checkpoint.export_hf=false",
    "observe.plots=false",
]
pytestmark = pytest.mark.slow


def environment() -> dict[str, str]:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return {**os.environ, "PATH": path, "OMP_NUM_THREADS": "1"}


def start(arguments: list[str], **more: str) -> subprocess.Popen:
    return subprocess.Popen(
        arguments,
        cwd=ROOT,
        env=environment() | more,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.mark.parametrize("script", ["tp2.sh", "tp2_pp2.sh", "tp2_dp2.sh"])
def test_one_machine(tmp_path, script):
    run = start([str(SCRIPTS / script), *SHORT, f"run.dir={tmp_path / 'run'}"])
    output, _ = run.communicate(timeout=280)
    assert run.returncode == 0, output
    assert "1 of 1 steps done" in output
    assert metrics_of(tmp_path / "run")[0]["rollout/num"] == 4 * 8


def test_several_machines(tmp_path):
    """Two agents on the loopback stand for two machines."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    script = str(SCRIPTS / "multi_node.sh")
    runs = [
        start(
            [script, "2", str(node), "127.0.0.1", "1", *SHORT, f"run.dir={tmp_path / 'run'}"],
            MASTER_PORT=port,
        )
        for node in range(2)
    ]
    outputs = [run.communicate(timeout=280)[0] for run in runs]
    assert [run.returncode for run in runs] == [0, 0], "\n".join(outputs)
    assert "1 of 1 steps done" in outputs[0]
    assert metrics_of(tmp_path / "run")[0]["rollout/num"] == 4 * 8


def rank_process(agent: subprocess.Popen, rank: int) -> psutil.Process:
    """The process of a rank below a torchrun agent."""
    for process in psutil.Process(agent.pid).children(recursive=True):
        if process.environ().get("RANK") == str(rank):
            return process
    raise AssertionError(f"no process of rank {rank}")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=lambda n: n.name)
def test_a_lost_rank_is_named_within_a_minute(tmp_path, number):
    run_dir = tmp_path / "run"
    run = start([str(SCRIPTS / "tp2.sh"), *SHORT, f"run.dir={run_dir}", "run.num_steps=1000"])
    deadline = time.monotonic() + 120
    while not (run_dir / "metrics.jsonl").exists() or not metrics_of(run_dir):
        assert time.monotonic() < deadline and run.poll() is None
        time.sleep(0.1)
    rank_process(run, 1).send_signal(number)
    began = time.monotonic()
    output, _ = run.communicate(timeout=100)
    assert time.monotonic() - began < 60
    assert run.returncode != 0
    assert "rank 1 (host" in output, output
    # Its name is what is said, not the error of a collective that its loss caused.
    assert "Traceback" not in (run_dir / "run.log").read_text()


def test_every_script_is_tested():
    assert {path.name for path in SCRIPTS.glob("*.sh")} == {
        "tp2.sh",
        "tp2_pp2.sh",
        "tp2_dp2.sh",
        "multi_node.sh",
    }
