"""The count of a weight update, tensor by tensor. Run by ``test_own_process``."""

from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch
from torch import nn
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

from dynamo_megatron.rollout.vllm import gloo_backend
from dynamo_megatron.rollout.vllm.worker import WeightCounter, audit, is_tied, parts_of

PACKED = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}
PARAMETERS = [
    "model.embed_tokens.weight",
    "model.layers.0.self_attn.qkv_proj.weight",
    "model.layers.0.self_attn.qkv_proj.bias",
    "model.layers.0.mlp.gate_up_proj.weight",
    "model.norm.weight",
    "lm_head.weight",
]
TENSORS = [
    "model.embed_tokens.weight",
    *(
        f"model.layers.0.self_attn.{part}_proj.{kind}"
        for part in "qkv"
        for kind in ("weight", "bias")
    ),
    "model.layers.0.mlp.gate_proj.weight",
    "model.layers.0.mlp.up_proj.weight",
    "model.norm.weight",
    "lm_head.weight",
]


def audited(received=None, *, parameters=PARAMETERS, written=None, tied=False):
    received = dict.fromkeys(TENSORS, 1) if received is None else received
    written = set(parameters) if written is None else written
    return audit(parameters, received, written, packed=PACKED, tied=tied)


def without(names, *left_out):
    assert set(left_out) <= set(names)
    return [name for name in names if name not in left_out]


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("model.norm.weight", ["model.norm.weight"]),
        (
            "model.layers.3.self_attn.qkv_proj.bias",
            [f"model.layers.3.self_attn.{part}_proj.bias" for part in "qkv"],
        ),
        (
            "model.layers.0.mlp.gate_up_proj.weight",
            ["model.layers.0.mlp.gate_proj.weight", "model.layers.0.mlp.up_proj.weight"],
        ),
        ("gate_up_proj.weight", ["gate_proj.weight", "up_proj.weight"]),
        ("lm_head.weight", ["lm_head.weight"]),
        ("scale", ["scale"]),
    ],
)
def test_an_engine_parameter_is_made_of_its_parts(name, parts):
    assert parts_of(name, PACKED) == parts


def test_an_update_of_every_tensor_has_no_problem():
    found = audited()
    assert (found.tensors, found.parameters, found.problems) == (11, 6, ())


def test_a_part_of_a_fused_layer_that_never_came_is_named():
    # The loader says that it wrote qkv_proj: two thirds of it.
    lost = "model.layers.0.self_attn.k_proj.bias"
    received = dict.fromkeys(without(TENSORS, lost), 1)
    assert audited(received).problems == (f"1 never came: {lost}",)


def test_a_tensor_that_came_twice_is_named():
    received = {**dict.fromkeys(TENSORS, 1), "model.norm.weight": 2}
    assert audited(received).problems == ("1 came more than once: model.norm.weight",)


def test_a_tensor_the_engine_does_not_know_is_named():
    received = dict.fromkeys([*TENSORS, "model.layers.1.mlp.up_proj.weight"], 1)
    assert audited(received).problems == (
        "1 are unknown to the engine: model.layers.1.mlp.up_proj.weight",
    )


def test_a_parameter_the_loader_did_not_write_is_named():
    written = set(without(PARAMETERS, "model.norm.weight"))
    assert audited(written=written).problems == ("1 were not written: model.norm.weight",)


def test_every_kind_of_problem_is_told_and_long_lists_are_cut():
    received = {f"w{i}": 1 for i in range(8)}
    problems = audit(["norm.weight"], received, set(), packed={}, tied=False).problems
    assert problems == (
        "1 never came: norm.weight",
        "8 are unknown to the engine: w0, w1, w2, w3, w4 and 3 more",
        "1 were not written: norm.weight",
    )


@pytest.mark.parametrize("sent", [True, False])
@pytest.mark.parametrize("listed", [True, False])
def test_a_tied_output_layer_may_come_or_not(sent, listed):
    parameters = PARAMETERS if listed else without(PARAMETERS, "lm_head.weight")
    received = dict.fromkeys(TENSORS if sent else without(TENSORS, "lm_head.weight"), 1)
    written = set(without(PARAMETERS, "lm_head.weight"))
    assert audited(received, parameters=parameters, written=written, tied=True).problems == ()


def test_an_output_layer_of_its_own_must_come():
    received = dict.fromkeys(without(TENSORS, "lm_head.weight"), 1)
    assert audited(received).problems == ("1 never came: lm_head.weight",)
    assert audited(parameters=without(PARAMETERS, "lm_head.weight")).problems == (
        "1 are unknown to the engine: lm_head.weight",
    )


def test_a_tied_output_layer_that_comes_twice_is_named():
    received = {**dict.fromkeys(TENSORS, 1), "lm_head.weight": 2}
    assert audited(received, tied=True).problems == ("1 came more than once: lm_head.weight",)


class Model(nn.Module):
    """Loads as vLLM's models do: two tensors into one parameter, one directly."""

    packed_modules_mapping: ClassVar = {"gate_up_proj": ["gate_proj", "up_proj"]}

    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(tie_word_embeddings=False)
        self.gate_up_proj = nn.Linear(2, 4, bias=False)
        self.norm = nn.LayerNorm(2, bias=False)

    def load_weights(self, weights) -> set[str]:
        written = set()
        for name, tensor in weights:
            rows = {"gate_proj.weight": slice(0, 2), "up_proj.weight": slice(2, 4)}.get(name)
            target = self.norm.weight if rows is None else self.gate_up_proj.weight[rows]
            target.data.copy_(tensor)
            written.add("norm.weight" if rows is None else "gate_up_proj.weight")
        return written


def load_all(model: Model, *names: str) -> None:
    for name in names:
        model.load_weights([(name, torch.ones(2) if "norm" in name else torch.ones(2, 2))])


def test_a_counter_sums_over_buckets_and_lets_the_weights_through():
    model = Model()
    counter = WeightCounter(model)
    counter.install()
    load_all(model, "gate_proj.weight", "norm.weight")
    load_all(model, "up_proj.weight")
    counter.remove()
    found = counter.audit()
    assert (found.tensors, found.parameters, found.problems) == (3, 2, ())
    assert model.gate_up_proj.weight.eq(1).all() and model.norm.weight.eq(1).all()


def test_a_counter_sees_what_a_silent_loader_forgives():
    model = Model()
    counter = WeightCounter(model)
    counter.install()
    load_all(model, "up_proj.weight", "norm.weight", "norm.weight")
    assert counter.audit().problems == (
        "1 never came: gate_proj.weight",
        "1 came more than once: norm.weight",
    )


def test_nothing_is_counted_before_or_after():
    model = Model()
    load_all(model, "norm.weight")
    counter = WeightCounter(model)
    counter.install()
    counter.remove()
    load_all(model, "norm.weight")
    assert counter.audit().tensors == 0
    assert "load_weights" not in vars(model)


@pytest.mark.parametrize("tied", [True, False])
def test_tied_is_what_the_model_says(tied):
    model = Model()
    model.config.tie_word_embeddings = tied
    assert is_tied(model) is tied


def test_the_gloo_back_end_is_in_vllms_registry_once():
    assert gloo_backend.BACKEND in WeightTransferEngineFactory._registry
    gloo_backend.register()
