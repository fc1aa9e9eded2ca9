"""Runs the checks that import vLLM or Ray, which change the process that imports them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent


@pytest.mark.slow
def test_the_parts_that_live_beside_vllm():
    checks = sorted(FOLDER.glob("*_checks.py"))
    assert checks
    done = subprocess.run(
        [
            sys.executable,
            *("-m", "pytest", "-q", "-p", "no:cacheprovider", "--noconftest"),
            *("-W", "default"),  # vLLM's and Ray's own
            *checks,
        ],
        cwd=FOLDER.parents[3],
        env={**os.environ, "OMP_NUM_THREADS": "1", "VLLM_LOGGING_LEVEL": "WARNING"},
        capture_output=True,
        text=True,
        timeout=290,
        check=False,
    )
    print(done.stdout)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
