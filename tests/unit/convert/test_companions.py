"""What stands beside the weights: as the conversion writes it, or the check names the file."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from dynamo_megatron.assets import TINY_POLICY
from dynamo_megatron.convert import command, conversion
from dynamo_megatron.convert.errors import ConversionError
from dynamo_megatron.hf.architecture import ArchitectureError
from tests.forked import in_child
from tests.policies import write_model
from tests.unit.convert.helpers import snapshot


@pytest.fixture(scope="module")
def exported(tiny, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("exported") / "out"
    in_child(lambda: conversion.to_hf(tiny, out))
    return out


@pytest.fixture()
def folder(exported, tmp_path) -> Path:
    """A copy of the exported folder, to be changed."""
    return shutil.copytree(exported, tmp_path / "changed")


def edit(path: Path, **values) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def refused(tiny, folder, match, written="hf", error=ConversionError, **options):
    before = snapshot(folder)
    with pytest.raises(error) as caught:
        in_child(lambda: conversion.check(tiny, folder, written=written, **options))
    assert re.search(match, str(caught.value)), caught.value
    assert snapshot(folder) == before


def swap_token_ids(folder: Path) -> None:
    path = folder / "tokenizer.json"
    raw = json.loads(path.read_text())
    vocab = raw["model"]["vocab"]
    first, second = list(vocab)[:2]
    vocab[first], vocab[second] = vocab[second], vocab[first]
    path.write_text(json.dumps(raw))


CHANGES = {
    "token ids": (swap_token_ids, r"tokenizer\.json has other contents"),
    "no tokenizer": (lambda f: (f / "tokenizer.json").unlink(), r"tokenizer\.json is missing"),
    "template": (
        lambda f: (f / "chat_template.jinja").write_text("{{ messages }}"),
        r"chat_template\.jinja has other contents",
    ),
    "another template": (
        lambda f: (f / "chat_template.json").write_text('{"chat_template": ""}'),
        r"chat_template\.json is not in the source",
    ),
    "stop": (
        lambda f: edit(f / "generation_config.json", eos_token_id=7),
        r"generation_config\.json has other contents",
    ),
    "temperature": (
        lambda f: edit(f / "generation_config.json", temperature=0.1),
        r"generation_config\.json has other contents",
    ),
    "eos": (lambda f: edit(f / "config.json", eos_token_id=7), r"config\.json has eos_token_id=7"),
    "true for 1": (
        lambda f: edit(f / "config.json", attention_dropout=False),
        r"config\.json has attention_dropout=false for 0",
    ),
    "a key more": (
        lambda f: edit(f / "config.json", auto_map={"AutoConfig": "x.Y"}),
        r"config\.json has auto_map=.* for nothing",
    ),
    "dtype": (
        lambda f: edit(f / "config.json", dtype="bfloat16"),
        r'config\.json has dtype="bfloat16" for "float32"',
    ),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_changed_file_beside_the_written_weights_is_named(name, tiny, folder):
    change, match = CHANGES[name]
    change(folder)
    refused(tiny, folder, match)


@pytest.mark.parametrize("name", ["token ids", "no tokenizer", "template", "stop", "eos"])
def test_a_checkpoints_own_copies_are_those_of_its_source(name, tiny, tmp_path):
    source = shutil.copytree(TINY_POLICY, tmp_path / "source")
    change, match = CHANGES[name]
    change(source)
    match = match.replace("is missing", "is not in the source").replace("=7", "=.* for 7")
    refused(tiny, source, match, written="megatron")


def test_another_file_of_weights_in_a_written_folder_fails_its_check(tiny, folder):
    save_file({"lm_head.weight": torch.zeros(1)}, folder / "adapter.safetensors")
    refused(tiny, folder, r"holds adapter\.safetensors beside the model")


def test_the_dtype_that_is_asked_for_is_checked(tiny, folder, tmp_path):
    refused(tiny, folder, "in float32, and --dtype asks for bfloat16", dtype=torch.bfloat16)
    refused(tiny, TINY_POLICY, "asks for float16", written="megatron", dtype=torch.float16)
    report = in_child(lambda: conversion.check(tiny, folder, written="hf", dtype=torch.float32))
    assert report.num_tensors == 47


def test_the_files_may_come_from_another_source_which_is_then_named(tiny, tmp_path):
    source = shutil.copytree(TINY_POLICY, tmp_path / "source")
    (source / "chat_template.jinja").write_text("{{ messages }}")
    out = tmp_path / "out"
    in_child(lambda: conversion.to_hf(tiny, out, source=source))
    assert in_child(lambda: conversion.check(tiny, out, written="hf", source=source))
    refused(tiny, out, r"chat_template\.jinja has other contents.*--source DIR")


def test_a_file_that_was_put_into_a_checkpoint_afterwards_is_refused(tiny, tmp_path):
    checkpoint = shutil.copytree(tiny, tmp_path / "checkpoint")
    (checkpoint / "hf" / "chat_template.json").write_text("{}")
    with pytest.raises(ConversionError, match=r"saved without hf/chat_template\.json"):
        in_child(lambda: conversion.to_hf(checkpoint, tmp_path / "out"))


@pytest.mark.parametrize("name", ["generation_config.json", "tokenizer_config.json"])
@pytest.mark.parametrize("content", ["[]", "{", "3"])
def test_a_small_file_that_is_no_object_is_refused(name, content, tmp_path):
    source = shutil.copytree(TINY_POLICY, tmp_path / "source")
    (source / name).write_text(content)
    with pytest.raises(ArchitectureError, match=rf"{name} (is not JSON|holds a JSON)"):
        in_child(lambda: conversion.to_megatron(source, tmp_path / "out"))


@pytest.mark.parametrize("ids", [{"a": "1"}, {"a": None}, {"a": 1.5}, {"a": [1]}], ids=str)
def test_token_ids_that_are_no_numbers_are_refused(ids, tmp_path):
    source = shutil.copytree(TINY_POLICY, tmp_path / "source")
    (source / "tokenizer.json").write_text(json.dumps({"model": {"vocab": ids}}))
    with pytest.raises(ArchitectureError, match=r"tokenizer\.json is not a tokenizer"):
        in_child(lambda: conversion.to_megatron(source, tmp_path / "out"))


def test_what_transformers_does_not_read_is_refused_before_any_work(tmp_path):
    source = shutil.copytree(TINY_POLICY, tmp_path / "source")
    edit(source / "config.json", attention_dropout="none")
    with pytest.raises(ConversionError, match=r"transformers cannot read .*config\.json"):
        in_child(lambda: conversion.to_megatron(source, tmp_path / "out"))


def test_a_source_without_a_tokenizer_is_converted_with_a_warning(tmp_path, capfd):
    source = write_model(tmp_path / "hf", "smollm2")
    for arguments in (
        ["to-megatron", str(source), str(tmp_path / "megatron")],
        ["to-hf", str(tmp_path / "megatron"), str(tmp_path / "out")],
    ):
        assert in_child(lambda given=arguments: command.main(given)) == 0
        said = capfd.readouterr()
        assert "convert: warning: " in said.err and "has no tokenizer" in said.err
        assert "tensors equal bit by bit" in said.out
    assert not list((tmp_path / "out").glob("token*"))
