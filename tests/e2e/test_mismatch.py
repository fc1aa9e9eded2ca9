"""A run reports the gap between trainer and sampler, and corrects for it where asked to."""

from __future__ import annotations

import pytest

from tests.launch import BASE, arguments, launch, metrics_of

CORRECTION = {"weight_mean", "clipped_share", "dropped_share", "dropped_sequences"}


def rows_of(tmp_path, **overrides) -> list[dict]:
    run_dir = tmp_path / "run"
    argv = arguments(tmp_path, run_dir, BASE, parallel__tensor=2, run__num_steps=1, **overrides)
    launch(argv, 2, tmp_path / "logs")
    return metrics_of(run_dir)


def with_correction(row: dict) -> set[str]:
    return {name.removeprefix("correction/") for name in row if name.startswith("correction/")}


def test_every_step_reports_the_mismatch_and_no_correction_is_silent(tmp_path):
    (row,) = rows_of(tmp_path, algorithm__old_logp="sampler")
    assert 0 < row["rollout/logp_gap_mean"] <= row["rollout/logp_gap_max"] < 1e-4
    for quantile in ("q01", "q50", "q99"):
        assert row[f"rollout/ratio_{quantile}"] == pytest.approx(1.0, abs=1.1e-4)
    assert row["rollout/ratio_q01"] < row["rollout/ratio_q99"]
    assert row["rollout/effective_sample_size"] == pytest.approx(1.0, abs=1e-6)
    assert with_correction(row) == set()
    # bypass: the first update's ratio is the gap, and not 1 exactly
    assert row["train/ratio_max"] > 1.0
    assert row["train/skipped"] == 0.0


def test_a_correction_reports_what_it_did(tmp_path):
    correction = {"kind": "truncated", "cap": 1.0, "veto": 1e-4}
    (row,) = rows_of(tmp_path, algorithm__correction=correction)
    assert with_correction(row) == CORRECTION
    # engines that agree up to rounding: half of the ratios are above 1, by next to nothing
    assert 1.0 - 1e-4 < row["correction/weight_mean"] <= 1.0
    assert 0.1 < row["correction/clipped_share"] <= 1.0
    assert row["correction/dropped_share"] == row["correction/dropped_sequences"] == 0.0
    assert row["train/skipped"] == 0.0
