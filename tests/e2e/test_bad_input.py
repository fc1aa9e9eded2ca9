"""Everything that cannot work ends in one clear message and a non-zero exit, on every rank."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.launch import BASE, Ranks, arguments, launch, log_of, metrics_of, start


def refused(argv, world_size: int, log_dir, *, within_s: float = 60.0) -> str:
    """Run, expect failure everywhere, and return rank 0's output."""
    ranks = start(argv, world_size, log_dir)
    codes = ranks.wait(within_s)
    assert all(code not in (0, -9) for code in codes), f"{codes}\n{ranks.log(0)}"
    text = ranks.log(0)
    assert "Traceback" not in text, text
    return text


FILES = BASE.replace(
    "{kind: arithmetic, split: train, num_problems: 12, seed: 1}",
    "{kind: jsonl, path: PATH}",
)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ({"algorithm__modulation__aplha": 0.2}, "algorithm.modulation.alpha"),
        ({"run__num_steps": "many"}, "run.num_steps"),
        ({"parallel__tensor": 3}, "2 were started"),
        ({"parallel__tensor": 2, "parallel__virtual_pipeline": 2}, "virtual_pipeline=1"),
        ({"parallel__context": 2}, "parallel.context=1"),
        ({"parallel__sequence": True}, "parallel.sequence=false"),
        ({"algorithm__allocation__n_low": 5}, "n_low"),
        ({"algorithm__allocation__init": 5}, "init"),
        (
            {
                "algorithm__allocation__n_low": 1,
                "algorithm__allocation__n_mean": 1,
                "algorithm__allocation__init": 1,
            },
            "n_mean to 2",
        ),
        ({"data__prompts_per_step": 13}, "12 training prompts"),
        ({"data__max_prompt_tokens": 2}, "data.max_prompt_tokens"),
        ({"rollout__max_tokens": 1000}, "256 positions"),
        ({"model__path": "/nowhere/model"}, "/nowhere/model"),
        ({"model__path": "builtin:huge"}, "builtin:tiny"),
        ({"reward__kind": "function"}, "reward.function"),
        (
            {"reward__kind": "function", "reward__function": "no_such_module:score"},
            "no_such_module",
        ),
        ({"run__resume": "always"}, "no complete checkpoint"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_bad_configuration_is_refused_on_all_ranks(tmp_path, override, message):
    argv = arguments(tmp_path, tmp_path / "run", **override)
    assert message in refused(argv, 2, tmp_path / "logs")


def test_heads_that_do_not_divide_are_named(tmp_path):
    argv = arguments(tmp_path, tmp_path / "run", parallel__tensor=3)
    text = refused(argv, 3, tmp_path / "logs")
    assert "does not divide" in text and "parallel.tensor to one of" in text


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "empty"),
        ('{"problem": "1+1", "answer": "2"}\n{"problem": "1+2"}\n', "line 2"),
        ('{"problem": "1+1", "answer": "2"}\n{"problem": "1+2", "ans', "line 2"),
    ],
    ids=["empty", "missing key", "truncated"],
)
def test_malformed_data_names_the_line(tmp_path, content, message):
    data = tmp_path / "problems.jsonl"
    data.write_text(content)
    base = FILES.replace("PATH", str(data))
    text = refused(arguments(tmp_path, tmp_path / "run", base), 2, tmp_path / "logs")
    assert message in text and "problems.jsonl" in text


def test_an_existing_run_is_not_overwritten(tmp_path):
    run_dir = tmp_path / "run"
    launch(arguments(tmp_path, run_dir, run__num_steps=1), 1, tmp_path / "a")
    before = (run_dir / "metrics.jsonl").read_bytes()
    text = refused(arguments(tmp_path, run_dir, run__num_steps=1), 1, tmp_path / "b")
    assert "run.resume=if_present" in text
    assert (run_dir / "metrics.jsonl").read_bytes() == before


def test_a_truncated_checkpoint_is_refused_by_name_and_an_unfinished_one_is_passed_over(tmp_path):
    run_dir = tmp_path / "run"
    options = {"run__num_steps": 2, "checkpoint__every": 1}
    launch(arguments(tmp_path, run_dir, **options), 1, tmp_path / "a")
    newest = run_dir / "checkpoints" / "step_00000002"
    (shard,) = newest.glob("*.distcp")
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-64])
    options |= {"run__resume": "if_present", "run__num_steps": 3}
    text = refused(arguments(tmp_path, run_dir, **options), 1, tmp_path / "b")
    assert shard.name in text
    assert shard.exists(), "nothing was deleted"
    (newest / "complete.json").unlink()  # as a killed save leaves it
    ranks = launch(arguments(tmp_path, run_dir, **options), 1, tmp_path / "c")
    assert "step_00000001: 1 steps done" in ranks.log(0)


def test_the_only_checkpoint_damaged_is_an_error_and_no_fresh_start(tmp_path):
    run_dir = tmp_path / "run"
    options = {"run__num_steps": 1}
    launch(arguments(tmp_path, run_dir, **options), 1, tmp_path / "a")
    before = (run_dir / "metrics.jsonl").read_bytes()
    (run_dir / "checkpoints" / "step_00000001" / "complete.json").write_text("{")
    options |= {"run__num_steps": 2, "run__resume": "if_present"}
    text = refused(arguments(tmp_path, run_dir, **options), 1, tmp_path / "b")
    assert "step_00000001" in text and "complete.json" in text
    assert (run_dir / "metrics.jsonl").read_bytes() == before


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    argv = arguments(tmp_path, tmp_path / "file" / "run")
    assert f"run.dir={tmp_path / 'file' / 'run'} cannot be written" in refused(
        argv, 1, tmp_path / "logs"
    )


def test_held_out_problems_that_differ_in_blanks_and_case_alone_are_refused(tmp_path):
    for name, text in (("train", "Compute  1+1 "), ("heldout", "compute 1+1")):
        row = json.dumps({"problem": text, "answer": "2"})
        (tmp_path / f"{name}.jsonl").write_text(row + "\n")
    base = f"""\
run: {{num_steps: 1}}
data:
  train: [{{kind: jsonl, path: {tmp_path}/train.jsonl}}]
  heldout: [{{kind: jsonl, path: {tmp_path}/heldout.jsonl}}]
"""
    argv = arguments(tmp_path, tmp_path / "run", base, data__prompts_per_step=1)
    assert "held-out problems are training problems" in refused(argv, 1, tmp_path / "logs")


def test_resuming_with_other_values_says_which(tmp_path):
    run_dir = tmp_path / "run"
    launch(arguments(tmp_path, run_dir, run__num_steps=1), 1, tmp_path / "a")
    options = {"run__num_steps": 2, "run__resume": "always", "run__seed": 6}
    again = launch(arguments(tmp_path, run_dir, optimizer__lr=2e-3, **options), 1, tmp_path / "b")
    assert "optimizer.lr: 0.001 -> 0.002; run.seed: 5 -> 6" in again.log(0)


def test_a_checkpoint_of_another_model_is_refused(tmp_path):
    run_dir = tmp_path / "run"
    launch(arguments(tmp_path, run_dir, run__num_steps=1), 1, tmp_path / "a")
    marker = run_dir / "checkpoints" / "step_00000001" / "complete.json"
    content = json.loads(marker.read_text())
    content["fingerprint"]["architecture"]["hidden_size"] = 4096
    marker.write_text(json.dumps(content))
    options = {"run__num_steps": 2, "run__resume": "if_present"}
    text = refused(arguments(tmp_path, run_dir, **options), 1, tmp_path / "b")
    assert "hidden_size" in text


VERIFIER = """
import os, time

def score(response, answer, prompt):
    if "hang" in answer:
        time.sleep(60)
    if "raise" in answer:
        raise ValueError("no verdict")
    if "die" in answer:
        os._exit(3)
    return float(len(response) % 2)
"""


def test_a_verifier_that_raises_hangs_or_dies_is_counted_and_survived(tmp_path, monkeypatch):
    (tmp_path / "my_verifier.py").write_text(VERIFIER)
    monkeypatch.syspath_prepend(str(tmp_path))
    data = tmp_path / "problems.jsonl"
    answers = ["hang", "raise", "die", "1", "2", "3", "4", "5"]
    rows = [json.dumps({"problem": f"Compute {i}+1", "answer": a}) for i, a in enumerate(answers)]
    data.write_text("\n".join(rows) + "\n")
    argv = arguments(
        tmp_path,
        tmp_path / "run",
        FILES.replace("PATH", str(data)),
        run__num_steps=1,
        data__prompts_per_step=8,
        reward__kind="function",
        reward__function="my_verifier:score",
        reward__timeout_s=0.5,
        parallel__tensor=2,
    )
    ranks = launch(argv, 2, tmp_path / "logs")
    (row,) = metrics_of(tmp_path / "run")
    assert row["reward/failures"] == 3 * 3
    assert "9 failed verifications" in ranks.log(0)


def test_a_step_without_any_verdict_is_counted_and_survived(tmp_path, monkeypatch):
    (tmp_path / "never.py").write_text("def score(response, answer, prompt):\n    raise OSError\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    argv = arguments(
        tmp_path,
        tmp_path / "run",
        run__num_steps=2,
        reward__kind="function",
        reward__function="never:score",
        parallel__pipeline=2,
    )
    ranks = launch(argv, 2, tmp_path / "logs")
    assert "2 steps without a response to train on" in ranks.log(0)


def _wait_for_a_checkpoint(ranks: Ranks, run_dir) -> None:
    deadline = time.monotonic() + 100
    while not (run_dir / "checkpoints" / "step_00000001").exists():
        assert time.monotonic() < deadline, ranks.log(0)
        time.sleep(0.02)


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_killed_in_the_middle_ends_the_run_with_its_name(tmp_path, victim):
    run_dir = tmp_path / "run"
    argv = arguments(
        tmp_path,
        run_dir,
        run__num_steps=1000,
        run__heartbeat_timeout_s=5.0,
        checkpoint__every=1,
        parallel__tensor=2,
    )
    ranks = start(argv, 2, tmp_path / "logs")
    _wait_for_a_checkpoint(ranks, run_dir)
    ranks.signal(victim)
    killed_at = time.monotonic()
    codes = ranks.wait(60)
    assert time.monotonic() - killed_at < 60
    assert codes[victim] == -9 and codes[1 - victim] not in (0, -9)
    assert f"rank {victim}" in ranks.log(1 - victim)
    # What was saved is complete and can be gone on with.
    steps = sorted(path.name for path in (run_dir / "checkpoints").glob("step_*[0-9]"))
    done = int(steps[-1].removeprefix("step_"))
    options = {"run__resume": "always", "run__num_steps": done + 1, "parallel__tensor": 2}
    again = launch(arguments(tmp_path, run_dir, **options), 2, tmp_path / "again")
    assert "resumed from" in again.log(0)


def test_a_full_disk_ends_the_run_with_the_old_checkpoint_intact(tmp_path):
    """A file-size limit makes every large write fail as a full disk does."""
    import resource

    run_dir = tmp_path / "run"
    options = {"run__num_steps": 1, "parallel__tensor": 2}
    launch(arguments(tmp_path, run_dir, **options), 2, tmp_path / "a")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, hard))
    try:
        options |= {"run__num_steps": 2, "run__resume": "if_present"}
        ranks = start(arguments(tmp_path, run_dir, **options), 2, tmp_path / "b")
        codes = ranks.wait(90)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert all(code not in (0, -9) for code in codes), codes
    assert "checkpoints" in ranks.log(0)
    options["run__num_steps"] = 2
    launch(arguments(tmp_path, run_dir, **options), 2, tmp_path / "c")
    assert len(metrics_of(run_dir)) == 2


def test_the_log_of_a_failed_run_is_kept(tmp_path):
    run_dir = tmp_path / "run"
    refused(arguments(tmp_path, run_dir, data__prompts_per_step=13), 1, tmp_path / "logs")
    assert "12 training prompts" in log_of(run_dir)
    assert os.access(run_dir, os.W_OK)


def test_a_verifier_beside_the_configuration_is_found_by_the_console_script(tmp_path):
    """The script's own folder is first on its path, not the working folder."""
    (tmp_path / "my_rewards.py").write_text(
        "def score(response, answer, prompt):\n    return 1.0\n"
    )
    argv = arguments(
        tmp_path,
        tmp_path / "run",
        run__num_steps=1,
        reward__kind="function",
        reward__function="my_rewards:score",
    )
    run = subprocess.run(
        [str(Path(sys.executable).parent / "dynamo-megatron"), "train", *argv],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    assert metrics_of(tmp_path / "run")[0]["reward/pass_rate"] == 1.0
