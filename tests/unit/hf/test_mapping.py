"""Fusing and splitting of parameters: by hand, and round trips for every kind and size."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from dynamo_megatron.hf.architecture import Architecture, padded_vocab_size
from dynamo_megatron.hf.mapping import Kind, fuse, parameter_table, shard, unfuse, unshard

ARCH = Architecture(
    model_type="qwen3",
    num_layers=2,
    hidden_size=3,
    ffn_size=8,
    num_heads=8,
    num_kv_heads=4,
    head_dim=1,
    vocab_size=7,
    max_positions=16,
    rope_theta=1e4,
    norm_epsilon=1e-6,
    tied=False,
    qk_norm=True,
    qkv_bias=False,
)


def column(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32)[:, None]


def test_qkv_keeps_query_groups_together():
    # heads q0..q7, k0..k3, v0..v3 with head_dim 1: group g owns q(2g), q(2g+1), k(g), v(g)
    q, k, v = column(list(range(8))), column([10, 11, 12, 13]), column([20, 21, 22, 23])
    fused = fuse(Kind.QKV, [q, k, v], ARCH)
    assert fused[:, 0].tolist() == [0, 1, 10, 20, 2, 3, 11, 21, 4, 5, 12, 22, 6, 7, 13, 23]


def test_each_rank_holds_its_slice_of_gate_and_of_up():
    gate, up = column([0, 1, 2, 3]), column([10, 11, 12, 13])
    fused = fuse(Kind.GATE_UP, [gate, up], ARCH)
    part = shard(Kind.GATE_UP, fused, rank=1, size=2, padded_vocab=0)
    assert part[:, 0].tolist() == [2, 3, 12, 13]


def test_vocabulary_padding_is_zero_and_trimmed_again():
    table = column([1, 2, 3, 4, 5, 6, 7])
    parts = [shard(Kind.VOCAB, table, rank=r, size=2, padded_vocab=12) for r in range(2)]
    assert [part[:, 0].tolist() for part in parts] == [[1, 2, 3, 4, 5, 6], [7, 0, 0, 0, 0, 0]]
    (trimmed,) = unfuse(Kind.VOCAB, unshard(Kind.VOCAB, parts), ARCH)
    assert torch.equal(trimmed, table)


@pytest.mark.parametrize(
    ("vocab", "multiple", "tensor", "want"),
    [
        (151936, 128, 1, 151936),
        (151936, 128, 2, 152064),  # 128 rows of padding
        (151936, 128, 8, 152576),  # 640
        (152064, 128, 8, 152576),  # 512
        (101, 4, 2, 104),
    ],
)
def test_padded_vocabulary(vocab, multiple, tensor, want):
    assert padded_vocab_size(vocab, multiple=multiple, tensor_parallel=tensor) == want


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize(
    ("kind", "shapes"),
    [
        (Kind.COPY, [(3,)]),
        (Kind.VOCAB, [(7, 3)]),
        (Kind.INPUT_SPLIT, [(3, 8)]),
        (Kind.QKV, [(8, 3), (4, 3), (4, 3)]),
        (Kind.GATE_UP, [(8, 3), (8, 3)]),
    ],
)
def test_import_then_export_is_exact(kind, shapes, size):
    parts = [torch.randn(shape) for shape in shapes]
    full = fuse(kind, parts, ARCH)
    shards = [shard(kind, full, rank=r, size=size, padded_vocab=16) for r in range(size)]
    back = unfuse(kind, unshard(kind, shards), ARCH)
    assert all(torch.equal(a, b) for a, b in zip(parts, back, strict=True))


def test_the_table_names_every_tensor_of_the_family_once():
    names = [name for entry in parameter_table(ARCH) for name in entry.hf]
    assert len(names) == len(set(names)) == 2 * 11 + 3
    assert "lm_head.weight" in names
    tied = [name for entry in parameter_table(replace(ARCH, tied=True)) for name in entry.hf]
    assert set(names) - set(tied) == {"lm_head.weight"}
