"""The memory of a conversion follows the largest layer, not the number of layers."""

from __future__ import annotations

import ctypes

import pytest
import torch

from benchmarks.convert import PeakMemory, anonymous_bytes, write_model
from dynamo_megatron.convert import conversion
from tests.forked import in_child

WIDTHS = {
    "hidden_size": 768,
    "intermediate_size": 6144,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
}
LAYER = (3 * 768 * 6144 + 2 * 768 * 768 + 2 * 768 * 256) * 2  # bytes in bfloat16: 31 MB
VOCAB = 512
M_MMAP_THRESHOLD = -3
"""Of mallopt. What is larger is given back when it is freed, not when the allocator likes to."""


@pytest.mark.slow
@pytest.mark.parametrize("direction", ["to_megatron", "to_hf"])
def test_four_times_the_layers_take_no_more_memory(direction, tmp_path):
    peaks = []
    for layers in (4, 16):
        source, there = tmp_path / f"hf{layers}", tmp_path / f"megatron{layers}"
        write_model(source, family="llama", layers=layers, vocab=VOCAB, tied=True, widths=WIDTHS)
        given, out = source, there
        if direction == "to_hf":
            in_child(lambda source=source, there=there: conversion.to_megatron(source, there))
            given, out = there, tmp_path / f"out{layers}"

        def work(given=given, out=out):
            ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 1 << 20)
            before = anonymous_bytes()
            with PeakMemory() as peak:
                getattr(conversion, direction)(given, out)
            return peak.bytes - before

        peaks.append(in_child(work))
    # Twelve layers more are 370 MB of weights.
    assert abs(peaks[1] - peaks[0]) < LAYER
    # One layer of each kind in the stored dtype and in float32, twice for comparing, and a little.
    assert max(peaks) < 10 * LAYER + (32 << 20)
    assert torch.get_num_threads() == 1
