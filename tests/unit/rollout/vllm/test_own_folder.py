"""A killed run's folder goes with the next start, and nobody else's."""

from __future__ import annotations

import json
import tempfile
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from dynamo_megatron.rollout.vllm.own_folder import RAY, WEIGHTS, make_folder
from dynamo_megatron.rollout.vllm.processes import own_process


@pytest.fixture
def temp(monkeypatch):
    with tempfile.TemporaryDirectory(prefix="t", dir="/tmp") as folder:
        monkeypatch.setattr(tempfile, "tempdir", folder)
        yield Path(folder)


def left(temp: Path, name: str, owner: object) -> Path:
    folder = temp / f"dynamo-ray-{name}"
    (folder / "session").mkdir(parents=True)
    if owner is not None:
        (folder / "owner.json").write_text(json.dumps(owner))
    return folder


def test_the_folder_of_a_process_that_is_no_more_is_removed_and_no_other(temp):
    own = own_process()
    dead = replace(own, started_s=own.started_s - 1000.0)
    kept = [
        left(temp, "mine", asdict(own)),
        left(temp, "elsewhere", asdict(replace(dead, host="another-node"))),
        left(temp, "container", asdict(replace(dead, namespace="pid:[1]"))),
        left(temp, "unknown", None),
        left(temp, "odd", ["no owner"]),
    ]
    killed = left(temp, "killed", asdict(dead))
    (temp / "dynamo-ray-link").symlink_to(killed)
    weights = Path(make_folder(WEIGHTS))
    assert killed.exists() and weights.name.startswith("dynamo-weights-")
    new = Path(make_folder(RAY))
    assert not killed.exists()
    assert all((folder / "session").is_dir() for folder in kept)
    assert new.parent == temp and new.stat().st_mode & 0o077 == 0
    assert json.loads((new / "owner.json").read_text()) == asdict(own)
    make_folder(RAY)
    assert new.exists()


def test_in_a_long_temporary_folder_ray_could_open_no_socket(tmp_path, monkeypatch):
    long = tmp_path / ("x" * 60)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    made = Path(make_folder(RAY))
    try:
        assert made.parent == Path("/tmp")
    finally:
        (made / "owner.json").unlink()
        made.rmdir()
