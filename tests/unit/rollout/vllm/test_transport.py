"""Weights in buckets: how they are cut, packed, and brought through a real gloo group."""

from __future__ import annotations

import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load

from dynamo_megatron.rollout.vllm.cluster import ReplicaLostError
from dynamo_megatron.rollout.vllm.gloo_backend import Rendezvous, broadcast_flat, split_flat
from dynamo_megatron.rollout.vllm.transport import (
    LOOPBACK,
    Bucket,
    GlooTransport,
    ObjectStoreTransport,
    buckets,
    free_port,
)
from tests.forked import in_child
from tests.ranks import run_on_ranks

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def zeros(*sizes: int, dtype: torch.dtype = torch.float32) -> list[tuple[str, torch.Tensor]]:
    return [(f"w{i}", torch.zeros(size, dtype=dtype)) for i, size in enumerate(sizes)]


def names(found) -> list[tuple[str, ...]]:
    return [bucket.names for bucket in found]


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Also for NaN, and zeros of either sign."""
    same_kind = a.dtype == b.dtype and a.shape == b.shape
    return same_kind and torch.equal(
        a.contiguous().view(-1).view(torch.uint8), b.contiguous().view(-1).view(torch.uint8)
    )


def awkward_tensors() -> list[tuple[str, torch.Tensor]]:
    """Transposed, strided, empty, scalar, with NaN and signed zeros."""
    g = torch.Generator().manual_seed(0)
    special = torch.tensor([float("nan"), float("inf"), -0.0, 1e-45])
    return [
        ("transposed", torch.randn(5, 3, generator=g).t()),
        ("strided", torch.randn(12, generator=g)[::3]),
        ("special", special),
        ("scalar", torch.tensor(2.5)),
        ("empty", torch.zeros(0, 4)),
        ("rows", torch.randn(7, 2, generator=g)[2:5]),
    ]


def test_tensors_are_cut_into_buckets_of_at_most_the_limit():
    # 4 bytes an element; limit 40 bytes: 10 elements.
    found = list(buckets(zeros(4, 6, 1, 9, 1), 40))
    assert names(found) == [("w0", "w1"), ("w2", "w3"), ("w4",)]
    assert [bucket.num_bytes for bucket in found] == [40, 40, 4]


def test_a_tensor_larger_than_the_limit_has_a_bucket_of_its_own():
    found = list(buckets(zeros(1, 100, 1, 1), 40))
    assert names(found) == [("w0",), ("w1",), ("w2", "w3")]


def test_a_bucket_holds_one_dtype():
    weights = [*zeros(1, 1), ("half", torch.zeros(1, dtype=torch.bfloat16)), *zeros(1)]
    assert names(buckets(weights, 1000)) == [("w0", "w1"), ("half",), ("w0",)]


def test_nothing_to_send_is_no_bucket():
    assert list(buckets([], 40)) == []


def test_a_stream_is_not_read_further_than_the_bucket_needs():
    read = []

    def stream():
        for name, tensor in zeros(10, 10, 10):
            read.append(name)
            yield name, tensor

    next(buckets(stream(), 40))
    assert read == ["w0", "w1"]


@given(
    st.lists(st.tuples(st.integers(0, 30), st.sampled_from(DTYPES)), max_size=20),
    st.integers(1, 100),
)
def test_buckets_keep_every_tensor_in_order_within_the_limit(shapes, limit):
    weights = [(f"w{i}", torch.zeros(n, dtype=dtype)) for i, (n, dtype) in enumerate(shapes)]
    found = list(buckets(weights, limit))
    assert [name for bucket in found for name in bucket.names] == [name for name, _ in weights]
    assert all(len(bucket.names) == 1 or bucket.num_bytes <= limit for bucket in found)
    assert all(len({tensor.dtype for tensor in bucket.tensors}) == 1 for bucket in found)


def bucket_of(weights) -> Bucket:
    return Bucket(tuple(name for name, _ in weights), tuple(tensor for _, tensor in weights))


def test_the_description_says_names_dtypes_and_shapes():
    bucket = bucket_of([("a", torch.zeros(2, 3, dtype=torch.bfloat16)), ("b", torch.zeros(4))])
    assert bucket.update_info() == {
        "names": ["a", "b"],
        "dtype_names": ["bfloat16", "float32"],
        "shapes": [[2, 3], [4]],
    }


def test_flat_bytes_are_the_tensors_one_after_the_other():
    bucket = bucket_of(
        [
            ("a", torch.tensor([1, 256], dtype=torch.int16)),
            ("b", torch.tensor([[-1]], dtype=torch.int16)),
        ]
    )
    assert bucket.flat().tolist() == [1, 0, 0, 1, 255, 255]  # little-endian


@pytest.mark.parametrize("dtype", DTYPES)
def test_cutting_flat_bytes_gives_the_same_bits(dtype):
    weights = [(name, tensor.to(dtype)) for name, tensor in awkward_tensors()]
    bucket = bucket_of(weights)
    back = split_flat(
        bucket.flat(), bucket.names, [dtype] * len(weights), bucket.update_info()["shapes"]
    )
    assert [name for name, _ in back] == [name for name, _ in weights]
    for (name, sent), (_, got) in zip(weights, back, strict=True):
        assert same_bits(got, sent), name


def test_safetensors_bytes_hold_the_same_bits():
    weights = awkward_tensors()
    back = load(bucket_of(weights).safetensors())
    assert all(same_bits(back[name], tensor) for name, tensor in weights)


def test_a_parameter_that_needs_a_gradient_can_be_sent():
    bucket = bucket_of([("w", torch.nn.Parameter(torch.ones(2)))])
    assert bucket.flat().tolist() == [0, 0, 128, 63] * 2
    assert load(bucket.safetensors())["w"].tolist() == [1.0, 1.0]


def test_gloo_refuses_what_it_would_corrupt():
    with pytest.raises(ValueError, match="contiguous tensors only"):
        broadcast_flat(None, torch.zeros(4, 4, dtype=torch.uint8).t())


def _broadcast_in(meeting: dict) -> list[int]:
    group = Rendezvous(**meeting).join(dist.get_rank())
    flat = torch.arange(9, dtype=torch.uint8) if dist.get_rank() == 0 else torch.zeros(9).byte()
    broadcast_flat(group, flat)
    dist.barrier()  # a rank that ended would break its neighbours' connections
    return flat.tolist()


@pytest.mark.parametrize("by_file", [True, False])
def test_every_process_receives_what_the_first_one_sends(tmp_path, by_file):
    meeting = {
        "file": str(tmp_path / "store") if by_file else None,
        "host": LOOPBACK,
        "port": 0 if by_file else free_port(LOOPBACK),
        "address": LOOPBACK,
        "world_size": 3,
        "timeout_s": 30.0,
    }
    assert run_on_ranks(_broadcast_in, 3, meeting) == [list(range(9))] * 3


class RecordingPeer:
    """A replica of ``workers`` threads that receive as the workers of a real one do."""

    host = LOOPBACK

    def __init__(self, workers: int) -> None:
        self._pool = ThreadPoolExecutor(workers)
        self._groups: list = [None] * workers
        self.ranks: list[int] = []
        self.received: list[list[tuple[str, torch.Tensor]]] = [[] for _ in range(workers)]
        self.calls: list[str] = []

    def call(self, method: str, info: dict) -> list[Future]:
        self.calls.append(method)
        work = {"connect": self._connect, "receive_bucket": self._receive}[method]
        return [self._pool.submit(work, info, worker) for worker in range(len(self._groups))]

    def _connect(self, info: dict, worker: int) -> None:
        rank = info["rank_offset"] + worker
        self.ranks.append(rank)
        self._groups[worker] = Rendezvous(**info["rendezvous"]).join(rank)

    def _receive(self, info: dict, worker: int) -> None:
        dtypes = [getattr(torch, name) for name in info["dtype_names"]]
        sizes = [torch.Size(s).numel() for s in info["shapes"]]
        total = sum(n * d.itemsize for n, d in zip(sizes, dtypes, strict=True))
        flat = torch.empty(total, dtype=torch.uint8)
        broadcast_flat(self._groups[worker], flat)
        self.received[worker] += split_flat(flat, info["names"], dtypes, info["shapes"])


def wait(tickets) -> list:
    return [[future.result(30.0) for future in ticket] for ticket in tickets]


def _send_through_gloo(num_replicas: int, workers: int) -> tuple[list, list, int]:
    weights = [
        *awkward_tensors(),
        *((f"{name}.half", tensor.bfloat16()) for name, tensor in awkward_tensors()),
    ]
    peers = [RecordingPeer(workers) for _ in range(num_replicas)]
    transport = GlooTransport(wait, workers_per_replica=workers)
    transport.connect(peers)
    cut = list(buckets(weights, 64))
    for bucket in cut:
        transport.send(peers, bucket, None)
    for peer in peers:
        for received in peer.received:
            assert [name for name, _ in received] == [name for name, _ in weights]
            assert all(same_bits(a, b) for (_, a), (_, b) in zip(received, weights, strict=True))
    (folder,) = {transport._folder}
    transport.close()
    assert not Path(folder).exists()
    return [sorted(p.ranks) for p in peers], [p.calls for p in peers], len(cut)


@pytest.mark.parametrize(
    ("replicas", "workers", "ranks"), [(1, 1, [[1]]), (2, 2, [[1, 2], [3, 4]])]
)
def test_gloo_brings_every_tensor_to_every_worker_in_one_call_a_bucket(replicas, workers, ranks):
    found, calls, num_buckets = in_child(lambda: _send_through_gloo(replicas, workers))
    assert found == ranks
    assert calls == [["connect"] + ["receive_bucket"] * num_buckets] * replicas


def _reconnect() -> list:
    transport = GlooTransport(wait, workers_per_replica=1)
    old = [RecordingPeer(1), RecordingPeer(1)]
    transport.connect(old)
    first = transport._folder
    new = [old[0], RecordingPeer(1)]  # the second was lost and replaced
    transport.connect(new)
    transport.send(new, bucket_of(zeros(3)), None)
    left = Path(first).exists()
    transport.close()
    return [left, len(old[1].received[0]), len(new[0].received[0]), len(new[1].received[0])]


def test_gloo_forms_a_new_group_when_a_replica_was_replaced():
    assert in_child(_reconnect) == [False, 0, 1, 1]


@pytest.mark.parametrize("address", [LOOPBACK, "127.0.0.2"])
def test_a_replica_that_is_lost_while_the_group_forms_is_known_at_once(address):
    class Lost:
        host = LOOPBACK

        def call(self, method, *args):
            return method

    def wait(tickets):
        raise ReplicaLostError("its process died: killed by signal 9.")

    transport = GlooTransport(wait, workers_per_replica=1, address=address, timeout_s=60.0)
    begin = time.monotonic()
    with pytest.raises(ReplicaLostError, match="its process died"):
        transport.connect([Lost()])
    assert time.monotonic() - begin < 20.0
    transport.close()


def test_a_group_that_this_end_cannot_form_says_why():
    class Deaf:
        host = LOOPBACK

        def call(self, method, *args):
            return method

    def wait(tickets):
        time.sleep(1.0)
        raise RuntimeError("Wait timeout")

    transport = GlooTransport(wait, workers_per_replica=1, address="192.0.2.77", timeout_s=60.0)
    with pytest.raises((RuntimeError, OSError)) as caught:
        transport.connect([Deaf()])
    assert "Wait timeout" not in str(caught.value)


def test_the_object_store_transport_sends_each_replica_the_reference():
    class Peer:
        host = LOOPBACK

        def call(self, method, *args):
            return (self, method, args)

    peers, waited = [Peer(), Peer()], []
    transport = ObjectStoreTransport(waited.append)
    transport.connect(peers)
    transport.send(peers, bucket_of(zeros(1)), "reference")
    assert waited == [[(peer, "load_bucket", ("reference",)) for peer in peers]]
