"""A training with replicas ends, whatever ends it, with a reason and without leftovers.

Under torchrun with two ranks; what listens or lives is looked up in the machine's own tables.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import socketserver
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.tier.faults import ROOT, Run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]


def test_a_run_leaves_nothing_and_listens_on_the_loopback_only(tmp_path):
    options = {"run.num_steps": 3, "rollout.vllm.replicas": 2, "rollout.vllm.tensor": 2}
    with Run(tmp_path, options) as run:
        run.until_step(1)
        run.note_shared_memory()
        assert any("ray::Replica" in process.name() for process in run.processes())
        assert run.foreign_listeners() == []
        assert run.ended(120) == 0, run.output
        assert run.steps() == 3
        assert run.left_files() == []


@pytest.mark.parametrize("how", ["ctrl-c", "sigterm"])
def test_a_stopped_run_has_a_checkpoint_and_leaves_nothing(tmp_path, how):
    with Run(tmp_path) as run:
        run.until_step(1)
        run.note_shared_memory()
        if how == "ctrl-c":
            os.killpg(run.process.pid, signal.SIGINT)
        else:
            run.process.send_signal(signal.SIGTERM)
        run.ended()
        done = run.steps()
        assert (run.run_dir / "checkpoints" / f"step_{done:08d}").is_dir()
        assert f"stopping on a signal after {done} of 500 steps" in run.output
        assert run.left_files() == []
    if how == "ctrl-c":
        return
    with Run(tmp_path, {"run.num_steps": done + 1, "run.resume": "always"}) as again:
        assert again.ended(240) == 0, again.output
        assert again.steps() == done + 1
        assert f"{done} steps done" in again.output


def test_a_killed_rank_zero_leaves_no_process(tmp_path):
    """Its temporary folder stays until the next start: nobody is left to remove it."""
    with Run(tmp_path) as run:
        run.until_step(1)
        run.note_shared_memory()
        run.rank(0).kill()
        assert run.ended() != 0
        assert not any(name.startswith("/dev/shm") for name in run.left_files())


@pytest.mark.parametrize("part", ["raylet", "gcs_server"])
def test_the_end_of_ray_ends_the_run_with_its_reason(tmp_path, part):
    with Run(tmp_path) as run:
        run.until_step(1)
        run.note_shared_memory()
        run.named(part).kill()
        assert run.ended(120) != 0
        assert "Ray is gone: " in run.output
        assert "rank 1 stops: " in run.output or "rank 0" in run.output
        assert "Ray is gone: " in (run.run_dir / "run.log").read_text()


def test_an_error_in_the_trainer_is_said_first_and_leaves_nothing(tmp_path):
    with Run(tmp_path, {"rollout.vllm.probe_tolerance": 1e-12}) as run:
        assert run.ended(240) == 1
        assert "nats" in (run.run_dir / "run.log").read_text()
        assert run.left_files() == []


def test_a_cluster_that_is_not_there_ends_the_run(tmp_path):
    with Run(tmp_path, {"rollout.vllm.ray_address": "127.0.0.1:1"}) as run:
        assert run.ended(180) == 1
        assert "no Ray answers at rollout.vllm.ray_address=127.0.0.1:1" in run.output
        assert "rank 1 stops: " in run.output


def test_a_port_that_another_program_has_taken_ends_the_run(tmp_path):
    class Web(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            self.rfile.readline()
            self.wfile.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Web) as web:
        threading.Thread(target=web.serve_forever, daemon=True).start()
        address = f"127.0.0.1:{web.server_address[1]}"
        with Run(tmp_path, {"rollout.vllm.ray_address": address}) as run:
            assert run.ended(180) == 1
            assert f"no Ray answers at rollout.vllm.ray_address={address}" in run.output
            assert "it is another program" in run.output
            assert "rank 1 stops: " in run.output
        web.shutdown()


@pytest.fixture(scope="module")
def cluster() -> Iterator[tuple[str, dict[str, str]]]:
    """Address of a Ray of one CPU that somebody else started, and how it is trusted."""
    folder = Path("/tmp") / f"ray-{os.getpid()}"  # its sockets' paths must be short
    trust = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "0" * 32}
    ray = str(Path(sys.executable).parent / "ray")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    options = ["--node-ip-address=127.0.0.1", f"--port={port}", "--num-cpus=1"]
    options += [f"--temp-dir={folder}", "--include-dashboard=false", "--disable-usage-stats"]
    head = subprocess.Popen(
        [ray, "start", "--head", "--block", *options],
        env=os.environ | trust,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        assert any("--block" in line for line in head.stdout), head.poll()
        yield f"127.0.0.1:{port}", trust
    finally:
        for process in psutil.Process(head.pid).children(recursive=True):
            process.kill()
        head.kill()
        head.communicate()
        shutil.rmtree(folder, ignore_errors=True)


JOIN = """
import json, sys
from dynamo_megatron.assets import TINY_POLICY
from dynamo_megatron.rollout.errors import RolloutError
from tests.tier.conftest import prompt_of, sizes_of, tier

address, replicas = sys.argv[1], int(sys.argv[2])
try:
    with tier(TINY_POLICY, ray_address=address, replicas=replicas, load_weights=True,
              start_timeout_s=120.0 if replicas == 1 else 5.0) as engine:
        prompts = [prompt_of("p", (3, 4, 5))]
        found = engine.generate(prompts, sizes_of(prompts, [4]), step=0, temperature=1.0, seed=1)
        print("sampled", len(found))
except RolloutError as error:
    print("refused:", error)
else:
    import ray
    ray.init(address=address, logging_level="ERROR")
    from ray.util import placement_group_table
    print("placements", {group["state"] for group in placement_group_table().values()})
    print("free", ray.available_resources().get("CPU"))
"""
"""A process that joins a cluster, as rank 0 does; at most one Ray a process."""


def join(address: str, trust: dict[str, str], replicas: int = 1) -> str:
    done = subprocess.run(
        [sys.executable, "-c", JOIN, address, str(replicas)],
        cwd=ROOT,
        env=os.environ | trust | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_cluster_that_is_joined_gets_its_place_back(cluster):
    said = join(*cluster)
    assert "sampled 4" in said
    assert "placements {'REMOVED'}" in said and "free 1.0" in said


def test_more_replicas_than_the_cluster_has_room_for_are_refused(cluster):
    said = join(*cluster, replicas=3)
    assert "refused: Ray has no room for rollout.vllm.replicas=3 with 1 CPU each" in said


def test_a_wrong_token_is_refused(cluster):
    address, trust = cluster
    said = join(address, trust | {"RAY_AUTH_TOKEN": "1" * 32})
    assert f"refused: no Ray answers at rollout.vllm.ray_address={address}" in said
    assert "RAY_AUTH_TOKEN" in said
