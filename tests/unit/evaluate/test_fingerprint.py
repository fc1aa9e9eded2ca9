"""A model folder and a verifier are told apart by what they hold, not by where or when."""

import os
import shutil
import sys

import pytest

from dynamo_megatron.assets import TINY_POLICY
from dynamo_megatron.evaluate.fingerprint import (
    BLOCK_BYTES,
    BLOCKS,
    text_fingerprint,
    verifier_fingerprint,
    weights_fingerprint,
)

HEADER = b'{"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]}}'
LARGE = 3 * BLOCKS * BLOCK_BYTES


@pytest.fixture
def folder(tmp_path):
    return shutil.copytree(TINY_POLICY, tmp_path / "model")


def both(folder):
    return weights_fingerprint(folder), text_fingerprint(folder)


def test_a_copy_made_later_elsewhere_is_the_same_model(folder):
    assert both(folder) == both(TINY_POLICY)
    for path in folder.rglob("*"):
        os.utime(path, (1, 1))
    assert both(folder) == both(TINY_POLICY)


def large(path, changes=()):
    """A sparse file of weights, three times what is read of it."""
    with path.open("wb") as file:
        file.write(len(HEADER).to_bytes(8, "little") + HEADER)
        file.truncate(LARGE)
        for place in changes:
            file.seek(place)
            file.write(b"\x01")
    return weights_fingerprint(path.parent)


def test_changed_weights_have_another_fingerprint_and_the_same_text_files(folder):
    weights, text = both(folder)
    path = folder / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    assert weights_fingerprint(folder) != weights
    assert text_fingerprint(folder) == text


def test_of_large_weights_size_header_ends_and_blocks_between_are_seen(tmp_path):
    path = tmp_path / "model.safetensors"
    before = large(path)
    assert large(path) == before
    middle = (LARGE - BLOCK_BYTES) * 100 // (BLOCKS - 1)
    for place in (9, BLOCK_BYTES - 1, middle, LARGE - 1):
        assert large(path, [place]) != before
    # Every half of a block's distance: what changes all over is never missed.
    assert large(path, range(0, LARGE, 3 * BLOCK_BYTES)) != before
    large(path)
    with path.open("ab") as file:
        file.write(b"\x00")
    assert weights_fingerprint(tmp_path) != before


def test_a_header_longer_than_a_block_is_read_whole(tmp_path):
    path = tmp_path / "model.safetensors"
    found = set()
    for end in (b"a", b"b"):
        with path.open("wb") as file:
            length = 2 * BLOCK_BYTES
            file.write(length.to_bytes(8, "little") + b" " * (length - 1) + end)
            file.truncate(LARGE)
        found.add(weights_fingerprint(tmp_path))
    assert len(found) == 2


@pytest.mark.parametrize(
    "name",
    [
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "special_tokens_map.json",
        "added_tokens.json",
        "vocab.txt",
        "merges.txt",
        "spiece.model",
        "chat_template.jinja",
        "chat_template.json",
        "additional_chat_templates/tools.jinja",
    ],
)
def test_every_text_file_that_is_read_counts(folder, name):
    weights, text = both(folder)
    path = folder / name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes((path.read_bytes() if path.exists() else b"") + b" ")
    assert text_fingerprint(folder) != text
    assert weights_fingerprint(folder) == weights


def test_files_that_nothing_reads_do_not_count(folder):
    before = both(folder)
    for name in ("README.md", "trainer_state.json", "notes.txt"):
        (folder / name).write_text("x")
    (folder / "evaluation").mkdir()
    (folder / "evaluation" / "config.json").write_text("x")
    assert both(folder) == before


def test_a_verifier_is_known_by_its_file_which_is_not_imported(tmp_path, monkeypatch):
    package = tmp_path / "verifiers_of_a_user" / "deep"
    package.mkdir(parents=True)
    for path in (package.parent / "__init__.py", package / "__init__.py", package / "mine.py"):
        path.write_text("raise SystemExit('imported')\n")
    monkeypatch.syspath_prepend(tmp_path)
    spec = "verifiers_of_a_user.deep.mine:score"
    before = verifier_fingerprint(spec)
    assert before == verifier_fingerprint(spec) and len(before) == 16
    (package / "mine.py").write_text("raise SystemExit('changed')\n")
    assert verifier_fingerprint(spec) not in (before, None)
    assert not [name for name in sys.modules if name.startswith("verifiers_of_a_user")]


def test_a_verifier_in_the_working_folder_is_found(tmp_path, monkeypatch):
    (tmp_path / "verifier_of_this_folder.py").write_text("")
    monkeypatch.chdir(tmp_path)
    assert verifier_fingerprint("verifier_of_this_folder:f") is not None


@pytest.mark.parametrize("verifier", ["math", "nowhere_at_all:f", "nowhere.at.all:f", "sys:f"])
def test_without_a_file_of_the_users_there_is_no_fingerprint(verifier):
    assert verifier_fingerprint(verifier) is None
