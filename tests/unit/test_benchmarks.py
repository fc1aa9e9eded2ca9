"""The benchmarks that are not tested beside their subject run, and write what they print."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_step_overhead_runs_quickly_and_writes_its_figures(tmp_path):
    out = tmp_path / "figures.json"
    run = subprocess.run(
        [sys.executable, "benchmarks/step_overhead.py", "--quick", "--json", str(out)],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    figures = json.loads(out.read_text())
    assert figures["ratio_low"] <= figures["ratio"] <= figures["ratio_high"]
    assert f"{figures['ratio']:.3f}" in run.stdout


def test_idle_places_are_counted_until_the_last_request_starts(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    from rollout import idle_shares

    from dynamo_megatron.rollout.vllm.engine import Timing

    # Two replicas of one place. The first holds its second request from 1, and starts it at 4.
    timings = [
        Timing(0, started_s=0.0, finished_s=4.0, tokens=1),
        Timing(0, started_s=1.0, finished_s=8.0, tokens=1),
        Timing(1, started_s=0.0, finished_s=3.0, tokens=1),
    ]
    # Until 4: of 8 place seconds 7 are used. Until 8: of 16 it is 11.
    assert idle_shares(timings, 1) == (1 / 8, 5 / 16)


def test_the_rollout_benchmark_can_be_asked_for_each_of_its_parts():
    run = subprocess.run(
        [sys.executable, "benchmarks/rollout.py", "--help"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    assert "--part {sync,throughput,idle}" in run.stdout
