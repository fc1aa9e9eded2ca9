"""``dynamo-megatron convert``: its exit codes, its refusals, and a clean end when interrupted."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dynamo_megatron.assets import TINY_POLICY
from dynamo_megatron.convert import command

ROOT = Path(__file__).parents[3]
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
MAIN = "import sys; from dynamo_megatron.cli import main; sys.exit(main())"


def _run(*arguments, **options):
    return subprocess.run(
        [sys.executable, "-c", MAIN, *map(str, arguments)],
        capture_output=True,
        text=True,
        env=ENVIRONMENT,
        timeout=120,
        **options,
    )


def test_converts_checks_and_refuses_with_exit_codes(tmp_path):
    out = tmp_path / "out"
    done = _run("convert", "to-megatron", TINY_POLICY, out)
    assert done.returncode == 0, done.stderr
    assert "47 tensors equal bit by bit" in done.stdout and "differ by at most" in done.stdout
    again = _run("convert", "to-megatron", TINY_POLICY, out)
    assert again.returncode == 1 and "is not an empty folder" in again.stderr
    assert "Traceback" not in again.stderr


@pytest.mark.parametrize("arguments", [[], ["to-hf"], ["to-hf", "a", "b", "--shard-gib", "0"]])
def test_wrong_arguments_are_refused_before_anything_is_imported(arguments, capsys):
    with pytest.raises(SystemExit) as ended:
        command.main(arguments)
    assert ended.value.code == 2
    assert "usage: dynamo-megatron convert" in capsys.readouterr().err


def test_an_interrupted_conversion_leaves_nothing(tiny, tmp_path):
    code = (
        "import sys, time\n"
        "import megatron_patches; megatron_patches.apply()\n"
        "from dynamo_megatron.convert import command, conversion\n"
        "def slow(*_, **__):\n"
        "    sys.stdout.write('checking\\n'); sys.stdout.flush(); time.sleep(60)\n"
        "conversion.check_pair = slow\n"
        f"sys.exit(command.main(['to-hf', {str(tiny)!r}, {str(tmp_path / 'out')!r}]))\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=ENVIRONMENT,
    )
    assert process.stdout.readline() == "checking\n"
    assert len(list(tmp_path.glob("out.tmp-*"))) == 1
    os.kill(process.pid, signal.SIGTERM)
    started = time.monotonic()
    _, stderr = process.communicate(timeout=30)
    assert time.monotonic() - started < 10
    assert process.returncode != 0 and "interrupted" in stderr
    assert list(tmp_path.iterdir()) == []
