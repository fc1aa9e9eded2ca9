import dataclasses
import json

import pytest

from dynamo_megatron.checkpoint.errors import CheckpointError
from dynamo_megatron.checkpoint.manifest import (
    FileRecord,
    Manifest,
    different_keys,
    read_manifest,
    record_files,
    verify_hashes,
    verify_sizes,
    write_manifest,
)


def manifest(**changes) -> Manifest:
    values = {
        "format_version": 1,
        "step": 12,
        "saved_at": 1.5,
        "megatron_core": "0.16.1",
        "torch": "2.13.0",
        "fingerprint": {"num_layers": 4},
        "layout": {"tensor": 2, "pipeline": 1, "data": 1, "cuda": 0},
        "optimizer": "FP32Optimizer",
        "optimizer_state": True,
        "scheduler_steps": 13,
        "files": {"a.txt": FileRecord(size=3, sha256="00")},
    }
    return Manifest(**(values | changes))


def test_a_manifest_reads_back_equal(tmp_path):
    write_manifest(tmp_path, manifest())
    assert read_manifest(tmp_path) == manifest()
    assert [path.name for path in tmp_path.iterdir()] == ["complete.json"]


def test_records_hold_sizes_and_hashes_and_take_known_ones_as_they_are(tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "text").write_bytes(b"abc")
    (tmp_path / "large").write_bytes(b"abcd")
    # SHA-256 of "abc", from FIPS 180-2.
    known = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    assert record_files(tmp_path, {"large": "from its rank"}) == {
        "large": FileRecord(size=4, sha256="from its rank"),
        "sub/text": FileRecord(size=3, sha256=known),
    }


def _check(folder, saved, world_size=1):
    verify_sizes(folder, saved)
    for rank in range(world_size):
        verify_hashes(folder, saved, rank=rank, world_size=world_size)


def test_missing_truncated_and_edited_files_are_told_apart(tmp_path):
    for name in ("missing", "truncated", "edited"):
        (tmp_path / name).write_bytes(b"0123456789")
    saved = manifest(files=record_files(tmp_path, {}))
    _check(tmp_path, saved)
    (tmp_path / "edited").write_bytes(b"0123456780")
    with pytest.raises(CheckpointError, match=r"/edited has the right size but another SHA-256"):
        _check(tmp_path, saved)
    (tmp_path / "edited").write_bytes(b"0123456789")
    (tmp_path / "truncated").write_bytes(b"01234")
    with pytest.raises(CheckpointError, match=r"/truncated has 5 bytes and was saved with 10"):
        _check(tmp_path, saved)
    (tmp_path / "truncated").write_bytes(b"0123456789")
    (tmp_path / "missing").unlink()
    with pytest.raises(CheckpointError, match=r"/missing is missing"):
        _check(tmp_path, saved)


@pytest.mark.parametrize("world_size", [1, 2, 3, 7])
def test_the_ranks_together_check_every_file_once(world_size, tmp_path):
    for size in range(5):
        (tmp_path / f"file{size}").write_bytes(bytes(size))
    good = record_files(tmp_path, {})
    for name in good:
        bad = manifest(files=good | {name: FileRecord(size=good[name].size, sha256="00")})
        noticed = []
        for rank in range(world_size):
            try:
                verify_hashes(tmp_path, bad, rank=rank, world_size=world_size)
            except CheckpointError:
                noticed.append(rank)
        assert len(noticed) == 1


def test_a_newer_format_asks_for_the_version_that_wrote_it(tmp_path):
    raw = dataclasses.asdict(manifest(format_version=2)) | {"something": "new"}
    (tmp_path / "complete.json").write_text(json.dumps(raw))
    with pytest.raises(CheckpointError, match=r"format version 2, .* reads 1\. Use the version"):
        read_manifest(tmp_path)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"format_version": 1}', b"\xff"])
def test_a_damaged_marker_is_named(content, tmp_path):
    (tmp_path / "complete.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"complete\.json .*damaged: delete its folder"):
        read_manifest(tmp_path)


def test_a_folder_without_a_marker_is_no_checkpoint(tmp_path):
    with pytest.raises(CheckpointError, match=r"has no complete\.json"):
        read_manifest(tmp_path)
    with pytest.raises(CheckpointError, match=r"has no complete\.json"):
        read_manifest(tmp_path / "nowhere")


def test_differences_name_the_keys_with_both_values():
    saved = {"model": {"layers": 4, "tied": True}, "stages": (1, 2), "gone": 1}
    now = {"model": {"layers": 8, "tied": True}, "stages": [1, 2], "new": None}
    assert different_keys(saved, now) == [
        "gone: saved 1, now 'nothing'",
        "model.layers: saved 4, now 8",
        "new: saved 'nothing', now None",
    ]
    assert different_keys(saved, saved) == []
