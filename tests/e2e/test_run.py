"""A whole run on small ranks: what it leaves, and going on after a stop."""

from __future__ import annotations

import json
import re
import signal
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.launch import arguments, launch, log_of, metrics_of, start

# Wall-clock times and memory are no results of the training.
NOT_COMPARED = re.compile(r"^(time|perf|memory)/")
EVALUATED = """\
run: {num_steps: 2}
data:
  train:
    - {kind: arithmetic, split: train, num_problems: 12, seed: 1}
  heldout:
    - {kind: arithmetic, split: heldout, num_problems: 8, seed: 2}
"""


def exported(run_dir) -> Path:
    """The one Hugging Face folder that the run left."""
    (folder,) = (run_dir / "hf").iterdir()
    return folder


def results(run_dir) -> list[dict]:
    return [
        {k: v for k, v in row.items() if not NOT_COMPARED.match(k)} for row in metrics_of(run_dir)
    ]


def test_a_run_leaves_what_a_person_wants(tmp_path):
    run_dir = tmp_path / "run"
    argv = arguments(
        tmp_path,
        run_dir,
        EVALUATED,
        parallel__tensor=2,
        checkpoint__export_hf=True,
        observe__plots=True,
        observe__tensorboard=True,
    )
    ranks = launch(argv, 2, tmp_path / "logs")
    rows = metrics_of(run_dir)
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert "eval/pass@1" in rows[0] and "eval/pass@1" in rows[2]
    assert rows[0]["rollout/num"] == 4 * 3
    assert rows[0]["rollout/logp_gap_max"] < 1e-4
    assert {"config.yaml", "plots", "tensorboard", "generations", "evaluations", "hf"} <= {
        path.name for path in run_dir.iterdir()
    }
    assert (run_dir / "plots" / "overview.png").stat().st_size > 10_000
    evaluations = run_dir / "evaluations"
    assert {path.name for path in evaluations.iterdir()} == {"step_000000", "step_000002"}
    samples = (evaluations / "step_000002" / "samples.jsonl").read_text().splitlines()
    assert len(samples) == 8 and "response" in json.loads(samples[0])
    assert (evaluations / "step_000002" / "plots" / "accuracy.png").stat().st_size > 10_000
    assert str(evaluations / "step_000002" / "index.html") in ranks.log(0)
    assert "held-out pass@1" in ranks.log(0) and "next:" in ranks.log(0)
    _, info = AutoModelForCausalLM.from_pretrained(exported(run_dir), output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]


def test_an_export_of_an_earlier_run_is_not_taken_for_this_ones(tmp_path):
    run_dir = tmp_path / "run"
    stale = run_dir / "hf" / "step_000001"
    stale.mkdir(parents=True)
    (stale / "model.safetensors").write_bytes(b"old")
    options = {"run__num_steps": 1, "checkpoint__export_hf": True}
    launch(arguments(tmp_path, run_dir, **options), 1, tmp_path / "a")
    assert load_file(stale / "model.safetensors")
    (aside,) = (run_dir / "hf").glob("step_000001.old-*")
    assert (aside / "model.safetensors").read_bytes() == b"old"
    # an old export beside a checkpoint of the same step is of another checkpoint
    (stale / "exported_from.json").write_text('{"checkpoint": "step_00000001", "sha256": "0"}')
    (stale / "model.safetensors").write_bytes(b"older")
    again = arguments(tmp_path, run_dir, **options, run__resume="if_present")
    launch(again, 1, tmp_path / "c")
    assert load_file(stale / "model.safetensors")
    # a finished run that is started again does not export again
    options["run__resume"] = "if_present"
    written = (stale / "model.safetensors").stat().st_mtime_ns
    launch(arguments(tmp_path, run_dir, **options), 1, tmp_path / "b")
    assert (stale / "model.safetensors").stat().st_mtime_ns == written


@pytest.mark.parametrize(("tensor", "world_size"), [(1, 1), (2, 2)])
def test_killed_and_resumed_equals_uninterrupted_bitwise(tmp_path, tensor, world_size):
    options = {
        "parallel__tensor": tensor,
        "run__num_steps": 5,
        "checkpoint__every": 2,
        "checkpoint__export_hf": True,
        "optimizer__decay_style": "cosine",
        "algorithm__allocation__decay": 0.5,
    }
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    launch(arguments(tmp_path, whole, EVALUATED, **options), world_size, tmp_path / "a")

    first = start(arguments(tmp_path, broken, EVALUATED, **options), world_size, tmp_path / "b")
    deadline = time.monotonic() + 100
    while not (broken / "checkpoints" / "step_00000002").exists():
        assert time.monotonic() < deadline, first.log(0)
        time.sleep(0.02)
    for rank in range(world_size):
        first.signal(rank)
    first.wait()
    options["run__resume"] = "if_present"
    launch(arguments(tmp_path, broken, EVALUATED, **options), world_size, tmp_path / "c")

    assert results(broken) == results(whole)
    got, want = (load_file(exported(d) / "model.safetensors") for d in (broken, whole))
    assert got.keys() == want.keys()
    assert [name for name in want if not torch.equal(got[name], want[name])] == []


def test_sigterm_saves_and_exits_cleanly_and_the_rest_is_the_same(tmp_path):
    options = {"parallel__tensor": 2, "run__num_steps": 4, "checkpoint__export_hf": True}
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    launch(arguments(tmp_path, whole, **options), 2, tmp_path / "a")
    ranks = start(arguments(tmp_path, stopped, **options), 2, tmp_path / "b")
    deadline = time.monotonic() + 100
    while not (stopped / "metrics.jsonl").exists() or not metrics_of(stopped):
        assert time.monotonic() < deadline, ranks.log(0)
        time.sleep(0.02)
    ranks.signal(1, signal.SIGTERM)  # one rank is enough
    assert ranks.wait() == [0, 0]
    done = len(metrics_of(stopped))
    assert done < 4, "the signal came too late to test anything"
    assert f"stopping on a signal after {done} of 4 steps" in log_of(stopped)
    options["run__resume"] = "always"
    launch(arguments(tmp_path, stopped, **options), 2, tmp_path / "c")
    assert results(stopped) == results(whole)
    got, want = (load_file(exported(d) / "model.safetensors") for d in (stopped, whole))
    assert [name for name in want if not torch.equal(got[name], want[name])] == []


def test_a_checkpoint_goes_on_at_another_layout(tmp_path):
    run_dir = tmp_path / "run"
    options = {"parallel__tensor": 2, "run__num_steps": 2, "checkpoint__every": 1}
    launch(arguments(tmp_path, run_dir, **options), 2, tmp_path / "a")
    options |= {"parallel__tensor": 1, "parallel__pipeline": 2, "run__num_steps": 3}
    options["run__resume"] = "always"
    launch(arguments(tmp_path, run_dir, **options), 2, tmp_path / "b")
    options |= {"parallel__pipeline": 1, "run__num_steps": 4}  # data parallel 2
    launch(arguments(tmp_path, run_dir, **options), 2, tmp_path / "c")
    rows = metrics_of(run_dir)
    assert [row["step"] for row in rows] == [0, 1, 2, 3]
    # sampler and trainer agreed after each change of layout
    assert max(row["rollout/logp_gap_max"] for row in rows) < 1e-4


@pytest.mark.parametrize(
    "layout",
    [
        {"parallel__pipeline": 2},
        {},  # data parallel 2
        {"parallel__tensor": 2, "parallel__sequence": True},
    ],
    ids=["pp2", "dp2", "tp2+sp"],
)
def test_first_step_does_not_depend_on_the_layout(tmp_path, layout):
    options = {"run__num_steps": 1, "batch__micro_batch_sequences": 3}
    launch(arguments(tmp_path, tmp_path / "one", **options), 1, tmp_path / "a")
    launch(arguments(tmp_path, tmp_path / "two", **options, **layout), 2, tmp_path / "b")
    (want,), (got,) = results(tmp_path / "one"), results(tmp_path / "two")
    assert got.keys() == want.keys()
    for name, value in want.items():
        assert got[name] == (value if isinstance(value, dict) else pytest.approx(value, abs=1e-5))
