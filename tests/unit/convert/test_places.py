"""Where the result cannot appear, or must not: refused before any work, with nothing made."""

from __future__ import annotations

import os
import shutil

import pytest

from dynamo_megatron.assets import TINY_POLICY
from dynamo_megatron.convert import conversion
from dynamo_megatron.convert.errors import ConversionError
from dynamo_megatron.convert.folder import new_folder, require_new


def work_is_done(*_, **__):
    raise AssertionError("work was begun")


@pytest.fixture(params=["to_hf", "to_megatron"])
def refused(request, tiny, tmp_path, monkeypatch):
    """Converts a copy to a place, which is to be refused; nothing is to appear anywhere."""
    monkeypatch.setattr(conversion, "new_folder", work_is_done)
    original = tiny if request.param == "to_hf" else TINY_POLICY
    source = shutil.copytree(original, tmp_path / "source")

    def attempt(place, match):
        before = sorted(map(str, tmp_path.rglob("*")))
        with pytest.raises(ConversionError, match=match):
            getattr(conversion, request.param)(source, place)
        assert sorted(map(str, tmp_path.rglob("*"))) == before

    return attempt


def test_a_symbolic_link_is_refused(refused, tmp_path):
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    refused(tmp_path / "dangling", "is a symbolic link")
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "empty")
    refused(tmp_path / "link", "is a symbolic link")


def test_a_place_under_a_file_is_refused(refused, tmp_path):
    (tmp_path / "file").write_text("mine")
    refused(tmp_path / "file" / "a" / "out", "file is not a folder")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    refused(tmp_path / "dangling" / "out", "dangling is not a folder")


def test_a_place_in_the_source_is_refused(refused, tmp_path):
    for place in ("source", "source/out", "source/hf/deep/out", "other/../source/out"):
        refused(tmp_path / place, "is converted and must not be changed")
    (tmp_path / "link").symlink_to(tmp_path / "source")
    refused(tmp_path / "link" / "out", "is converted and must not be changed")


def test_a_place_in_the_folder_that_gives_the_tokenizer_is_refused(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(conversion, "new_folder", work_is_done)
    source = shutil.copytree(TINY_POLICY, tmp_path / "source")
    with pytest.raises(ConversionError, match="must not be changed"):
        conversion.to_hf(tiny, source / "out", source=source)


@pytest.mark.parametrize("place", [".", "..", "/"])
def test_a_place_without_a_name_is_refused(place, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConversionError, match="not the name of a new folder"):
        require_new(type(tmp_path)(place), tmp_path / "source")


def test_a_mount_point_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(os.path, "ismount", lambda path: path == tmp_path / "disk")
    with pytest.raises(ConversionError, match="is a mount point"):
        require_new(tmp_path / "disk", tmp_path / "source")


def test_a_failure_leaves_no_folder_on_the_way_to_the_place(tmp_path):
    with pytest.raises(KeyboardInterrupt), new_folder(tmp_path / "a/b/out", num_bytes=0) as partial:
        (partial / "file").write_text("half")
        raise KeyboardInterrupt
    assert list(tmp_path.iterdir()) == []


def test_a_failure_after_the_folder_appeared_takes_it_away_again(tmp_path, monkeypatch):
    def interrupted(folder):
        assert (tmp_path / "out" / "file").is_file()
        raise KeyboardInterrupt

    monkeypatch.setattr("dynamo_megatron.convert.folder.sync_folder", interrupted)
    with pytest.raises(KeyboardInterrupt), new_folder(tmp_path / "out", num_bytes=0) as partial:
        (partial / "file").write_text("whole")
    assert list(tmp_path.iterdir()) == []
