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
