"""Runs the memory checks in a process of their own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

CHECKS = Path(__file__).with_name("memory_checks.py")


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_memory_stays_within_its_bounds():
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-s", "-p", "no:cacheprovider", CHECKS],
        cwd=CHECKS.parents[3],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    print(done.stdout)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
