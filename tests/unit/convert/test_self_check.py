"""A conversion that is wrong is noticed, and leaves no output."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from dynamo_megatron.assets import TINY_POLICY
from dynamo_megatron.convert import conversion
from dynamo_megatron.convert.errors import ConversionError
from tests.forked import in_child
from tests.policies import write_model
from tests.unit.convert.helpers import snapshot, tensors_of


@pytest.fixture(params=["qwen2", "qwen3"])
def model_dir(request, tmp_path):
    return write_model(tmp_path / "hf", request.param)


def _fails(work, out: Path, match: str) -> None:
    with pytest.raises(ConversionError, match=match):
        in_child(work)
    assert not out.exists()
    assert list(out.parent.glob(f"{out.name}.tmp-*")) == []


def test_a_mapping_that_is_wrong_both_ways_is_seen_in_the_logits(model_dir, tmp_path, monkeypatch):
    # Keys where values belong: the round trip is bitwise all the same.
    fuse = conversion.fuse

    def swapped(kind, parts, arch):
        if kind == "qkv":
            parts = [parts[0], parts[2], parts[1]]
        return fuse(kind, parts, arch)

    monkeypatch.setattr(conversion, "fuse", swapped)
    monkeypatch.setattr("dynamo_megatron.convert.self_check.fuse", swapped)
    out = tmp_path / "out"
    _fails(lambda: conversion.to_megatron(model_dir, out), out, "compute other logits")


@pytest.mark.parametrize(
    ("option", "value"), [("rope_theta", 2e4), ("rms_norm_eps", 1e-2), ("rope_type", "linear")]
)
def test_a_configuration_that_transformers_reads_otherwise_is_seen_in_the_logits(
    option, value, model_dir, tmp_path, monkeypatch
):
    def other(folder, positions):
        path = folder / "config.json"
        raw = json.loads(path.read_text())
        rope = raw["rope_parameters"]
        rope |= {"factor": 2.0}
        (rope if option in rope else raw)[option] = value
        path.write_text(json.dumps(raw))
        return hf_layers(folder, positions)

    from dynamo_megatron.convert import self_check

    hf_layers = self_check.HfLayers
    monkeypatch.setattr(self_check, "HfLayers", other)
    out = tmp_path / "out"
    _fails(lambda: conversion.to_megatron(model_dir, out), out, "compute other logits")


def test_one_wrong_number_is_seen(model_dir, tmp_path, monkeypatch):
    write = conversion.CheckpointWriter.add

    def flipped(self, key, tensor, **layer):
        if key.endswith("linear_fc2.weight") and layer["layer"] == 3:
            tensor = tensor.clone()
            tensor[5, 7] = torch.nextafter(tensor[5, 7], torch.tensor(math.inf))
        write(self, key, tensor, **layer)

    monkeypatch.setattr(conversion.CheckpointWriter, "add", flipped)
    out = tmp_path / "out"
    _fails(
        lambda: conversion.to_megatron(model_dir, out),
        out,
        r"model\.layers\.3\.mlp\.down_proj\.weight .* hold different numbers",
    )


def test_check_only_passes_a_pair_and_refuses_a_changed_one(tiny, tmp_path):
    out = tmp_path / "out"
    in_child(lambda: conversion.to_hf(tiny, out))
    before = snapshot(out)
    for written in ("hf", "megatron"):
        report = in_child(lambda w=written: conversion.check(tiny, out, written=w))
        assert report.num_tensors == len(tensors_of(TINY_POLICY))
    assert snapshot(out) == before
    tensors = tensors_of(out)
    tensors["model.norm.weight"][0] += 1e-3
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConversionError, match=r"model\.norm\.weight .* different numbers"):
        in_child(lambda: conversion.check(tiny, out, written="hf"))
