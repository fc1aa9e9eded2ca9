"""``dynamo-megatron eval --engine vllm``: the same answers as the embedded engine's."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

EVAL = [str(Path(sys.executable).with_name("dynamo-megatron")), "eval", "builtin:tiny"]
OPTIONS = ["--max-tokens", "48", "--verifier", "integer_answer", "--engine"]
INTERRUPTED = 130


def command(engine: str, out: Path, *options: str) -> list[str]:
    return [*EVAL, *OPTIONS, engine, "--out", str(out), *options]


def samples(out: Path) -> list[dict]:
    lines = (out / "samples.jsonl").read_text(encoding="utf-8").splitlines()
    return sorted(map(json.loads, lines), key=lambda row: (row["id"], row["k"]))


def run(argv: list[str]) -> str:
    done = subprocess.run(argv, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stderr


@pytest.mark.timeout(1300)
def test_greedy_answers_are_those_of_the_embedded_engine(tmp_path):
    greedy = ["--data", "arithmetic:40", "--greedy"]
    run(command("vllm", tmp_path / "vllm", *greedy))
    run(command("hf", tmp_path / "hf", *greedy))
    ours, theirs = samples(tmp_path / "vllm"), samples(tmp_path / "hf")
    assert [row["response"] for row in ours] == [row["response"] for row in theirs]
    assert [row["reward"] for row in ours] == [row["reward"] for row in theirs]
    assert 0 < sum(row["reward"] for row in ours) < 40


@pytest.mark.timeout(1900)
def test_an_evaluation_that_was_stopped_goes_on_to_the_same_samples(tmp_path):
    asked = ["--data", "arithmetic:150", "--samples", "8", "--batch-size", "16", "--seed", "3"]
    run(command("vllm", tmp_path / "whole", *asked))
    argv = command("vllm", tmp_path / "parts", *asked)
    with subprocess.Popen(argv, stderr=subprocess.PIPE, text=True) as stopped:
        file = tmp_path / "parts" / "samples.jsonl"
        deadline = time.monotonic() + 600
        while time.monotonic() < deadline and not (file.exists() and file.stat().st_size):
            time.sleep(0.02)
        os.kill(stopped.pid, signal.SIGTERM)
        _, said = stopped.communicate(timeout=120)
    assert stopped.returncode == INTERRUPTED, said[-3000:]
    assert "the same command goes on from here" in said
    held = len(samples(tmp_path / "parts"))
    assert 0 < held < 1200
    assert f"{held} of 1200 samples are there already" in run([*argv, "--replicas", "2"])
    whole, parts = samples(tmp_path / "whole"), samples(tmp_path / "parts")
    same = [a["response"] == b["response"] for a, b in zip(whole, parts, strict=True)]
    # Another batch moves a logit by 1e-6, which turns a draw now and then.
    assert sum(same) >= 0.99 * len(same)
    assert [(a["id"], a["k"]) for a in whole] == [(b["id"], b["k"]) for b in parts]


@pytest.mark.timeout(300)
def test_a_home_that_ray_cannot_write_to_is_refused_with_the_remedy(tmp_path):
    argv = command("vllm", tmp_path / "out", "--data", "arithmetic:2", "--greedy")
    done = subprocess.run(
        argv,
        env=os.environ | {"HOME": "/proc/no-home"},
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert done.returncode == 1
    assert "Ray could not be started on this machine" in done.stderr
    assert "HOME must be a folder that can be written to, or set RAY_AUTH_TOKEN" in done.stderr
