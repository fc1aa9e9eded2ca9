"""From the configuration's words to settings, GPUs and transports."""

from pathlib import Path

import pytest

from dynamo_megatron.rollout.errors import RolloutError
from dynamo_megatron.rollout.vllm import build
from dynamo_megatron.rollout.vllm.build import (
    VllmSpec,
    replica_settings,
    spare_gpus,
    visible_gpus,
)
from dynamo_megatron.rollout.vllm.gloo_backend import BACKEND as GLOO
from dynamo_megatron.rollout.vllm.nccl_transport import NcclTransport
from dynamo_megatron.rollout.vllm.transport import GlooTransport, ObjectStoreTransport

MIB = 1024 * 1024


def spec(**changes) -> VllmSpec:
    values = {
        "model_dir": Path("/model"),
        "dtype": "bfloat16",
        "max_tokens": 100,
        "max_model_len": 300,
        "stop_token_ids": (2, 5),
        "use_gpu": False,
    }
    return VllmSpec(**(values | changes))


class Cluster:
    """The parts of a cluster that choosing a transport looks at."""

    def __init__(self, *, is_local: bool) -> None:
        self.is_local = is_local

    def own_address(self) -> str:
        return "10.0.0.7"

    def wait(self, tickets, timeout_s=None):
        return list(tickets)


def test_replicas_get_the_gpus_after_the_trainers():
    assert spare_gpus(["0", "1", "2", "3"], trainer_gpus=2, needed=2) == ["2", "3"]
    assert spare_gpus(["4", "6", "7"], trainer_gpus=1, needed=1) == ["6"]
    assert spare_gpus(["0"], trainer_gpus=0, needed=1) == ["0"]


def test_too_few_gpus_are_an_error_with_their_numbers():
    with pytest.raises(RolloutError, match=r"needs 4 GPUs, and of the 4 .* the trainer uses 2"):
        spare_gpus(["0", "1", "2", "3"], trainer_gpus=2, needed=4)


def test_visible_gpus_are_the_listed_ones_or_all():
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "3,1"}, 2) == ["3", "1"]
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "GPU-ab,MIG-cd"}, 2) == ["GPU-ab", "MIG-cd"]
    assert visible_gpus({}, 3) == ["0", "1", "2"]


def test_a_replica_without_gpu_has_a_small_cache_unless_configured():
    assert replica_settings(spec(), None).kv_cache_bytes == 256 * MIB
    assert replica_settings(spec(kv_cache_mib=64), None).kv_cache_bytes == 64 * MIB
    assert replica_settings(spec(use_gpu=True), None).kv_cache_bytes is None
    assert replica_settings(spec(use_gpu=True, kv_cache_mib=9), None).kv_cache_bytes == 9 * MIB


def test_a_replica_is_built_from_the_specification():
    settings = replica_settings(
        spec(tensor=2, max_num_seqs=7, threads=3, enforce_eager=True, load_weights=True), "gloo"
    )
    assert (settings.model_dir, settings.dtype) == ("/model", "bfloat16")
    assert (settings.tensor_parallel, settings.max_num_seqs, settings.threads) == (2, 7, 3)
    assert (settings.max_model_len, settings.stop_token_ids) == (300, (2, 5))
    assert settings.enforce_eager and settings.load_weights and not settings.use_gpu
    assert settings.transfer_backend == "gloo"


@pytest.mark.parametrize(
    ("use_gpu", "name", "kind", "backend"),
    [
        (False, "auto", GlooTransport, GLOO),
        (True, "auto", NcclTransport, "nccl"),
        (True, "gloo", GlooTransport, GLOO),
        (False, "object_store", ObjectStoreTransport, None),
        (True, "object_store", ObjectStoreTransport, None),
    ],
)
def test_weights_travel_by_nccl_between_gpus_and_by_gloo_without(use_gpu, name, kind, backend):
    transport, found = build._transport(
        spec(use_gpu=use_gpu, transport=name), Cluster(is_local=True)
    )
    assert isinstance(transport, kind)
    assert found == backend


@pytest.mark.parametrize("name", ["gloo", "nccl"])
@pytest.mark.parametrize(("is_local", "address"), [(True, "127.0.0.1"), (False, "10.0.0.7")])
def test_only_a_clusters_replicas_are_met_beyond_the_loopback(name, is_local, address):
    transport, _ = build._transport(spec(use_gpu=True, transport=name), Cluster(is_local=is_local))
    assert transport._address == address


def test_nccl_without_a_gpu_is_an_error():
    with pytest.raises(RolloutError, match="from GPU to GPU, and there is none here"):
        build.build_vllm_engine(spec(transport="nccl"))


@pytest.mark.parametrize("tensor", [3, 16])
def test_a_replicas_gpus_must_share_the_attention_heads_evenly(tmp_path, tensor):
    (tmp_path / "config.json").write_text('{"num_attention_heads": 8}')
    with pytest.raises(RolloutError, match=rf"tensor={tensor} does not .* one of 1, 2, 4, 8\."):
        build.build_vllm_engine(spec(model_dir=tmp_path, tensor=tensor))


def test_an_nccl_buffer_holds_the_largest_bucket(tmp_path):
    (tmp_path / "model-1.safetensors").write_bytes(bytes(3 * MIB))
    (tmp_path / "model-2.safetensors").write_bytes(bytes(5 * MIB))
    large, _ = build._transport(
        spec(use_gpu=True, model_dir=tmp_path, bucket_mib=1), Cluster(is_local=True)
    )
    small, _ = build._transport(
        spec(use_gpu=True, model_dir=tmp_path, bucket_mib=64), Cluster(is_local=True)
    )
    assert (large._buffer_bytes, small._buffer_bytes) == (5 * MIB, 64 * MIB)


def test_the_object_store_holds_two_sets_of_weights(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(bytes(200 * MIB))
    assert build._store_bytes(spec(model_dir=tmp_path, bucket_mib=10)) == 510 * MIB
    assert build._store_bytes(spec(model_dir=tmp_path / "none", bucket_mib=10)) == 256 * MIB
