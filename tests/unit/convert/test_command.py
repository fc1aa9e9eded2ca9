"""``dynamo-megatron convert``: its exit codes, its refusals, and a clean end when interrupted."""

from __future__ import annotations

import os
import subprocess
import sys
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
    done = _run("convert", "to-megatron", "builtin:tiny", out)
    assert done.returncode == 0, done.stderr
    assert "47 tensors equal bit by bit" in done.stdout and "differ by at most" in done.stdout
    again = _run("convert", "to-megatron", TINY_POLICY, out)
    assert again.returncode == 1 and "is not an empty folder" in again.stderr
    assert "Traceback" not in again.stderr


SHARDS = ("0", "-1", "nan", "inf", "-inf", "five", "1e999")


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["to-hf"],
        ["to-megatron", "builtin:huge", "b"],
        *(["to-hf", "a", "b", f"--shard-gib={size}"] for size in SHARDS),
    ],
    ids=" ".join,
)
def test_wrong_arguments_are_refused_before_anything_is_imported(arguments, capsys):
    with pytest.raises(SystemExit) as ended:
        command.main(arguments)
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert "usage: dynamo-megatron convert" in said
    if len(arguments) > 3:
        assert "is not a finite number above 0" in said
