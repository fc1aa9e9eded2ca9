"""The tiny policy that ships, as a checkpoint of Megatron-Core."""

from __future__ import annotations

from pathlib import Path

import pytest
import transformers.models.auto.modeling_auto
import transformers.models.qwen3.modeling_qwen3  # noqa: F401 - once, and not in each forked child

from dynamo_megatron.assets import TINY_POLICY
from dynamo_megatron.convert import conversion
from tests.forked import in_child


@pytest.fixture(scope="session")
def tiny(tmp_path_factory) -> Path:
    """The shipped policy as a checkpoint."""
    out = tmp_path_factory.mktemp("tiny") / "checkpoint"
    in_child(lambda: conversion.to_megatron(TINY_POLICY, out))
    return out
