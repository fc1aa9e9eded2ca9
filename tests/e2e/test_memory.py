"""Two hundred steps take no more memory than one hundred."""

from __future__ import annotations

import pytest

from tests.launch import arguments, launch, metrics_of


@pytest.mark.slow
def test_memory_stays_flat_over_200_steps(tmp_path):
    argv = arguments(
        tmp_path,
        tmp_path / "run",
        run__num_steps=200,
        data__prompts_per_step=2,
        algorithm__allocation__n_mean=2,
        rollout__max_tokens=8,
        algorithm__kl__coefficient=0.01,
    )
    launch(argv, 1, tmp_path / "logs", timeout=280)
    rss = [row["memory/rss_mib"] for row in metrics_of(tmp_path / "run")]
    assert len(rss) == 200
    half = rss[100:]
    assert max(half) / min(half) < 1.02, f"{min(half):.0f} to {max(half):.0f} MiB"
    assert half[-1] / half[0] < 1.01
