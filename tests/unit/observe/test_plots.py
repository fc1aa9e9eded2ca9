"""Plots: whatever part of the metrics a run has, the pictures of that part are drawn."""

import math
import os
import subprocess
import sys
from pathlib import Path

import matplotlib.image
import numpy as np
import pytest

from dynamo_megatron.observe.panels import _heat, _running_mean
from dynamo_megatron.observe.plots import main, make_plots
from dynamo_megatron.observe.sinks import JsonlSink
from tests.unit.observe.synthetic import write_synthetic_run

ALL = ["reward", "entropy", "group_sizes", "modulation", "gradient_norm", "mismatch", "overview"]


def plots_of(run_dir: Path, *rows: dict) -> list[str]:
    sink = JsonlSink(run_dir / "metrics.jsonl")
    for step, row in enumerate(rows):
        sink.write(step, row)
    sink.close()
    return [path.stem for path in make_plots(run_dir)]


@pytest.mark.parametrize("num_steps", [1, 60])
def test_a_run_of_any_length_has_every_picture(tmp_path: Path, num_steps: int):
    write_synthetic_run(tmp_path, num_steps)
    written = make_plots(tmp_path)
    assert [path.stem for path in written] == ALL
    assert sorted(os.listdir(tmp_path / "plots")) == sorted(f"{name}.png" for name in ALL)
    for path in written:
        pixels = matplotlib.image.imread(path)
        assert min(pixels.shape[:2]) >= 400
        assert pixels[..., :3].std() > 0.02


def test_a_run_without_evaluations_allocation_and_modulation_has_the_other_pictures(tmp_path: Path):
    rows = [{"reward/mean": 0.1 * step, "train/grad_norm": 1.0} for step in range(3)]
    assert plots_of(tmp_path, *rows) == ["reward", "gradient_norm", "overview"]


def test_a_run_with_only_evaluations_has_a_reward_picture(tmp_path: Path):
    assert plots_of(tmp_path, {"eval/pass@1": 0.2}, {}) == ["reward", "overview"]


def test_a_run_without_any_known_metric_has_no_picture(tmp_path: Path):
    assert plots_of(tmp_path, {"time/step": 1.0}) == []


def test_values_that_are_not_finite_or_missing_in_between_are_left_out(tmp_path: Path):
    rows = [
        {"reward/mean": math.nan, "train/grad_norm": math.inf, "allocation/hist": {}},
        {"reward/mean": 0.5, "train/grad_norm": 1e-9, "train/entropy": 0.0},
        {"allocation/hist": {8: 0}, "train/grad_norm": 50.0, "train/skipped": 1.0},
    ]
    assert plots_of(tmp_path, *rows) == ["reward", "entropy", "gradient_norm", "overview"]


def test_engines_that_agree_exactly_have_a_mismatch_picture(tmp_path: Path):
    row = {
        "rollout/logp_gap_mean": 0.0,
        "rollout/logp_gap_max": 0.0,
        "rollout/ratio_q01": 1.0,
        "rollout/ratio_q99": 1.0,
        "rollout/effective_sample_size": 1.0,
    }
    assert plots_of(tmp_path, row, row) == ["mismatch", "overview"]


def test_drawing_again_replaces_the_pictures(tmp_path: Path):
    assert plots_of(tmp_path, {"reward/mean": 0.5}) == ["reward", "overview"]
    before = (tmp_path / "plots" / "reward.png").read_bytes()
    assert plots_of(tmp_path, {"reward/mean": 0.5}, {"reward/mean": 0.9}) == ["reward", "overview"]
    assert (tmp_path / "plots" / "reward.png").read_bytes() != before


def test_the_heat_map_shows_the_share_of_prompts_at_their_step_and_size():
    rows = [
        {"step": 2, "allocation/hist": {"8": 3, "10": 1}},
        # Step 3 has no allocation: its column stays empty.
        {"step": 4, "allocation/hist": {"9": 2}},
    ]
    edges, sizes, shares = _heat(rows)
    np.testing.assert_allclose(edges, [1.5, 2.5, 3.5, 4.5])
    np.testing.assert_array_equal(sizes, [8, 9, 10])
    np.testing.assert_allclose(shares, [[0.75, 0, 0], [0, 0, 1.0], [0.25, 0, 0]])


def test_the_heat_map_of_a_long_run_averages_neighbouring_steps():
    rows = [{"step": step, "allocation/hist": {"8": 1}} for step in range(1000)]
    rows[0] = {"step": 0, "allocation/hist": {"10": 1}}
    _, _, shares = _heat(rows)
    assert shares.shape == (3, 240)
    np.testing.assert_allclose(shares.sum(axis=0), 1.0)
    # 1000 steps over 240 columns: the first column holds steps 0..3 (edge at 3.67).
    np.testing.assert_allclose(shares[:, 0], [0.75, 0.0, 0.25])


def test_the_running_mean_keeps_a_constant_and_averages_a_peak():
    np.testing.assert_allclose(_running_mean(np.full(50, 2.0)), 2.0)
    peak = np.zeros(50)
    peak[25] = 3.0
    np.testing.assert_allclose(_running_mean(peak)[23:28], [0, 1, 1, 1, 0])


def test_a_folder_without_metrics_is_refused(tmp_path: Path, capsys):
    with pytest.raises(FileNotFoundError, match=r"metrics\.jsonl does not exist"):
        make_plots(tmp_path)
    assert main([str(tmp_path)]) == 2
    assert "does not exist" in capsys.readouterr().err
    (tmp_path / "metrics.jsonl").touch()
    with pytest.raises(ValueError, match="holds no step"):
        make_plots(tmp_path)


def test_the_module_draws_a_run_s_folder_without_torch(tmp_path: Path):
    assert plots_of(tmp_path, {"reward/mean": 0.5}) == ["reward", "overview"]
    code = (
        "import sys\n"
        "from dynamo_megatron.observe.plots import main\n"
        "code = main(sys.argv[1:])\n"
        "assert 'torch' not in sys.modules\n"
        "sys.exit(code)\n"
    )
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=Path(__file__).parents[3],
    )
    assert done.returncode == 0, done.stderr
    assert [Path(line).stem for line in done.stdout.splitlines()] == ["reward", "overview"]
