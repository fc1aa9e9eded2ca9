"""Packed attention: equal to dense causal attention, and blind to its neighbours."""

import math
import random
from itertools import accumulate

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig

from dynamo_megatron.actor.attention import PackedDotProductAttention, packed_causal_attention
from tests.ranks import run_on_ranks

HEADS, GROUPS, DIM = 4, 2, 16
SCALE = 0.3
# Around the kernel's block sizes and the padding step, and twice the same length.
LENGTHS = [1, 31, 32, 33, 5, 64, 200, 33, 97]


def row(lengths, dtype=torch.float32, seed=0):
    """Query, key, value of a packed row, and an unequal weight for each output element."""
    g = torch.Generator().manual_seed(seed)
    shapes = [(HEADS, DIM), (GROUPS, DIM), (GROUPS, DIM), (HEADS * DIM,)]
    return [torch.randn(sum(lengths), *shape, generator=g).to(dtype) for shape in shapes]


def packed(query, key, value, weight, lengths):
    """Output of the packed attention and its gradients for query, key and value."""
    inputs = [x.detach().clone().requires_grad_() for x in (query, key, value)]
    output = packed_causal_attention(*inputs, [0, *accumulate(lengths)], scale=SCALE)
    return [output.detach(), *torch.autograd.grad(output, inputs, weight)]


def dense(query, key, value, weight):
    """The same for one sequence, in float64, written out."""
    inputs = [x.double().requires_grad_() for x in (query, key, value)]
    q, k, v = inputs
    k, v = (x.repeat_interleave(HEADS // GROUPS, dim=1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) * SCALE
    future = torch.ones(len(q), len(q)).triu(1).bool()
    output = torch.einsum("hqk,khd->qhd", scores.masked_fill(future, -math.inf).softmax(-1), v)
    output = output.flatten(1)
    return [output.detach(), *torch.autograd.grad(output, inputs, weight.double())]


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.bfloat16, 3e-2)])
def test_packed_attention_equals_dense_attention_of_each_sequence(dtype, tolerance):
    tensors = row(LENGTHS, dtype)
    got = packed(*tensors, LENGTHS)
    want = [dense(*parts) for parts in zip(*(x.split(LENGTHS) for x in tensors), strict=True)]
    for actual, expected in zip(got, map(torch.cat, zip(*want, strict=True)), strict=True):
        torch.testing.assert_close(actual.double(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("length", [1, 20, 32, 45, 130, 300])
def test_a_sequence_has_the_same_bits_whatever_its_neighbours(dtype, length):
    rng = random.Random(length)
    mine = row([length], dtype, seed=1)
    alone = packed(*mine, [length])
    for seed in range(2, 7):
        before = [rng.randint(1, 90) for _ in range(rng.randint(1, 5))]
        # One of them has my padded length, so that we share a batch.
        after = [length, *(rng.randint(1, 300) for _ in range(rng.randint(0, 4)))]
        parts = [row(before, dtype, seed), mine, row(after, dtype, seed + 100)]
        results = packed(*map(torch.cat, zip(*parts, strict=True)), [*before, length, *after])
        for in_row, by_itself in zip(results, alone, strict=True):
            assert torch.equal(in_row[sum(before) : sum(before) + length], by_itself)


def test_a_neighbour_that_is_not_finite_stays_with_itself():
    mine, neighbour = row([20]), row([25], seed=1)
    neighbour = [torch.full_like(x, math.nan) for x in neighbour]
    results = packed(*map(torch.cat, zip(neighbour, mine, strict=True)), [25, 20])
    for in_row, by_itself in zip(results, packed(*mine, [20]), strict=True):
        assert torch.equal(in_row[25:], by_itself)


def test_an_empty_sequence_changes_nothing():
    tensors = row([7, 40])
    for with_empty, without in zip(
        packed(*tensors, [7, 0, 40, 0]), packed(*tensors, [7, 40]), strict=True
    ):
        assert torch.equal(with_empty, without)


def transformer_config(**changes):
    fields = {
        "num_layers": 1,
        "hidden_size": HEADS * DIM,
        "num_attention_heads": HEADS,
        "num_query_groups": GROUPS,
        "attention_dropout": 0.0,
        "masked_softmax_fusion": False,
        "use_cpu_initialization": True,
        "cuda_graph_scope": [],  # Megatron warns about its own default
    }
    return TransformerConfig(**{**fields, **changes})


def build(cls=PackedDotProductAttention, group=None, **changes):
    # A group of one rank that communicates with nobody.
    groups = ProcessGroupCollection(tp=group or dist.ProcessGroup(0, 1))
    return cls(transformer_config(**changes), 1, AttnMaskType.causal, "self", pg_collection=groups)


def thd(boundaries, **changes):
    offsets = torch.tensor(boundaries, dtype=torch.int32)
    fields = {"qkv_format": "thd", "cu_seqlens_q": offsets, "cu_seqlens_kv": offsets}
    return PackedSeqParams(**{**fields, **changes})


def test_a_packed_row_equals_megatrons_own_attention_of_each_sequence():
    run_on_ranks(_check_equals_megatrons_own_attention, 1)


def _check_equals_megatrons_own_attention():
    parallel_state.initialize_model_parallel()
    model_parallel_cuda_manual_seed(0)
    group = parallel_state.get_tensor_model_parallel_group()
    query, key, value, _ = row(LENGTHS)
    attention = build(group=group)
    got = attention(query, key, value, None, packed_seq_params=thd([0, *accumulate(LENGTHS)]))
    upstream = build(DotProductAttention, group=group)
    parts = zip(*(x.split(LENGTHS) for x in (query, key, value)), strict=True)
    # Megatron's layout is [s, b, heads, dim].
    dense_batches = [tuple(x[:, None] for x in part) for part in parts]
    want = torch.cat([upstream(*batch, None)[:, 0] for batch in dense_batches])
    torch.testing.assert_close(got, want, rtol=2e-6, atol=2e-6)
    # Unpacked batches are still Megatron's.
    assert torch.equal(attention(*dense_batches[-1], None), upstream(*dense_batches[-1], None))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"context_parallel_size": 2}, "context_parallel_size=2"),
        ({"attention_dropout": 0.1}, "attention_dropout=0.1"),
        ({"window_size": (128, 0)}, r"window_size=\(128, 0\)"),
        ({"softmax_type": "learnable"}, "softmax_type='learnable'"),
        ({"apply_query_key_layer_scaling": True}, "apply_query_key_layer_scaling"),
    ],
)
def test_a_setting_it_does_not_compute_is_refused_by_name(changes, named):
    with pytest.raises(ValueError, match=rf"cannot do {named}.*Transformer Engine"):
        build(**changes)


def test_a_mask_other_than_causal_is_refused():
    with pytest.raises(ValueError, match="attn_mask_type=padding"):
        PackedDotProductAttention(transformer_config(), 1, AttnMaskType.padding, "self")


@pytest.mark.parametrize(
    ("packed_seq_params", "message"),
    [
        (thd([0, 5, 9]), r"do not divide a row of 10 tokens.*ascend from 0 to 10"),
        (thd([1, 10]), r"\[1, 10\] do not divide"),
        (thd([0, 7, 5, 10]), r"\[0, 7, 5, 10\] do not divide"),
        (thd([0, 10], qkv_format="sbhd"), "qkv_format='sbhd'"),
        (thd([0, 10], cu_seqlens_q=None), "cu_seqlens_q=None"),
        (thd([0, 10], cu_seqlens_kv=torch.tensor([0, 4, 10])), "Pass one tensor as both"),
        (thd([0, 10], cu_seqlens_q_padded=torch.tensor([0, 16])), "context parallelism"),
    ],
)
def test_boundaries_that_do_not_describe_the_row_are_refused(packed_seq_params, message):
    query, key, value, _ = row([10])
    with pytest.raises(ValueError, match=message):
        build()(query, key, value, None, packed_seq_params=packed_seq_params)


def test_a_bias_on_a_packed_row_is_refused():
    query, key, value, _ = row([10])
    with pytest.raises(ValueError, match="attention_bias"):
        build()(
            query,
            key,
            value,
            None,
            attention_bias=torch.zeros(1),
            packed_seq_params=thd([0, 10]),
        )
