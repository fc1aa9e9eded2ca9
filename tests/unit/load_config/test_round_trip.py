"""Any configuration can be written and read back, and a failed write leaves the old file."""

import os
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from dynamo_megatron.config import Config
from dynamo_megatron.load_config import load_config, to_yaml, write_resolved

TRICKY = [
    "1e-6",
    "null",
    "true",
    "${run.seed}",
    "\\${x}",
    "a\\\\${b}",
    "x: y",
    "- z",
    "0x1f",
    "'",
    "~",
]


@pytest.mark.parametrize("value", TRICKY)
def test_text_that_looks_like_something_else_survives_the_round_trip(good: Path, value: str):
    config = load_config(good)
    config = config.model_copy(update={"run": config.run.model_copy(update={"dir": value})})
    good.write_text(to_yaml(config))
    assert load_config(good) == config


text = st.text(
    st.characters(blacklist_categories=("Cs",)) | st.sampled_from("${}\\:#'\" -"), max_size=12
).filter(lambda value: value != "???")


@settings(max_examples=80, deadline=None)
@given(
    run_dir=text,
    lr=st.floats(min_value=1e-300, max_value=1e300),
    tensor=st.integers(1, 10**6),
    name=st.none() | text,
)
def test_any_config_survives_the_round_trip(tmp_path_factory, run_dir, lr, tensor, name):
    config = Config.model_validate(
        {
            "run": {"dir": run_dir, "num_steps": 1},
            "model": {"path": "builtin:tiny"},
            "data": {"train": [{"kind": "json", "path": run_dir, "name": name}]},
            "parallel": {"tensor": tensor},
            "optimizer": {"lr": lr},
        }
    )
    path = tmp_path_factory.mktemp("round") / "config.yaml"
    path.write_text(to_yaml(config), encoding="utf-8")
    assert load_config(path) == config


def test_write_resolved_leaves_one_readable_file_with_every_default(good: Path, tmp_path: Path):
    config = load_config(good, ["run.seed=3"])
    run_dir = tmp_path / "new" / "run"
    target = write_resolved(config, run_dir)
    assert os.listdir(run_dir) == ["config.yaml"]
    assert load_config(target) == config
    assert yaml.safe_load(target.read_text())["optimizer"]["weight_decay"] == 0.1
    write_resolved(load_config(good), run_dir)
    assert load_config(target).run.seed == 0


def test_write_resolved_keeps_the_old_file_when_writing_fails(
    good: Path, tmp_path: Path, monkeypatch
):
    target = write_resolved(load_config(good), tmp_path / "run")
    before = target.read_bytes()

    def full_disk(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full_disk)
    with pytest.raises(OSError, match="No space left"):
        write_resolved(load_config(good, ["run.seed=9"]), tmp_path / "run")
    assert target.read_bytes() == before
    assert os.listdir(tmp_path / "run") == ["config.yaml"]
