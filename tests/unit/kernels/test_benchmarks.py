"""The benchmark programs of the token statistics run, small and on a CPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


def _rows(program, flag, folder):
    done = subprocess.run(
        [sys.executable, f"benchmarks/{program}", flag, "--json", folder / "rows.json"],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads((folder / "rows.json").read_text())


@pytest.mark.slow
def test_cpu_benchmark_counts_one_collective_where_the_usual_ops_have_six(tmp_path):
    rows = {row["name"]: row for row in _rows("token_stats.py", "--quick", tmp_path)}
    assert rows["token_stats (H, Q)"]["collectives"] == 1
    assert rows["token_stats (H, Q)"]["bytes_sent_per_token"] == 24
    assert rows["usual, float32"]["collectives"] == 6
    assert rows["usual + Q bolted on"]["collectives"] == 9


@pytest.mark.slow
def test_gpu_benchmark_passes_its_own_checks_in_the_interpreter(tmp_path):
    pytest.importorskip("triton")
    rows = _rows("token_stats_gpu.py", "--smoke", tmp_path)
    kinds = {row["kind"] for row in rows}
    assert kinds == {"run", "check", "check head", "sweep", "compare", "head"}
    assert all(row["passed"] for row in rows if "passed" in row)
    assert not [row for row in rows if "failed" in row]
