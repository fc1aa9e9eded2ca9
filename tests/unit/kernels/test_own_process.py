"""Runs the checks that need a process of their own; each module says why."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent


def _run(checks: str, **environment: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-s", "-p", "no:cacheprovider", FOLDER / checks],
        cwd=FOLDER.parents[2],
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        timeout=290,
        check=False,
    )
    print(done.stdout)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]


@pytest.mark.slow
def test_the_triton_kernels_are_right_in_tritons_interpreter():
    pytest.importorskip("triton")
    _run("interpreted_checks.py", TRITON_INTERPRET="1")


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_memory_stays_within_its_bounds():
    _run("memory_checks.py")


@pytest.mark.slow
def test_the_compiled_rows_are_right():
    _run("compiled_checks.py", TORCHINDUCTOR_COMPILE_THREADS="1")
