"""Real weights through the whole product: SmolLM2-135M-Instruct, two steps with vLLM replicas."""

from __future__ import annotations

import json
import math

import pytest

from tests.launch import arguments, start
from tests.real.test_smollm2 import model_dir, pytestmark  # noqa: F401

PROBLEMS = [
    ("A baker fills 6 trays with 8 rolls each and sells 19 of them. How many are left?", "29"),
    ("Nina reads 14 pages a day for 5 days, then 30 pages more. How many pages is that?", "100"),
    ("A ticket costs 9 euros. What do 4 tickets and a snack of 5 euros cost together?", "41"),
    ("Of 72 seats a third are taken. How many seats are free?", "48"),
]
ASK = "\nThink in one short sentence, then write: Answer: <number>"


@pytest.mark.timeout(2400)
def test_two_steps_with_real_weights_through_the_vllm_tier(model_dir, tmp_path):  # noqa: F811
    problems = tmp_path / "problems.jsonl"
    problems.write_text(
        "".join(json.dumps({"problem": q + ASK, "answer": a}) + "\n" for q, a in PROBLEMS)
    )
    base = (
        "run: {num_steps: 2}\n"
        f"data: {{train: [{{kind: jsonl, path: {json.dumps(str(problems))}, name: words}}]}}\n"
    )
    argv = arguments(
        tmp_path,
        tmp_path / "run",
        base=base,
        model__path=str(model_dir),
        parallel__vocab_multiple=128,
        data__prompts_per_step=2,
        data__max_prompt_tokens=128,
        rollout__engine="vllm",
        rollout__max_tokens=96,
        rollout__vllm__max_num_seqs=8,
        rollout__vllm__probe_tokens=4,
        rollout__vllm__hang_timeout_s=300,
        optimizer__lr=1e-5,
        reward__kind="math",
    )
    ranks = start(argv, 1, tmp_path)
    codes = ranks.wait(timeout=2000)
    assert codes == [0], ranks.log(0)[-3000:]
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").open()]
    steps = [row for row in rows if "train/grad_norm" in row]
    assert [row["step"] for row in steps] == [0, 1]
    for row in steps:
        assert row["rollout/num"] == 6
        assert 0 < row["rollout/tokens"] <= 6 * 96
        assert row["rollout/logp_gap_max"] < 1e-3
        assert row["reward/failures"] == 0
        assert math.isfinite(row["train/grad_norm"]) and row["train/skipped"] == 0
    texts = (tmp_path / "run" / "generations" / "generations.md").read_text(encoding="utf-8")
    assert "Think in one short sentence" in texts
