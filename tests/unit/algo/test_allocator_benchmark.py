import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]


def test_the_allocator_benchmark_runs_and_its_rules_beat_equal_sizes(tmp_path):
    out = tmp_path / "allocator.json"
    subprocess.run(
        [sys.executable, "benchmarks/allocator.py", "--quick", "--variance", "--json", str(out)],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        check=True,
        capture_output=True,
        timeout=120,
    )
    numbers = json.loads(out.read_text())
    assert {row["num_prompts"] for row in numbers["times"]} == {1_000, 10_000, 100_000}
    bare = [row for row in numbers["variance"] if row["weights"] == "bare"]
    assert len(bare) == 3
    for row in bare:
        assert row["oracle"] < row["sqrt kkt"] < 1 and row["linear paper"] < 1
        # The optimal fill needs the standard deviation; with the variance it overshoots.
        assert row["sqrt kkt"] < row["linear kkt"]
