"""What a failed call on Ray says to people. Run by ``test_own_process``: it imports Ray."""

import pytest
from ray._private import services
from ray.exceptions import (
    ActorDiedError,
    ObjectLostError,
    OutOfMemoryError,
    RayActorError,
    RayTaskError,
)

from dynamo_megatron.rollout.errors import RequestRefusedError, RolloutError
from dynamo_megatron.rollout.vllm.cluster import ReplicaLostError, translated
from dynamo_megatron.rollout.vllm.connection import join_ray
from dynamo_megatron.rollout.vllm.llm_engine import ReplicaError


def error_of_joining_auto() -> str:
    with pytest.raises(RolloutError) as caught:
        join_ray("auto")
    return str(caught.value)


def test_auto_is_what_ray_address_names(monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    monkeypatch.setattr(services, "find_gcs_addresses", lambda: {"10.0.0.1:6379"})
    assert "ray_address=auto, which is 127.0.0.1:1: " in error_of_joining_auto()


@pytest.mark.parametrize("named", ["ray://head:10001", "local"])
def test_auto_takes_no_address_that_is_no_heads(named, monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", named)
    assert f"RAY_ADDRESS={named}, which is no address of a Ray head" in error_of_joining_auto()


@pytest.mark.parametrize(
    ("found", "text"),
    [
        (set(), "no Ray runs on this node, and RAY_ADDRESS is not set"),
        ({"127.0.0.1:1"}, "ray_address=auto, which is 127.0.0.1:1: "),
        ({"b:2", "a:1"}, "2 Rays run on this node: a:1, b:2. Set rollout.vllm.ray_address"),
    ],
)
def test_auto_is_the_only_ray_on_this_node(found, text, monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(services, "find_gcs_addresses", lambda: found)
    assert text in error_of_joining_auto()


def failed(cause: Exception) -> RayTaskError:
    return RayTaskError("exchange", "Traceback of the replica ...", cause)


@pytest.mark.parametrize(
    ("cause", "text"),
    [
        (ReplicaError("it holds other weights."), "it holds other weights."),
        (RuntimeError("no room for the cache"), "no room for the cache"),
        (ValueError("bad dtype"), "ValueError('bad dtype'): bad dtype"),
    ],
)
def test_a_failed_call_says_its_cause_without_rays_frame(cause, text):
    found = translated(failed(cause))
    assert type(found) is RolloutError
    assert str(found) == text


def test_a_refused_request_stays_one():
    refused = RequestRefusedError("vLLM does not take request p/0")
    assert translated(failed(refused)) is refused


@pytest.mark.parametrize(
    "error",
    [
        RayActorError(error_msg="The actor died unexpectedly.\n  It was killed by signal 9.\n"),
        ActorDiedError(),
        OutOfMemoryError("Task was killed due to the node running low on memory."),
    ],
)
def test_a_dead_process_is_a_lost_replica(error):
    found = translated(error)
    assert isinstance(found, ReplicaLostError)
    assert str(found).startswith("its process died: ")


def test_a_dead_process_is_told_by_the_last_line():
    error = RayActorError(error_msg="The actor died.\n  It was killed by signal 9.\n\n")
    told = str(translated(error))
    assert "It was killed by signal 9." in told
    assert "The actor died" not in told


def test_a_replica_that_ran_out_of_memory_is_lost_not_wrong():
    for cause in (MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory")):
        found = translated(failed(cause))
        assert isinstance(found, ReplicaLostError)
        assert str(found).startswith("it has no memory left: ")


def test_whatever_else_fails_in_ray_is_called_rays():
    found = translated(ObjectLostError("ab" * 14, None, "stack"))
    assert type(found) is RolloutError
    assert str(found).startswith("Ray failed: ")
