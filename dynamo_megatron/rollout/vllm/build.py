"""Builds the engine: Ray, the replicas on it, and the way that weights reach them."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

from dynamo_megatron.rollout.errors import RolloutError
from dynamo_megatron.rollout.vllm.cluster import RayCluster
from dynamo_megatron.rollout.vllm.engine import EngineSettings, VllmEngine
from dynamo_megatron.rollout.vllm.fleet import Fleet
from dynamo_megatron.rollout.vllm.nccl_transport import NcclTransport
from dynamo_megatron.rollout.vllm.transport import (
    LOOPBACK,
    GlooTransport,
    ObjectStoreTransport,
    Transport,
)
from dynamo_megatron.rollout.vllm.wire import ReplicaSettings

logger = logging.getLogger(__name__)

MIB = 1 << 20
SMALLEST_STORE = 256 * MIB
CPU_KV_CACHE_MIB = 256
"""Of a replica without GPU, unless configured."""
LOOKAHEAD = 4
"""One request waits inside a replica for every so many that it decodes: none of its places stays
empty between two calls."""

TransportName = Literal["auto", "object_store", "gloo", "nccl"]


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmSpec:
    """What is asked for, in words of the configuration (``rollout.vllm``).

    Attributes:
        model_dir: Hugging Face folder, at this path on every node.
        dtype: name of the weights' type.
        max_tokens: longest response.
        max_model_len: longest prompt and response together.
        stop_token_ids: tokens that end a response.
        use_gpu: replicas on GPUs.
        replicas: how many.
        tensor: GPUs or processes of each.
        ray_address: of a running cluster; None starts one here.
        transport: how weights travel.
        bucket_mib: MiB sent together.
        max_num_seqs: sequences a replica decodes together.
        kv_cache_mib: of a replica.
        gpu_memory_utilization: share of a GPU's memory.
        enforce_eager: no CUDA graphs.
        threads: CPU threads of a replica without GPU.
        probe_tokens: length of a probe.
        start_timeout_s: for an engine to be built.
        hang_timeout_s: without a step, before a replica counts as lost.
        max_restarts: replicas that may be lost between two weight updates.
        top_p: kept probability mass.
        top_k: kept tokens; 0 keeps all.
        load_weights: sample from the folder's weights, as version 0.
        trainer_gpus: GPUs of this node that the trainer uses.
    """

    model_dir: Path
    dtype: str
    max_tokens: int
    max_model_len: int
    stop_token_ids: tuple[int, ...]
    use_gpu: bool
    replicas: int = 1
    tensor: int = 1
    ray_address: str | None = None
    transport: TransportName = "auto"
    bucket_mib: int = 256
    max_num_seqs: int = 256
    kv_cache_mib: int | None = None
    gpu_memory_utilization: float = 0.9
    enforce_eager: bool = False
    threads: int = 1
    probe_tokens: int = 16
    start_timeout_s: float = 900.0
    hang_timeout_s: float = 45.0
    max_restarts: int = 4
    top_p: float = 1.0
    top_k: int = 0
    load_weights: bool = False
    trainer_gpus: int = 0


def build_vllm_engine(spec: VllmSpec) -> VllmEngine:
    """Start Ray (or join it) and the replicas; takes a minute or more.

    Raises:
        RolloutError: what cannot work, and why. Nothing is left behind then.
    """
    if spec.transport == "nccl" and not spec.use_gpu:
        raise RolloutError(
            "rollout.vllm.transport=nccl sends from GPU to GPU, and there is none here. Set "
            "rollout.vllm.transport=auto."
        )
    _require_divisible(spec)
    gpu_ids = _gpus_beside_trainer(spec) if spec.use_gpu and spec.ray_address is None else ()
    cluster = RayCluster(
        spec.ray_address,
        num_replicas=spec.replicas,
        gpus_per_replica=spec.tensor if spec.use_gpu else 0,
        gpu_ids=gpu_ids,
        object_store_bytes=_store_bytes(spec),
        timeout_s=spec.start_timeout_s,
    )
    try:
        transport, backend = _transport(spec, cluster)
        fleet = Fleet(
            cluster,
            replica_settings(spec, backend),
            num_replicas=spec.replicas,
            transport=transport,
            bucket_bytes=spec.bucket_mib * MIB,
            start_timeout_s=spec.start_timeout_s,
            hang_timeout_s=spec.hang_timeout_s,
            max_restarts=spec.max_restarts,
        )
        fleet.start()
    except BaseException:
        cluster.close()
        raise
    settings = EngineSettings(
        max_tokens=spec.max_tokens,
        max_model_len=spec.max_model_len,
        window=spec.max_num_seqs + max(1, spec.max_num_seqs // LOOKAHEAD),
        probe_tokens=spec.probe_tokens,
        hang_timeout_s=spec.hang_timeout_s,
        top_p=spec.top_p,
        top_k=spec.top_k,
    )
    return VllmEngine(fleet, settings, model_dir=str(spec.model_dir))


def _require_divisible(spec: VllmSpec) -> None:
    """Say at once what vLLM would say a minute later, in words of its own."""
    config = json.loads((spec.model_dir / "config.json").read_text(encoding="utf-8"))
    heads = config.get("num_attention_heads")
    if isinstance(heads, int) and heads % spec.tensor:
        fits = [str(n) for n in range(1, heads + 1) if heads % n == 0]
        raise RolloutError(
            f"rollout.vllm.tensor={spec.tensor} does not divide the {heads} attention heads of "
            f"{spec.model_dir}. Set it to one of {', '.join(fits)}."
        )


def replica_settings(spec: VllmSpec, transfer_backend: str | None) -> ReplicaSettings:
    """What each replica's engine is built from."""
    kv_cache_mib = spec.kv_cache_mib or (None if spec.use_gpu else CPU_KV_CACHE_MIB)
    return ReplicaSettings(
        model_dir=str(spec.model_dir),
        dtype=spec.dtype,
        tensor_parallel=spec.tensor,
        max_model_len=spec.max_model_len,
        max_num_seqs=spec.max_num_seqs,
        stop_token_ids=spec.stop_token_ids,
        use_gpu=spec.use_gpu,
        threads=spec.threads,
        kv_cache_bytes=kv_cache_mib and kv_cache_mib * MIB,
        gpu_memory_utilization=spec.gpu_memory_utilization,
        enforce_eager=spec.enforce_eager,
        load_weights=spec.load_weights,
        transfer_backend=transfer_backend,
    )


def _transport(spec: VllmSpec, cluster: RayCluster) -> tuple[Transport, str | None]:
    """The transport, and the name of its end in vLLM's registry."""
    name = spec.transport
    if name == "auto":
        name = "nccl" if spec.use_gpu else "gloo"
    collect = partial(cluster.wait, timeout_s=spec.hang_timeout_s)
    if name == "object_store":
        return ObjectStoreTransport(collect), None
    address = LOOPBACK if cluster.is_local else cluster.own_address()
    if name == "gloo":
        gloo = GlooTransport(
            collect,
            workers_per_replica=spec.tensor,
            address=address,
            timeout_s=spec.hang_timeout_s,
        )
        return gloo, gloo.backend
    nccl = NcclTransport(
        collect,
        workers_per_replica=spec.tensor,
        address=address,
        buffer_bytes=max(spec.bucket_mib * MIB, _largest_tensor(spec.model_dir)),
    )
    return nccl, nccl.backend


def _store_bytes(spec: VllmSpec) -> int:
    """Two sets of weights, one being replaced, and some room."""
    return max(SMALLEST_STORE, int(2.5 * _weight_bytes(spec.model_dir)) + spec.bucket_mib * MIB)


def _weight_bytes(model_dir: Path) -> int:
    return sum(path.stat().st_size for path in model_dir.glob("*.safetensors"))


def _largest_tensor(model_dir: Path) -> int:
    """An upper bound: no tensor is larger than its file."""
    return max((path.stat().st_size for path in model_dir.glob("*.safetensors")), default=0)


def spare_gpus(visible: Sequence[str], trainer_gpus: int, needed: int) -> list[str]:
    """The GPUs of this node for replicas, when the trainer uses the first ones.

    Raises:
        RolloutError: too few are left.
    """
    spare = list(visible[trainer_gpus:])
    if len(spare) < needed:
        raise RolloutError(
            f"rollout.vllm.replicas times rollout.vllm.tensor needs {needed} GPUs, and of the "
            f"{len(visible)} on this node the trainer uses {trainer_gpus}. Start fewer trainer "
            "ranks here, lower one of the two, or give rollout.vllm.ray_address of a cluster."
        )
    return spare[:needed]


def _gpus_beside_trainer(spec: VllmSpec) -> list[str]:
    """Ray must not place a replica on a GPU that holds the policy."""
    import torch

    visible = visible_gpus(os.environ, torch.cuda.device_count())
    spare = spare_gpus(visible, spec.trainer_gpus, spec.replicas * spec.tensor)
    logger.info("replicas use GPUs %s of this node", ", ".join(spare))
    return spare


def visible_gpus(environment: Mapping[str, str], count: int) -> list[str]:
    """Names of the GPUs this process may use, in order."""
    listed = environment.get("CUDA_VISIBLE_DEVICES")
    return listed.split(",") if listed else [str(number) for number in range(count)]
