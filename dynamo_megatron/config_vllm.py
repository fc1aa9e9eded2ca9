"""The vLLM tier's part of the schema."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, field_validator

from dynamo_megatron.config_base import NonNegative, Positive, Section
from dynamo_megatron.rollout.vllm.limits import is_head_address


class VllmConfig(Section):
    """Replicas of vLLM on Ray, for ``rollout.engine=vllm``."""

    replicas: Positive = 1
    """Engines that share the work, each in a process of its own."""
    tensor: Positive = 1
    """GPUs (or CPU processes) of a replica; they are on one node."""
    ray_address: str | None = None
    """A running cluster's: host:port of its head, or ``auto``, what RAY_ADDRESS names or the only
    Ray on this node; null starts a Ray on this machine."""
    transport: Literal["auto", "nccl", "gloo", "object_store"] = "auto"
    """How weights travel; ``auto``: nccl with GPUs, gloo without."""
    bucket_mib: Positive = 256
    """MiB of weights that are sent together."""
    max_num_seqs: Positive = 256
    """Sequences that a replica decodes together."""
    kv_cache_mib: Positive | None = None
    """Of a replica; null: what gpu_memory_utilization leaves, 256 without a GPU."""
    gpu_memory_utilization: Annotated[float, Field(gt=0.0, le=1.0)] = 0.9
    """Share of a GPU's memory that vLLM may use."""
    enforce_eager: bool = False
    """No CUDA graphs. Without a GPU it is always so."""
    threads: Positive = 1
    """CPU threads of a replica without a GPU."""
    probe_tokens: Positive = 16
    """Tokens of the probe that is compared with the trainer after every weight update."""
    probe_tolerance: Annotated[float, Field(gt=0.0)] | None = None
    """Largest gap of a probe's logprobs (nats); null: rollout.gate_tolerance."""
    start_timeout_s: Annotated[float, Field(gt=0.0)] = 900.0
    """For Ray to find room and for an engine to be built."""
    hang_timeout_s: Annotated[float, Field(ge=5.0)] = 45.0
    """A replica that holds requests and makes no step for so long is replaced."""
    max_restarts: NonNegative = 4
    """More replicas lost between two weight updates end the run."""

    @field_validator("ray_address")
    @classmethod
    def _is_address(cls, value: str | None) -> str | None:
        if value not in (None, "auto") and not is_head_address(value):
            raise ValueError(
                f"{value!r} is no address of a Ray head: use HOST:PORT (6379 unless it was "
                "started with another; [..] around an IPv6 address), auto for the only one on this "
                "node, or null to start one here"
            )
        return value
