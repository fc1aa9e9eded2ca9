"""What only a GPU can show; run with ``python -m pytest tests/gpu`` on a machine that has one."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from dynamo_megatron.kernels import token_stats

ROOT = Path(__file__).parents[2]
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_triton_kernels_equal_float64(dtype):
    g = torch.Generator(device="cuda").manual_seed(0)
    logits = (torch.randn(64, 152_064, generator=g, device="cuda") * 4).to(dtype)
    targets = torch.randint(151_936, (64,), generator=g, device="cuda")
    want = token_stats(logits.double(), targets, vocab_size=151_936, impl="reference")
    got = token_stats(logits, targets, vocab_size=151_936, impl="triton")
    for name in ("logp", "entropy", "lam", "q"):
        difference = (getattr(got, name).double() - getattr(want, name)).abs().max()
        assert difference < 1e-5, f"{name} is off by {difference:.1e}"


def test_the_smoke_configuration_trains(tmp_path):
    run = subprocess.run(
        [
            *(sys.executable, "-m", "dynamo_megatron.train"),
            *("--config", str(ROOT / "configs" / "smoke_gpu.yaml")),
            *("run.num_steps=2", f"run.dir={tmp_path / 'run'}"),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    rows = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert json.loads(rows[0])["rollout/logp_gap_mean"] < 0.05
