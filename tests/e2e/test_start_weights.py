"""A run from the weights of a Megatron checkpoint is the run from the Hugging Face folder."""

from __future__ import annotations

import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from dynamo_megatron.assets import TINY_POLICY
from dynamo_megatron.convert import conversion
from tests.e2e.test_run import results
from tests.forked import in_child
from tests.launch import arguments, launch, start


@pytest.fixture(scope="module")
def other_weights(tmp_path_factory):
    """The tiny policy's configuration with weights that are nobody's."""
    folder = shutil.copytree(TINY_POLICY, tmp_path_factory.mktemp("other") / "hf")
    generator = torch.Generator().manual_seed(1)
    weights = load_file(folder / "model.safetensors")
    for name, tensor in weights.items():
        noise = torch.randn(tensor.shape, generator=generator)
        weights[name] = (tensor.float() + 0.05 * noise).to(tensor.dtype)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def converted(folder, dtype: str):
    """The tiny policy as a Megatron checkpoint."""
    out = folder / "megatron"
    in_child(lambda: conversion.to_megatron(TINY_POLICY, out, dtype=getattr(torch, dtype)))
    return out


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "distributed"),
    [("float32", True), ("bfloat16", False), ("bfloat16", True)],
    ids=["float32-distributed", "bfloat16", "bfloat16-distributed"],
)
def test_a_run_from_a_converted_checkpoint_is_the_run_from_the_folder(
    tmp_path, other_weights, dtype, distributed
):
    checkpoint = converted(tmp_path, dtype)
    options = {
        "parallel__tensor": 2,
        "model__dtype": dtype,
        "rollout__gate_tolerance": 1e-3 if dtype == "float32" else 1.0,
        "optimizer__distributed": distributed,
        # The penalty's reference, and the optimizer's copies, are of the weights it starts from.
        "algorithm__kl__coefficient": 0.1,
    }
    launch(arguments(tmp_path, tmp_path / "hf", **options), 2, tmp_path / "a")
    options |= {"model__path": str(other_weights), "model__weights": str(checkpoint)}
    ranks = launch(arguments(tmp_path, tmp_path / "mg", **options), 2, tmp_path / "b")
    want, got = results(tmp_path / "hf"), results(tmp_path / "mg")
    assert len(want) == 2 and got == want
    assert f"the weights to start from are those of {checkpoint}" in ranks.log(0)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"model__dtype": "bfloat16"}, "dtype: saved 'float32', now 'bfloat16'"),
        ({"model__weights": "nowhere"}, "model.weights=nowhere: nowhere has no complete.json"),
        ({"model__weights": None, "model__path": ""}, "Set model.weights to it, and model.path"),
    ],
    ids=["dtype", "no checkpoint", "model.path"],
)
def test_what_does_not_fit_is_refused_and_says_what_to_set(tmp_path, options, words):
    checkpoint = converted(tmp_path, "float32")
    options = {"model__weights": str(checkpoint)} | options
    if options.get("model__path") == "":
        options["model__path"] = str(checkpoint)
    ranks = start(arguments(tmp_path, tmp_path / "run", **options), 1, tmp_path / "logs")
    assert ranks.wait() == [1]
    assert words in ranks.log(0) and "Traceback" not in ranks.log(0)


def test_a_resumed_run_keeps_the_start_as_the_penaltys_reference(tmp_path, other_weights):
    options = {
        "model__path": str(other_weights),
        "model__weights": str(converted(tmp_path, "float32")),
        "algorithm__kl__coefficient": 0.1,
        "run__num_steps": 3,
        "checkpoint__every": 1,
    }
    launch(arguments(tmp_path, tmp_path / "whole", **options), 1, tmp_path / "a")
    options["run__num_steps"] = 2
    launch(arguments(tmp_path, tmp_path / "broken", **options), 1, tmp_path / "b")
    options |= {"run__num_steps": 3, "run__resume": "always"}
    launch(arguments(tmp_path, tmp_path / "broken", **options), 1, tmp_path / "c")
    whole = results(tmp_path / "whole")
    assert results(tmp_path / "broken") == whole
    assert whole[0]["train/reference_kl"] == 0.0 < whole[2]["train/reference_kl"]
