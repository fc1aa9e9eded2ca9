"""Real weights: ``dynamo-megatron eval`` of SmolLM2-135M-Instruct on GSM8K."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dynamo_megatron.cli import main
from tests.real.test_smollm2 import model_dir, pytestmark  # noqa: F401

GSM8K = Path(__file__).parents[3] / "shared" / "data" / "gsm8k.json"
NUM_PROBLEMS = 20


@pytest.mark.timeout(1800)
@pytest.mark.skipif(not GSM8K.is_file(), reason=f"the problem set is not at {GSM8K}")
@pytest.mark.parametrize(
    ("decoding", "samples"),
    [(["--greedy"], 1), (["--temperature", "0.6", "--samples", "2", "--seed", "3"], 2)],
    ids=["greedy", "sampled"],
)
def test_twenty_problems_of_gsm8k_are_evaluated(model_dir, tmp_path, decoding, samples):  # noqa: F811
    command = ["eval", str(model_dir), "--data", str(GSM8K), "--limit", str(NUM_PROBLEMS)]
    command += ["--max-tokens", "64", "--batch-size", "40", "--out", str(tmp_path), *decoding]
    assert main(command) == 0
    rows = [json.loads(line) for line in (tmp_path / "samples.jsonl").read_text().splitlines()]
    assert len(rows) == NUM_PROBLEMS * samples
    assert {row["status"] for row in rows} == {"ok"}
    assert {row["answer"] for row in rows} >= {"18", "3", "70000", "540", "20"}
    # Sentences about the problem, and not the same ones for all.
    assert len({row["response"] for row in rows}) >= NUM_PROBLEMS
    assert sum(" " in row["response"] for row in rows) == len(rows)
    (result,) = json.loads((tmp_path / "summary.json").read_text())["results"]
    assert result["errors"] == 0
    assert result["pass_at_1"]["mean"] == sum(row["reward"] for row in rows) / len(rows)
    before = (tmp_path / "samples.jsonl").read_bytes()
    assert main(command) == 0  # nothing is left to sample
    assert (tmp_path / "samples.jsonl").read_bytes() == before
