"""What cannot be converted is a clear error; nothing is left, and the source is as it was."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from dynamo_megatron.assets import TINY_POLICY
from dynamo_megatron.checkpoint.errors import CheckpointError
from dynamo_megatron.convert import conversion
from dynamo_megatron.convert.errors import ConversionError
from dynamo_megatron.hf.architecture import ArchitectureError
from dynamo_megatron.hf.reader import WeightsError
from tests.forked import in_child
from tests.policies import write_model
from tests.unit.convert.helpers import snapshot, tensors_of


@pytest.fixture()
def model_dir(tmp_path):
    return write_model(tmp_path / "hf", "smollm2")


def _refused(convert, source: Path, out: Path, error, match: str) -> None:
    before = snapshot(source)
    with pytest.raises(error) as caught:
        in_child(lambda: convert(source, out))
    assert re.search(match, str(caught.value)), caught.value
    assert snapshot(source) == before
    assert not out.exists()
    assert list(out.parent.glob("*.tmp-*")) == []


def test_missing_shard(model_dir, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(model_dir)
    shutil.rmtree(model_dir)
    model.save_pretrained(model_dir, max_shard_size="100KB")
    (model_dir / sorted(p.name for p in model_dir.glob("*.safetensors"))[1]).unlink()
    match = "model-00002-of-.* is not there"
    _refused(conversion.to_megatron, model_dir, tmp_path / "out", WeightsError, match)


def test_an_index_that_does_not_belong_to_the_files(model_dir, tmp_path):
    (model_dir / "model.safetensors").rename(model_dir / "1.safetensors")
    index = {"weight_map": {"model.norm.weight": "1.safetensors"}}
    (model_dir / "model.safetensors.index.json").write_text(json.dumps(index))
    _refused(conversion.to_megatron, model_dir, tmp_path / "out", WeightsError, "do not agree")


def test_truncated_safetensors(model_dir, tmp_path):
    path = model_dir / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-10])
    _refused(conversion.to_megatron, model_dir, tmp_path / "out", WeightsError, "truncated")


def test_other_family(model_dir, tmp_path):
    path = model_dir / "config.json"
    path.write_text(path.read_text().replace('"llama"', '"mistral"'))
    _refused(conversion.to_megatron, model_dir, tmp_path / "out", ArchitectureError, "mistral")


def test_weights_of_another_shape_and_too_few_layers(model_dir, tmp_path):
    path = model_dir / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | {"intermediate_size": 40}))
    out = tmp_path / "out"
    _refused(conversion.to_megatron, model_dir, out, ConversionError, r"gate_proj.*\(48, 64\)")
    path.write_text(json.dumps(config | {"num_hidden_layers": 3}))
    _refused(conversion.to_megatron, model_dir, out, ConversionError, r"beyond.*layers\.3\.")


def test_tokenizer_larger_than_the_embedding(tmp_path):
    model_dir = write_model(tmp_path / "hf", "qwen3", vocab_size=9)
    shutil.copy(TINY_POLICY / "tokenizer.json", model_dir)
    match = r"token ids up to \d+, and the embedding .* 9 rows"
    _refused(conversion.to_megatron, model_dir, tmp_path / "out", ArchitectureError, match)


def test_existing_output_folder_is_left_alone(model_dir, tiny, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    (out / "mine").write_text("mine")
    for convert, source in ((conversion.to_megatron, model_dir), (conversion.to_hf, tiny)):
        with pytest.raises(CheckpointError, match="is not an empty folder"):
            in_child(lambda c=convert, s=source: c(s, out))
    assert snapshot(out) == {"mine": b"mine"}


def test_mixed_dtypes_need_a_choice(model_dir, tmp_path):
    tensors = tensors_of(model_dir)
    tensors["model.norm.weight"] = tensors["model.norm.weight"].bfloat16()
    save_file(tensors, model_dir / "model.safetensors", metadata={"format": "pt"})
    _refused(conversion.to_megatron, model_dir, tmp_path / "out", ConversionError, "BF16, F32.*one")
    in_child(lambda: conversion.to_megatron(model_dir, tmp_path / "out", dtype=torch.float32))


def test_float64_is_converted_where_another_dtype_is_asked_for(model_dir, tmp_path):
    tensors = {name: tensor.double() for name, tensor in tensors_of(model_dir).items()}
    save_file(tensors, model_dir / "model.safetensors", metadata={"format": "pt"})
    match = "dtype F64, and a checkpoint's are .*--dtype float32"
    _refused(conversion.to_megatron, model_dir, tmp_path / "out", ConversionError, match)
    in_child(lambda: conversion.to_megatron(model_dir, tmp_path / "out", dtype=torch.float32))


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8], ids=str)
def test_quantized_weights_are_refused_whatever_is_asked_for(dtype, model_dir, tmp_path):
    tensors = tensors_of(model_dir)
    name = "model.layers.1.mlp.up_proj.weight"
    tensors[name] = tensors[name].to(dtype)
    save_file(tensors, model_dir / "model.safetensors", metadata={"format": "pt"})

    def convert(source, out):
        conversion.to_megatron(source, out, dtype=torch.bfloat16)

    _refused(convert, model_dir, tmp_path / "out", ConversionError, "quantized or no weights")


def test_a_checkpoint_is_no_model_folder(tiny, tmp_path):
    match = "is a checkpoint already: to-hf"
    _refused(conversion.to_megatron, tiny, tmp_path / "out", ConversionError, match)


def test_a_folder_that_is_no_model_is_refused_without_words_of_a_run(tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    with pytest.raises(ArchitectureError, match=r"has no config\.json") as caught:
        conversion.to_megatron(source, tmp_path / "out")
    assert "model.path" not in str(caught.value)


@pytest.mark.parametrize("damage", ["truncate", "flip", "lose", "marker", "config"])
def test_damaged_checkpoint(damage, tiny, tmp_path):
    source = shutil.copytree(tiny, tmp_path / "checkpoint")
    path = source / "__0_0.distcp"
    content = bytearray(path.read_bytes())
    if damage == "truncate":
        path.write_bytes(content[:-1])
    elif damage == "flip":
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
    elif damage == "lose":
        path.unlink()
    elif damage == "marker":
        (source / "complete.json").unlink()
    else:
        config = source / "hf" / "config.json"
        config.write_text(config.read_text().replace("10000.0", "20000.0"))
    match = {
        "truncate": "truncated",
        "flip": "CRC-32|cannot be read",
        "lose": "is missing",
        "marker": "without a complete.json",
        "config": "SHA-256",
    }[damage]
    _refused(
        conversion.to_hf,
        source,
        tmp_path / "out",
        (CheckpointError, ConversionError),
        match,
    )


def test_legacy_checkpoints_are_refused_with_a_way_out(tmp_path):
    folder = tmp_path / "iter_0000100"
    (folder / "mp_rank_00").mkdir(parents=True)
    (folder / "mp_rank_00" / "model_optim_rng.pt").write_bytes(b"")
    for given in (folder, folder / "mp_rank_00", tmp_path):
        match = r"legacy Megatron-LM checkpoint .*torch_dist"
        with pytest.raises(ConversionError, match=match):
            in_child(lambda g=given: conversion.to_hf(g, tmp_path / "out"))


def test_a_folder_of_checkpoints_names_one_of_them(tiny, tmp_path):
    shutil.copytree(tiny, tmp_path / "checkpoints" / "step_00000004")
    with pytest.raises(ConversionError, match=r"give one of them.*step_00000004"):
        in_child(lambda: conversion.to_hf(tmp_path / "checkpoints", tmp_path / "out"))


def test_source_of_another_model(tiny, model_dir, tmp_path):
    with pytest.raises(ConversionError, match=r"vocab_size: saved 275, now 101"):
        in_child(lambda: conversion.to_hf(tiny, tmp_path / "out", source=model_dir))


@pytest.mark.parametrize("direction", ["to_hf", "to_megatron"])
def test_no_space_left(direction, tiny, tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)], capture_output=True
    )
    if mounted.returncode:
        pytest.skip(f"a small file system cannot be mounted: {mounted.stderr.decode()}")
    source = tiny if direction == "to_hf" else TINY_POLICY
    convert = getattr(conversion, direction)
    try:
        with pytest.raises(ConversionError, match="GiB free"):
            in_child(lambda: convert(source, disk / "out"))
        with pytest.raises(OSError, match="No space left"):
            in_child(lambda: _without_margin(convert, source, disk / "out"))
        left = list(disk.iterdir())
    finally:
        subprocess.run(["umount", str(disk)], check=True)
    assert left == []


def test_what_a_killed_conversion_left_is_removed_by_the_next(tiny, tmp_path):
    (tmp_path / "out.tmp-0123abcd").mkdir()
    in_child(lambda: conversion.to_hf(tiny, tmp_path / "out"))
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def _without_margin(convert, source: Path, out: Path) -> None:
    """As if another program had filled the disk after the space was looked at."""
    from dynamo_megatron.convert import folder

    folder._MARGIN = -(10**12)
    convert(source, out)
