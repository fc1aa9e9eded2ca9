"""Each patch: what fails without it, and what it makes possible.

The cases run on a host without CUDA. With every patch they run in a fork of this process, which
conftest.py has patched; without one of them in a fork of a process that has no megatron-core yet.
"""

from math import sqrt
from types import BuiltinFunctionType

import pytest
import torch

from tests.ranks import run_on_ranks
from tests.unit.megatron_patches import cases
from tests.unit.megatron_patches.fresh import Outcome

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="patches are for CPU-only hosts")

NO_CUDA = "AssertionError: Torch not compiled with CUDA enabled"


def draws(seed: int) -> list[float]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.rand((), generator=generator).item() for _ in range(2)]


# Megatron adds 2718 to the seed for what differs between tensor-parallel ranks.
WITH_EVERY_PATCH = [
    (cases.train, {"starts_at_chance": True, "learns": True}),
    (
        cases.draw_inside_and_outside,
        {
            "outside": draws(7),
            "inside": draws(7 + 2718),
            "recomputed_mask_is_the_same": True,
            "warnings": 0,
        },
    ),
    (cases.clip_a_gradient, [0.5, 0.5, -0.5, 0.5]),
    (cases.mixed_precision_optimizer, {"torch.bfloat16": "torch.float32"}),
    (cases.distributed_optimizer_in_bfloat16, True),
    (cases.restore_a_gradient_scaler, 8.0),
    (
        cases.norm_under_sequence_parallelism,
        {
            "marks": [True, False],
            "config_is_kept": True,
            "values": [round(3 * sqrt(2) / 5, 4), round(4 * sqrt(2) / 5, 4)],
        },
    ),
    (cases.state_of_a_fresh_distributed_optimizer, 0.0),
    (cases.steps_after_a_load, {"shared": 0, "values": [1.0]}),
    (cases.resumed_equals_uninterrupted, True),
    (cases.compiled_fusion, False),
]

# Left out together, to start fewer processes: (patches, {case: error, or wrong value}). No case of
# a group meets two of the group's patches.
CUDA_TYPE_WANTED = "TypeError: Wrapped parameters must be one of torch.cuda.FloatTensor"
FAILS_WITHOUT = [
    (["torch_view"], {"train": NO_CUDA, "clip_a_gradient": NO_CUDA}),
    (
        ["import_warnings", "rng"],
        {
            "import_without_a_warning": "UserWarning: Transformer Engine and Apex are not",
            "draw_inside_and_outside": NO_CUDA,
        },
    ),
    (
        ["tensor_type_names", "cuda_methods", "sequence_parallel_norm"],
        {
            "clip_a_gradient": "AssertionError: ",
            "mixed_precision_optimizer": CUDA_TYPE_WANTED,
            "distributed_optimizer_in_bfloat16": CUDA_TYPE_WANTED,
            "restore_a_gradient_scaler": "RuntimeError: Invalid device, must be cuda device",
            "norm_under_sequence_parallelism": "AssertionError: sequence parallel not supported",
        },
    ),
    (
        ["distributed_optimizer_adamw", "no_jit_fusion"],
        {
            "state_of_a_fresh_distributed_optimizer": "AssertionError: ",
            # Silent: the 14 parameters have one counter, to which AdamW adds one for each of them.
            "steps_after_a_load": {"shared": 13, "values": [1.0]},
            "resumed_equals_uninterrupted": "KeyError: 'step'",
            "compiled_fusion": True,
        },
    ),
]


def name(value: object) -> str | None:
    return value.__name__ if callable(value) else None


@pytest.mark.parametrize(("case", "expected"), WITH_EVERY_PATCH, ids=name)
def test_with_every_patch_it_works(megatron_imported, case, expected):
    (value,) = run_on_ranks(case, 1)
    assert value == expected


@pytest.mark.slow
@pytest.mark.parametrize(("patches", "expected"), FAILS_WITHOUT)
def test_without_the_patch_it_fails(fresh, patches, expected):
    outcomes = fresh.call(cases.without, patches, list(expected)).value
    for case, failure in expected.items():
        outcome = Outcome(**outcomes[case])
        if isinstance(failure, str):
            assert (outcome.error or "no error").startswith(failure), f"{case}: {outcome}"
        else:
            assert outcome.value == failure, f"{case}: {outcome}"


def test_with_every_patch_megatron_imports_without_a_warning(fresh):
    case = cases.import_without_a_warning.__name__
    assert fresh.call(cases.without, [], [case]).value == {case: {"value": "imported"}}


@pytest.mark.slow
def test_our_own_functions_are_still_compiled():
    assert run_on_ranks(cases.graphs_compiled_for_our_own_function, 1) == [1]


def test_tensor_cuda_still_fails_for_everyone_else():
    with pytest.raises((AssertionError, RuntimeError), match=r"CUDA|NVIDIA"):
        torch.zeros(1).cuda()


@pytest.mark.parametrize("factory", ["tensor", "zeros", "ones", "empty", "arange"])
def test_torch_itself_is_not_replaced(factory):
    assert isinstance(getattr(torch, factory), BuiltinFunctionType)
    # The context finds the factories by identity, and would miss a wrapper.
    with torch.device("meta"):
        assert getattr(torch, factory)(3).device.type == "meta"


def test_transformers_still_loads_the_right_rotary_frequencies(tmp_path):
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=4,
        vocab_size=16,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    model = LlamaForCausalLM.from_pretrained(tmp_path)
    # Head dimension 8: 10000 ** -(0, 1/4, 2/4, 3/4).
    torch.testing.assert_close(
        model.model.rotary_emb.inv_freq, torch.tensor([1.0, 0.1, 0.01, 0.001])
    )
