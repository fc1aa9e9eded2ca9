"""Loading weights: every parameter exactly once."""

import pytest
import torch

from dynamo_megatron.assets import TINY_POLICY
from dynamo_megatron.rollout.errors import RolloutError
from tests.unit.rollout.conftest import engine_of, sizes_of

NAME = "model.layers.1.mlp.up_proj.weight"


@pytest.fixture
def weights(model):
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def responses(engine, prompts):
    rollouts = engine.generate(
        prompts, sizes_of(prompts, (2,) * 5), step=0, temperature=1.0, seed=0
    )
    return [r.token_ids for r in rollouts], {r.weight_version for r in rollouts}


def test_loaded_weights_are_the_ones_sampled_from(prompts, weights):
    engine = engine_of(TINY_POLICY)
    before, version = responses(engine, prompts)
    assert version == {0}
    noise = torch.Generator().manual_seed(0)
    other = {n: w + 0.05 * torch.randn(w.shape, generator=noise) for n, w in weights.items()}
    engine.load_weights(other.items(), version=7)
    changed, version = responses(engine, prompts)
    assert version == {7} and changed != before
    engine.load_weights(reversed(weights.items()), version=8)  # in any order
    assert responses(engine, prompts) == (before, {8})


def damaged(weights, damage):
    stream = list(weights.items())
    if damage == "missing":
        return [item for item in stream if item[0] != NAME]
    if damage == "unknown":
        return [*stream, ("model.layers.9.mlp.up_proj.weight", torch.ones(2))]
    if damage == "twice":
        return [*stream, (NAME, weights[NAME])]
    return [(n, w.T if n == NAME else w) for n, w in stream]


@pytest.mark.parametrize(
    "damage,said",
    [
        ("missing", f"1 missing: {NAME}"),
        ("unknown", "1 unknown to the model: model.layers.9.mlp.up_proj.weight"),
        ("twice", f"1 sent twice: {NAME}"),
        ("shape", rf"1 of another shape: {NAME} \(64, 192\) for \(192, 64\)"),
    ],
)
def test_a_stream_that_does_not_fit_is_refused_by_name_and_leaves_no_policy(
    prompts, weights, damage, said
):
    engine = engine_of(TINY_POLICY)
    with pytest.raises(RolloutError, match=said):
        engine.load_weights(damaged(weights, damage), version=1)
    with pytest.raises(RolloutError, match="no complete set of weights"):
        responses(engine, prompts)
    engine.load_weights(weights.items(), version=2)
    assert responses(engine, prompts)[1] == {2}


def test_the_stream_is_exhausted_even_when_its_first_tensor_is_wrong(weights):
    taken = []

    def stream():
        yield "nonsense", torch.ones(1)
        for name, tensor in weights.items():
            taken.append(name)
            yield name, tensor

    with pytest.raises(RolloutError, match="nonsense"):
        engine_of(TINY_POLICY).load_weights(stream(), version=1)
    assert taken == list(weights)


def test_a_tied_output_layer_may_be_absent_or_equal_but_not_different(tied_path, prompts):
    from transformers import AutoModelForCausalLM

    source = AutoModelForCausalLM.from_pretrained(tied_path, dtype=torch.float32)
    absent = {n: p.detach() * 1.5 for n, p in source.named_parameters()}
    assert "lm_head.weight" not in absent
    engine = engine_of(tied_path)
    engine.load_weights(absent.items(), version=1)
    expected = responses(engine, prompts)
    tied = {"lm_head.weight": absent["model.embed_tokens.weight"], **absent}
    engine.load_weights(tied.items(), version=1)
    assert responses(engine, prompts) == expected
    tied["lm_head.weight"] = tied["lm_head.weight"] + 1e-3
    with pytest.raises(RolloutError, match=r"different from the embedding.*: lm_head\.weight"):
        engine.load_weights(tied.items(), version=2)
