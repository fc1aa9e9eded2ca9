"""What a user gets right arrives exactly: numbers, overrides, interpolations."""

from pathlib import Path

import pytest

from dynamo_megatron.load_config import load_config
from tests.unit.load_config.conftest import GOOD


def test_values_of_the_file_arrive_and_the_rest_are_defaults(good: Path):
    config = load_config(good)
    assert config.run.dir == "runs/a"
    assert config.run.num_steps == 3
    assert config.data.train[0].kind == "arithmetic"
    assert config.data.train[1].path == "problems.jsonl"
    assert config.optimizer.lr == 1e-6


@pytest.mark.parametrize(
    ("written", "lr"), [("1e-6", 1e-6), ("1.0e-06", 1e-6), ("1E-3", 1e-3), ("1", 1.0), (".5", 0.5)]
)
def test_a_number_is_read_as_one_however_it_is_written(good: Path, written: str, lr: float):
    good.write_text(GOOD + f"optimizer:\n  lr: {written}\n")
    assert load_config(good).optimizer.lr == lr
    assert isinstance(load_config(good).optimizer.lr, float)
    good.write_text(GOOD)
    assert load_config(good, [f"optimizer.lr={written}"]).optimizer.lr == lr


def test_overrides_win_over_the_file_and_the_last_one_wins(good: Path):
    config = load_config(
        good,
        [
            "run.num_steps=7",
            "algorithm.modulation.alpha=0.1",
            "run.num_steps=8",
            "data.train.0.num_problems=9",
            "data.train[1].name=mine",
            "algorithm.clip.dual=null",
            "batch={micro_batch_tokens: 64}",
        ],
    )
    assert config.run.num_steps == 8
    assert config.algorithm.modulation.alpha == 0.1
    assert config.data.train[0].num_problems == 9
    assert config.data.train[1].name == "mine"
    assert config.algorithm.clip.dual is None
    assert config.batch.micro_batch_tokens == 64


def test_an_override_replaces_a_list_as_a_whole(good: Path):
    config = load_config(good, ["data.train=[{kind: json, path: b.json}]"])
    assert [source.kind for source in config.data.train] == ["json"]


def test_an_equals_sign_in_a_value_belongs_to_the_value(good: Path):
    assert load_config(good, ["run.dir=runs/lr=3"]).run.dir == "runs/lr=3"


def test_interpolations_are_resolved_after_the_overrides(good: Path, monkeypatch):
    monkeypatch.setenv("MODELS", "/models")
    good.write_text(
        GOOD.replace("builtin:tiny", "${oc.env:MODELS}/${run.seed}").replace(
            "runs/a", "r${run.seed}"
        )
    )
    config = load_config(good, ["run.seed=4"])
    assert config.model.path == "/models/4"
    assert config.run.dir == "r4"
