"""Which implementation runs, and what happens where one cannot."""

import logging

import pytest
import torch

from dynamo_megatron.kernels.engine import TORCH, choose_engine, triton_works

CPU = torch.device("cpu")


def test_auto_is_plain_torch_on_a_cpu():
    assert choose_engine("auto", torch.bfloat16, CPU) is TORCH


def test_triton_without_a_gpu_is_refused_by_name():
    with pytest.raises(ValueError, match="impl='triton' needs a CUDA device, the tensors are on"):
        choose_engine("triton", torch.float32, CPU)


def test_kernels_that_do_not_run_are_reported_once_and_not_used(caplog):
    # A CPU without the interpreter is a real case of a driver that fails.
    triton_works.cache_clear()
    with caplog.at_level(logging.WARNING):
        assert triton_works(CPU) is False
        assert triton_works(CPU) is False
    triton_works.cache_clear()
    assert len(caplog.records) == 1
    assert "do not run on cpu" in caplog.text
