"""Sampled responses: seeded, mixed, complete on disk, harmless to read."""

import json
import os
from pathlib import Path

import pytest

from dynamo_megatron.observe.generations import GenerationLog, sample_generations
from dynamo_megatron.types import (
    FinishReason,
    Prompt,
    Rollout,
    RolloutGroup,
    Verdict,
    VerdictStatus,
)


def group(name: str, rewards: list[float | None], text: str = "2 + 2 is 4") -> RolloutGroup:
    """A group whose verification failed where the reward is None."""
    prompt = Prompt(id=name, text=f"Prompt {name}", token_ids=(1,), answer="4", source="sums")
    rollouts = tuple(
        Rollout(
            prompt_id=name,
            index=index,
            token_ids=(5, 6, 7),
            logprobs=(-1.0, -1.0, -1.0),
            finish_reason=FinishReason.STOP,
            weight_version=3,
            seed=100 + index,
            text=text,
        )
        for index in range(len(rewards))
    )
    verdicts = tuple(
        Verdict(reward=0.0, status=VerdictStatus.TIMEOUT, message="10 s")
        if reward is None
        else Verdict(reward=reward, formatted=True, extracted="4")
        for reward in rewards
    )
    return RolloutGroup(prompt=prompt, rollouts=rollouts, verdicts=verdicts)


GROUPS = [group("a", [1.0, 1.0, 0.0, None]), group("b", [0.0] * 8), group("c", [1.0] * 8)]


def test_a_record_holds_everything_about_its_response():
    (record,) = sample_generations(12, [group("a", [1.0])], count=4, seed=0)
    assert record == {
        "step": 12,
        "group_size": 1,
        "pass_rate": 1.0,
        "prompt_id": "a",
        "source": "sums",
        "index": 0,
        "outcome": "right",
        "reward": 1.0,
        "status": "ok",
        "formatted": True,
        "extracted": "4",
        "answer": "4",
        "message": "",
        "finish_reason": "stop",
        "num_tokens": 3,
        "seed": 100,
        "weight_version": 3,
        "prompt": "Prompt a",
        "response": "2 + 2 is 4",
    }


def test_group_size_counts_all_and_pass_rate_only_the_verified():
    records = sample_generations(0, [group("a", [1.0, 1.0, 0.0, None])], count=4, seed=0)
    assert {record["group_size"] for record in records} == {4}
    assert {record["pass_rate"] for record in records} == {2 / 3}


def test_right_wrong_and_unverified_come_in_turn():
    outcomes = [r["outcome"] for r in sample_generations(0, GROUPS, count=5, seed=0)]
    assert outcomes == ["right", "wrong", "unverified", "right", "wrong"]


def test_a_failed_verification_has_no_reward_and_is_not_wrong():
    records = sample_generations(0, [group("a", [None, None])], count=2, seed=0)
    assert [record["outcome"] for record in records] == ["unverified", "unverified"]
    assert [record["reward"] for record in records] == [None, None]
    assert records[0]["pass_rate"] is None


def test_prompts_are_mixed_before_one_comes_twice():
    groups = [group(name, [1.0] * 8) for name in "abcd"]
    records = sample_generations(0, groups, count=4, seed=0)
    assert sorted(record["prompt_id"] for record in records) == ["a", "b", "c", "d"]


def test_the_choice_depends_on_seed_and_step_alone():
    def chosen(step: int, seed: int) -> list[tuple[str, int]]:
        records = sample_generations(step, GROUPS, count=6, seed=seed)
        return [(record["prompt_id"], record["index"]) for record in records]

    assert chosen(3, 7) == chosen(3, 7)
    assert len({tuple(chosen(step, 7)) for step in range(8)}) > 1
    assert len({tuple(chosen(3, seed)) for seed in range(8)}) > 1


def test_files_hold_a_step_s_samples_and_a_page_of_the_latest_steps(tmp_path: Path):
    log = GenerationLog(tmp_path, per_step=3, seed=0)
    for step in range(5):
        log.write(step, GROUPS)
    folder = tmp_path / "generations"
    assert sorted(os.listdir(folder)) == [
        "generations.md",
        *(f"step_{step:06d}.jsonl" for step in range(5)),
    ]
    lines = (folder / "step_000004.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [4, 4, 4]
    page = (folder / "generations.md").read_text()
    assert [line for line in page.splitlines() if line.startswith("## ")] == [
        "## Step 4",
        "## Step 3",
        "## Step 2",
    ]
    assert "### RIGHT · group of " in page
    assert "verification ended with timeout: `10 s`" in page


def test_a_resumed_run_s_page_shows_no_step_to_come(tmp_path: Path):
    log = GenerationLog(tmp_path, per_step=1, seed=0)
    for step in range(5):
        log.write(step, GROUPS)
    GenerationLog(tmp_path, per_step=1, seed=0).write(2, GROUPS)
    page = (tmp_path / "generations" / "generations.md").read_text()
    assert "## Step 2" in page
    assert "## Step 3" not in page


def test_none_are_kept_where_none_are_wanted(tmp_path: Path):
    GenerationLog(tmp_path, per_step=0, seed=0).write(0, GROUPS)
    assert list(tmp_path.iterdir()) == []


HOSTILE = [
    "a\n```\n# not a heading\n<script>alert(1)</script>",
    "````` five",
    "\x1b[2J\x1b]0;title\x07\r\x00\x85",
    "right \u202e left \u2028 line \u200b end",
    "half a pair \ud800",
    "tab\tstays, 数学 é 🙂 too",
    "",
]


@pytest.mark.parametrize("text", HOSTILE)
def test_a_response_is_whole_in_the_records_and_harmless_on_the_page(tmp_path: Path, text: str):
    GenerationLog(tmp_path, per_step=1, seed=0).write(0, [group("a", [1.0], text)])
    (line,) = (tmp_path / "generations" / "step_000000.jsonl").read_text().split("\n")[:-1]
    assert json.loads(line)["response"] == text
    page = (tmp_path / "generations" / "generations.md").read_text()
    assert not set(page) & set("\x1b\x07\r\x00\x85\u202e\u2028\u200b")
    block = page.rpartition("Response\n\n")[2].split("\n")
    fence = block[0].removesuffix("text")
    assert set(fence) == {"`"}
    assert len(fence) >= 3
    # The block ends where the page does: nothing of the response is outside it.
    closing = [number for number, row in enumerate(block) if row == fence]
    assert closing == [len(block) - 2]


def test_a_hostile_answer_stays_on_its_line(tmp_path: Path):
    hostile = group("a", [1.0])
    verdict = Verdict(reward=1.0, extracted="`x`\n# heading \x1b[31m" + "9" * 500)
    hostile = RolloutGroup(prompt=hostile.prompt, rollouts=hostile.rollouts, verdicts=(verdict,))
    GenerationLog(tmp_path, per_step=1, seed=0).write(0, [hostile])
    page = (tmp_path / "generations" / "generations.md").read_text()
    assert "extracted `` `x` # heading \\x1b[31m99" in page
    assert "9" * 300 not in page


def test_a_long_response_is_shortened_on_the_page_only(tmp_path: Path):
    text = "start " + "x" * 20_000 + " end"
    GenerationLog(tmp_path, per_step=1, seed=0).write(0, [group("a", [1.0], text)])
    page = (tmp_path / "generations" / "generations.md").read_text()
    assert len(page) < 5000
    assert "[... 17010 characters left out ...]" in page
    assert "start x" in page
    assert "x end" in page
    line = (tmp_path / "generations" / "step_000000.jsonl").read_text()
    assert json.loads(line)["response"] == text
