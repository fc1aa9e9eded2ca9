"""From Hugging Face to any layout, through real distributed checkpoints, and back: bit by bit."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from transformers import AutoModelForCausalLM

from dynamo_megatron.convert import conversion
from tests.distributed.test_hf_parity import _dense_logits
from tests.forked import in_child
from tests.policies import (
    FAMILIES,
    VOCAB,
    Layout,
    hf_weights,
    plan_for,
    random_batch,
    write_model,
)
from tests.ranks import run_on_ranks
from tests.unit.checkpoint.helpers import checkpointer, policy, train
from tests.unit.convert.helpers import assert_same_tensors, tensors_of

pytestmark = [
    pytest.mark.filterwarnings("ignore:.torch.distributed.:FutureWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning"),
]
EVERY = [Layout(tensor=t, pipeline=p) for t, p in product((1, 2, 4), (1, 2, 4))]


@pytest.mark.slow
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_layout_loads_a_converted_model_and_its_checkpoint_converts_back(
    family, tied, tmp_path
):
    """Each layout loads the checkpoint of the one before, whose padding is another."""
    model_dir = write_model(tmp_path / "hf", family, tied=tied)
    other = write_model(tmp_path / "other", family, tied=tied, seed=9)
    want = tensors_of(model_dir)
    saved = tmp_path / "megatron"
    in_child(lambda: conversion.to_megatron(model_dir, saved))
    for number, layout in enumerate(EVERY):

        def work(saved=saved, layout=layout, number=number):
            # Of another model's weights: what loading leaves out would show.
            with policy(other, layout) as run:
                keeper = checkpointer(run, tmp_path / f"{number}", hf_source=model_dir)
                keeper.load_weights(saved)
                exported = hf_weights(run)
                return keeper.save(number, {}), exported if run.topology.rank == 0 else None

        (saved, exported), *_ = run_on_ranks(work, layout.world_size, timeout=180)
        assert exported.keys() == want.keys()
        assert all(torch.equal(exported[name], want[name]) for name in want)
        out = tmp_path / f"out{number}"
        in_child(lambda saved=saved, out=out: conversion.to_hf(saved, out))
        assert_same_tensors(out, model_dir)


@pytest.mark.parametrize(
    "options",
    [
        {"layout": Layout(tensor=2, pipeline=2)},
        {"layout": Layout(tensor=2, data=2), "distributed": True},
        {"layout": Layout(tensor=2), "dtype": torch.bfloat16},
    ],
    ids=["tp2xpp2", "tp2xdp2-distributed", "bfloat16"],
)
def test_a_trained_checkpoint_converts_to_what_the_run_itself_would_export(options, tmp_path):
    model_dir = write_model(tmp_path / "hf", "llama3", tied=True)
    layout = options.pop("layout")

    def work():
        with policy(model_dir, layout, **options) as run:
            train(run, range(2))
            saved = checkpointer(run, tmp_path / "c", hf_source=model_dir).save(2, {})
            return saved, hf_weights(run)

    saved, want = run_on_ranks(work, layout.world_size, timeout=180)[0]
    in_child(lambda: conversion.to_hf(saved, tmp_path / "out"))
    got, before = tensors_of(tmp_path / "out"), tensors_of(model_dir)
    assert got.keys() == want.keys()
    assert all(torch.equal(got[name], want[name]) for name in want)
    moved = [name for name in got if not torch.equal(got[name], before[name].to(got[name].dtype))]
    assert moved, "it was trained"


def test_the_converted_model_decodes_greedily_as_the_training_model(tmp_path):
    model_dir = write_model(tmp_path / "hf", "qwen2")

    def work():
        with policy(model_dir, Layout(tensor=2)) as run:
            train(run, range(2))
            saved = checkpointer(run, tmp_path / "c", hf_source=model_dir).save(2, {})
            batch = random_batch(seed=11)
            (row,) = plan_for(run, batch, row_tokens=512)[0].micro_batches[0]
            with torch.no_grad():
                return saved, _dense_logits(run, row)[:, :VOCAB].argmax(-1)

    saved, want = run_on_ranks(work, 2)[0]
    in_child(lambda: conversion.to_hf(saved, tmp_path / "out"))
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    batch = random_batch(seed=11)
    sequences = batch.tokens.split(batch.token_offsets.diff().tolist())
    with torch.no_grad():
        got = torch.cat([model(s[None, :-1]).logits[0].argmax(-1) for s in sequences])
    assert torch.equal(got, want)
