"""Runs the interpreted checks of the Triton kernels, which need no GPU."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

CHECKS = Path(__file__).with_name("interpreted_checks.py")


@pytest.mark.slow
def test_the_kernels_are_right_in_tritons_interpreter():
    pytest.importorskip("triton")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", CHECKS],
        cwd=CHECKS.parents[3],
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
