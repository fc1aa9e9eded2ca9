"""The quickstart with vLLM replicas on Ray: it learns as with the embedded engine."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.launch import launch, metrics_of

QUICKSTART = Path(__file__).parents[2] / "configs" / "quickstart.yaml"
STEPS = 12
VLLM = {"rollout.engine": "vllm", "rollout.vllm.replicas": 2}


def command(run_dir: Path, **overrides) -> list[str]:
    values = {
        "run.dir": str(run_dir),
        "run.num_steps": STEPS,
        "evaluation.every": 0,
        "evaluation.report": False,
        "checkpoint.every": 0,
        "checkpoint.export_hf": False,
        "observe.plots": False,
        "observe.tensorboard": False,
    }
    values |= {name.replace("__", "."): value for name, value in overrides.items()}
    return ["--config", str(QUICKSTART), *(f"{k}={json.dumps(v)}" for k, v in values.items())]


def heldout(run_dir: Path) -> dict[int, dict]:
    return {row["step"]: row for row in metrics_of(run_dir) if "eval/pass@1" in row}


def steps_of(run_dir: Path) -> list[dict]:
    return [row for row in metrics_of(run_dir) if "train/loss" in row]


@pytest.fixture(scope="module")
def embedded(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("embedded")
    launch(command(folder / "run"), 2, folder, timeout=600)
    return folder / "run"


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("mode", ["sync", "one_step_off"])
def test_the_quickstart_learns_with_two_replicas_as_with_the_embedded_engine(
    embedded, tmp_path, mode
):
    overrides = VLLM | {"rollout.mode": mode}
    launch(command(tmp_path / "run", **overrides), 2, tmp_path, timeout=900)
    results, steps = heldout(tmp_path / "run"), steps_of(tmp_path / "run")
    before, after = results[0], results[STEPS]
    # Far outside both 95 % intervals (each about 8 points wide on 512 problems).
    assert after["eval/pass@1_low"] > before["eval/pass@1_high"]
    other = heldout(embedded)[STEPS]
    assert after["eval/pass@1_high"] > other["eval/pass@1_low"]
    assert other["eval/pass@1_high"] > after["eval/pass@1_low"]
    assert [row["step"] for row in steps] == list(range(STEPS))
    assert [row["rollout/num"] for row in steps] == [256] * STEPS
    stale = [0.0] + [float(mode == "one_step_off")] * (STEPS - 1)
    assert [row["rollout/staleness"] for row in steps] == stale
    # Where sampler and trainer hold the same weights, float32 rounding is all that parts them.
    fresh = [row for row in steps if row["rollout/staleness"] == 0.0]
    assert max(row["rollout/logp_gap_mean"] for row in fresh) < 1e-6
    assert max(row["rollout/logp_gap_max"] for row in fresh) < 5e-5
