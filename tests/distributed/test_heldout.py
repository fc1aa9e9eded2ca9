"""Evaluation during a run: one result on every rank, and on disk what the command leaves."""

from __future__ import annotations

import json
from contextlib import ExitStack

import pytest
import torch.distributed as dist

from dynamo_megatron.config import Config
from dynamo_megatron.evaluate.fingerprint import verifier_fingerprint
from dynamo_megatron.evaluate.samples import SampleFile
from dynamo_megatron.evaluate.summary import summarise
from dynamo_megatron.parallel.control import ControlPlane
from dynamo_megatron.reward.pool import RewardPool
from dynamo_megatron.stages.heldout import HeldoutStage
from dynamo_megatron.stages.sampling import RolloutTier
from dynamo_megatron.types import FinishReason, Prompt
from tests.fakes import Script, ScriptedEngine
from tests.ranks import run_on_ranks

PROMPTS = tuple(
    Prompt(id=name, text=f"Compute {name}", token_ids=(1,), answer="2", source=source)
    for name, source in (("a", "x"), ("b", "x"), ("c", "y"))
)


def script(text: str, *, tokens: int = 2, cut: bool = False) -> Script:
    reason = FinishReason.LENGTH if cut else FinishReason.STOP
    return Script(token_ids=(1,) * tokens, text=text, finish_reason=reason)


# right, wrong by their number; "?" cannot be verified
SCRIPTS = {
    "a": [script("2"), script("3"), script("2"), script("?")],
    "b": [script("2"), script("2"), script("2"), script("2", tokens=8, cut=True)],
    "c": [script("5"), script("5"), script("6"), script("2")],
}


SAME_TEXT = "tests.unit.reward.verifiers:same_text"


def config(run_dir, **evaluation) -> Config:
    return Config.model_validate(
        {
            "run": {"dir": str(run_dir), "num_steps": 1, "seed": 3},
            "model": {"path": "builtin:tiny"},
            "data": {"train": [{"kind": "arithmetic", "num_problems": 9, "split": "train"}]},
            "evaluation": {"samples": 4, **evaluation},
            "observe": {"plots": evaluation.get("report", True)},
            "reward": {"kind": "function", "function": SAME_TEXT},
        }
    )


def evaluated(run_dir, world_size, *, steps=(0,), **evaluation):
    """What each rank found at each of the steps."""
    store_file = run_dir.with_name(f"{run_dir.name}.store")

    def work():
        store = dist.FileStore(str(store_file), world_size)
        with ExitStack() as closing:
            control = closing.enter_context(
                ControlPlane(store, group=dist.group.WORLD, timeout_s=10)
            )
            engine = reward = None
            if dist.get_rank() == 0:
                engine = ScriptedEngine(scripts=SCRIPTS)
                reward = closing.enter_context(RewardPool(SAME_TEXT, workers=1, timeout_s=30))
            tier = RolloutTier(
                engine=engine,
                reward=reward,
                control=control,
                group=dist.group.WORLD,
                temperature=1.0,
                seed=3,
            )
            stage = HeldoutStage(PROMPTS, config(run_dir, **evaluation))
            tier.load_weights([], version=0)
            return [stage.run(tier, step) for step in steps]

    return run_on_ranks(work, world_size)


def test_every_rank_has_the_same_result_and_it_is_that_of_any_number_of_ranks(tmp_path):
    (one,) = evaluated(tmp_path / "one", 1)
    for ranks in (2, 4):
        assert evaluated(tmp_path / f"{ranks}", ranks) == [one] * ranks


def test_the_folder_is_that_of_the_command_with_the_same_figures(tmp_path):
    (result,), _ = evaluated(tmp_path, 2)
    out = tmp_path / "evaluations" / "step_000000"
    assert {p.relative_to(out).as_posix() for p in out.rglob("*") if p.is_file()} == {
        "samples.jsonl",
        "settings.json",
        "summary.json",
        "index.html",
        "plots/accuracy.png",
        "plots/pass_at_k.png",
        "plots/lengths.png",
    }
    with SampleFile(out / "samples.jsonl") as file:
        samples = list(file.read())
    assert [(s.id, s.k) for s in samples] == [(p.id, k) for p in PROMPTS for k in range(4)]
    settings = json.loads((out / "settings.json").read_text())
    assert settings["verifier_source"] == verifier_fingerprint(SAME_TEXT) is not None
    record = json.loads((out / "summary.json").read_text())
    assert [row["source"] for row in record["results"]] == ["x", "y", "all"]
    by_hand = {
        "pass@1": (2 / 3 + 1 + 1 / 4) / 3,
        # one of the three verified samples of a is wrong: no two are
        "pass@2": (1 + 1 + 1 / 2) / 3,
        # of b and c, which have four
        "pass@4": 1.0,
        # a 2 of 3 and b say 2; c says 5
        "maj@4": 2 / 3,
        "x/pass@1": (2 / 3 + 1) / 2,
        "y/pass@1": 1 / 4,
        "length_mean": (11 * 2 + 8) / 12,
        "truncated_rate": 1 / 12,
        "failures": 1.0,
        "num": 3.0,
    }
    metrics = result.metrics()
    for name, value in by_hand.items():
        assert metrics[f"eval/{name}"] == pytest.approx(value), name
    total = record["results"][-1]
    assert total["pass_at_k"]["4"]["mean"] == metrics["eval/pass@4"]
    assert total["pass_at_1"]["low"] == metrics["eval/pass@1_low"]
    # The command reads the samples back to the same figures.
    (_, _, again) = summarise(samples, seed=3)
    assert again.pass_at_1.low == result.low and again.pass_at_1.high == result.high


def test_an_evaluation_made_again_takes_the_place_of_the_first(tmp_path):
    stale = tmp_path / "evaluations" / "step_000004"
    stale.mkdir(parents=True)
    (stale / "samples.jsonl").write_text("of a process that was killed\n")
    half = tmp_path / "evaluations" / ".step_000004.partial"
    half.mkdir()
    (half / "old.txt").touch()
    (first, second), _ = evaluated(tmp_path, 2, steps=(0, 4), report=False)
    folders = {p.name: p for p in (tmp_path / "evaluations").iterdir()}
    assert folders.keys() == {"step_000000", "step_000004"}
    names = {"samples.jsonl", "settings.json", "summary.json"}
    assert all({p.name for p in folder.iterdir()} == names for folder in folders.values())
    # The same policy is asked with the same seeds: the step decides nothing.
    lines = [(folder / "samples.jsonl").read_bytes() for folder in folders.values()]
    assert lines[0] == lines[1]
    assert first.metrics() == second.metrics() and (first.step, second.step) == (0, 4)


def test_what_cannot_be_written_ends_every_rank_but_a_missing_page_does_not(tmp_path, monkeypatch):
    def no_room(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("dynamo_megatron.stages.heldout.write_report", no_room)
    results = evaluated(tmp_path / "page", 2)
    assert results[0] == results[1]
    monkeypatch.setattr("dynamo_megatron.stages.heldout.write_summary", no_room)
    with pytest.raises(AssertionError, match="No space left on device"):
        evaluated(tmp_path / "summary", 2)
    assert [p.name for p in (tmp_path / "summary" / "evaluations").iterdir()] == [
        ".step_000000.partial"
    ]
