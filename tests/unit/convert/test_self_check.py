"""A conversion that is wrong is noticed, and leaves no output."""

from __future__ import annotations

import json
import math
import re
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
    with pytest.raises(ConversionError) as caught:
        in_child(work)
    # Not ``match=``, which would search the child's traceback too, and the test's lines in it.
    assert re.search(match, str(caught.value)), caught.value
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


def changed(folder: Path, **factors: float) -> None:
    tensors = tensors_of(folder)
    for name, factor in factors.items():
        tensors[name] *= factor
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize(
    "factors",
    [{"model.norm.weight": 0.0}, {"lm_head.weight": 0.0}, {"model.embed_tokens.weight": 1e30}],
    ids=["norm", "head", "embedding"],
)
def test_logits_that_say_nothing_fail_the_check(factors, tmp_path):
    model_dir = write_model(tmp_path / "hf", "qwen3")
    changed(model_dir, **factors)
    out = tmp_path / "out"
    _fails(lambda: conversion.to_megatron(model_dir, out), out, "carry no information.*nothing was")


def test_logits_that_are_not_finite_fail_the_check(tmp_path):
    model_dir = write_model(tmp_path / "hf", "qwen3")
    changed(model_dir, **{"model.norm.weight": 1e30, "lm_head.weight": 1e30})
    out = tmp_path / "out"
    _fails(lambda: conversion.to_megatron(model_dir, out), out, "not finite.*nothing was checked")


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_weight_that_is_no_number_is_named(value, tmp_path):
    model_dir = write_model(tmp_path / "hf", "qwen3")
    changed(model_dir, **{"model.layers.2.mlp.up_proj.weight": value})
    out = tmp_path / "out"
    match = r"layers\.2\.mlp\.up_proj\.weight .*NaN or infinite numbers in float32"
    _fails(lambda: conversion.to_megatron(model_dir, out), out, match)


def test_a_number_that_the_asked_dtype_does_not_hold_is_named(tmp_path):
    model_dir = write_model(tmp_path / "hf", "qwen3")
    changed(model_dir, **{"model.norm.weight": 1e6})
    out = tmp_path / "out"
    convert = conversion.to_megatron
    match = r"model\.norm\.weight .*infinite numbers in float16.*another --dtype"
    _fails(lambda: convert(model_dir, out, dtype=torch.float16), out, match)


def test_small_logits_are_compared_in_their_own_units(tmp_path, monkeypatch):
    # A wrong fusing makes differences of about the largest logit, here 1e-6.
    model_dir = write_model(tmp_path / "hf", "qwen3")
    changed(model_dir, **{"lm_head.weight": 1e-6})
    fuse = conversion.fuse

    def swapped(kind, parts, arch):
        return fuse(kind, parts[::-1] if kind == "gate_up" else parts, arch)

    out = tmp_path / "out"
    report = in_child(lambda: conversion.to_megatron(model_dir, tmp_path / "right").check)
    assert 0 < report.max_logit < 1e-4
    monkeypatch.setattr(conversion, "fuse", swapped)
    monkeypatch.setattr("dynamo_megatron.convert.self_check.fuse", swapped)
    _fails(lambda: conversion.to_megatron(model_dir, out), out, "compute other logits")
