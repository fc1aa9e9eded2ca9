import logging
import shutil

import pytest

from dynamo_megatron.checkpoint.folders import (
    complete_checkpoints,
    fallback_advice,
    newest_complete,
    prune,
    publish,
)
from dynamo_megatron.checkpoint.manifest import write_manifest
from tests.unit.checkpoint.test_manifest import manifest


def make(directory, name, *, step=None, saved_at=0.0, marked=True):
    folder = directory / name
    folder.mkdir(parents=True)
    (folder / "data").write_text(name)
    if marked:
        step = int(name[5:13]) if step is None else step
        write_manifest(folder, manifest(step=step, saved_at=saved_at))
    return folder


def names(directory):
    return sorted(path.name for path in directory.iterdir())


def test_the_newest_is_the_complete_one_with_the_highest_step(tmp_path, caplog):
    assert newest_complete(tmp_path / "not there") is None
    assert newest_complete(tmp_path) is None
    make(tmp_path, "step_00000009")
    newest = make(tmp_path, "step_00000010")
    make(tmp_path, "step_00000011", marked=False)
    make(tmp_path, "step_00000012.tmp-00ff", marked=False)
    make(tmp_path, "step_99999999 (copy)")
    (tmp_path / "step_00000020").write_text("a file")
    with caplog.at_level(logging.WARNING):
        assert newest_complete(tmp_path) == newest
    assert [record.getMessage().split(" ")[0] for record in caplog.records] == [
        str(tmp_path / "step_00000011"),
        str(tmp_path / "step_00000012.tmp-00ff"),
    ]
    assert "is not complete" in caplog.text


def test_the_marker_decides_and_not_the_name(tmp_path):
    make(tmp_path, "step_00000010")
    unnamed = make(tmp_path, "step_00000011.tmp-00ff")
    assert newest_complete(tmp_path) == unnamed
    # The same step twice, killed while replacing: the later save counts.
    later = make(tmp_path, "step_00000011", saved_at=5.0)
    assert newest_complete(tmp_path) == later


def test_a_damaged_marker_is_skipped_with_its_reason(tmp_path, caplog):
    older = make(tmp_path, "step_00000001")
    (make(tmp_path, "step_00000002") / "complete.json").write_text("{")
    assert newest_complete(tmp_path) == older
    assert "step_00000002 is skipped" in caplog.text and "damaged" in caplog.text


def test_pruning_keeps_the_newest_and_removes_what_killed_saves_left(tmp_path):
    for step in range(1, 6):
        make(tmp_path, f"step_{step:08d}")
    make(tmp_path, "step_00000004.tmp-00ff", marked=False)
    (tmp_path / "notes").mkdir()
    prune(tmp_path, keep=2, written=tmp_path / "step_00000005")
    assert names(tmp_path) == ["notes", "step_00000004", "step_00000005"]
    prune(tmp_path, keep=1, written=tmp_path / "step_00000005")
    assert names(tmp_path) == ["notes", "step_00000005"]


@pytest.mark.parametrize("keep", [1, 2])
def test_pruning_never_removes_what_was_just_written(keep, tmp_path, caplog):
    """A run that fell back to step 2 while steps 8 and 9 were left in the folder."""
    for step in (1, 2, 3, 8, 9):
        make(tmp_path, f"step_{step:08d}")
    prune(tmp_path, keep=keep, written=tmp_path / "step_00000003")
    kept = ["step_00000003", "step_00000009"]
    assert names(tmp_path) == kept[:keep]
    assert "later steps than the one just saved (8, 9)" in caplog.text


def test_what_cannot_be_removed_does_not_end_the_run(tmp_path, caplog, monkeypatch):
    for step in (1, 2, 3):
        make(tmp_path, f"step_{step:08d}")

    def busy(path):
        if path.name == "step_00000001":
            raise OSError(16, "Device or resource busy")
        remove(path)

    remove = shutil.rmtree
    monkeypatch.setattr(shutil, "rmtree", busy)
    prune(tmp_path, keep=1, written=tmp_path / "step_00000003")
    assert names(tmp_path) == ["step_00000001", "step_00000003"]
    assert "step_00000001 could not be removed" in caplog.text
    found, incomplete = complete_checkpoints(tmp_path)
    assert [f.step for f in found] == [3] and incomplete == [tmp_path / "step_00000001"]


def test_publishing_over_a_checkpoint_of_the_same_step_replaces_it(tmp_path):
    make(tmp_path, "step_00000007")
    new = make(tmp_path, "step_00000007.tmp-00ff", saved_at=1.0)
    publish(new, tmp_path / "step_00000007")
    assert names(tmp_path) == ["step_00000007"]
    assert (tmp_path / "step_00000007" / "data").read_text() == "step_00000007.tmp-00ff"
    found, incomplete = complete_checkpoints(tmp_path)
    assert [f.step for f in found] == [7] and incomplete == []


def test_advice_names_the_step_to_fall_back_to(tmp_path):
    bad = make(tmp_path, "step_00000007")
    assert "no other complete checkpoint" in fallback_advice(bad)
    make(tmp_path, "step_00000005")
    assert fallback_advice(bad).endswith("to fall back to step 5 (step_00000005).")
