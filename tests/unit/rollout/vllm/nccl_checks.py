"""The NCCL transport against vLLM's own receiver.

Real: our sender, vLLM's rendezvous payloads, ranks, packing and ``NCCLWeightTransferEngine``.
Stand-ins: the communicator (bytes through queues of this process), CUDA streams and device. Run by
``test_own_process``: vLLM changes the process that imports it.
"""

from __future__ import annotations

import queue
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from vllm.distributed.weight_transfer import nccl_common, packed_tensor
from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine

from dynamo_megatron.rollout.vllm.nccl_transport import NcclTransport
from dynamo_megatron.rollout.vllm.transport import LOOPBACK, buckets
from tests.unit.rollout.vllm.test_transport import awkward_tensors, same_bits

PATIENCE_S = 60.0


class Wire:
    """What the ranks of one communicator share."""

    def __init__(self, world_size: int) -> None:
        self.inbox = [queue.Queue() for _ in range(world_size)]
        self.sent: list[int] = []
        self.destroyed: list[int] = []


class Communicator:
    """PyNcclCommunicator's part in a broadcast: all ranks meet, in order, bytes are copied."""

    device = torch.device("cpu")

    def __init__(self, wire: Wire, rank: int) -> None:
        self.wire, self.rank = wire, rank
        self._ended = threading.Event()

    def broadcast(self, tensor: torch.Tensor, src: int, stream=None) -> None:
        assert tensor.is_contiguous() and tensor.dtype == torch.uint8
        if self.rank != src:
            sent, taken = self._take(self.wire.inbox[self.rank])
            assert tensor.numel() == sent.numel(), "sender and receiver cut the stream differently"
            tensor.copy_(sent)
            taken.set()
            return
        self.wire.sent.append(tensor.numel())
        receipts = [threading.Event() for _ in self.wire.inbox[1:]]
        for inbox, taken in zip(self.wire.inbox[1:], receipts, strict=True):
            inbox.put((tensor.clone(), taken))
        deadline = time.monotonic() + PATIENCE_S
        while not all(taken.is_set() for taken in receipts):
            self._wait(deadline)

    def destroy(self) -> None:
        self.wire.destroyed.append(self.rank)
        self._ended.set()

    def _take(self, inbox):
        deadline = time.monotonic() + PATIENCE_S
        while True:
            try:
                return inbox.get_nowait()
            except queue.Empty:
                self._wait(deadline)

    def _wait(self, deadline: float) -> None:
        if self._ended.wait(0.001):
            raise RuntimeError("NCCL error: aborted")
        assert time.monotonic() < deadline, "a rank waits for another one that never comes"


class Meeting:
    """Stands for the rendezvous: who came where, as which rank of how many."""

    def __init__(self) -> None:
        self.wires: dict[tuple[str, int], Wire] = {}
        self.came: list[tuple[int, int]] = []
        self._lock = threading.Lock()

    def join(self, master_address, master_port, rank, world_size, device) -> Communicator:
        with self._lock:
            wire = self.wires.setdefault((master_address, master_port), Wire(world_size))
            self.came.append((rank, world_size))
        return Communicator(wire, rank)

    @property
    def places(self) -> list[tuple[str, int]]:
        return list(self.wires)

    @property
    def last(self) -> Wire:
        return list(self.wires.values())[-1]


@pytest.fixture
def meeting(monkeypatch) -> Meeting:
    found = Meeting()
    monkeypatch.setattr(nccl_common, "stateless_init_process_group", found.join)
    stream = SimpleNamespace(synchronize=lambda: None)
    monkeypatch.setattr(packed_tensor, "_get_streams", lambda device, count: (stream,) * count)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 0)
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda: None)
    return found


class RecordingModel:
    def __init__(self) -> None:
        self.loaded: list[tuple[str, torch.Tensor]] = []
        self.calls = 0

    def load_weights(self, weights) -> None:
        self.calls += 1
        self.loaded += [(name, tensor.clone()) for name, tensor in weights]


class Peer:
    """A replica whose workers are vLLM's transfer engines, each in a thread."""

    host = LOOPBACK

    def __init__(self, workers: int) -> None:
        self.models = [RecordingModel() for _ in range(workers)]
        self.engines = [
            NCCLWeightTransferEngine(
                SimpleNamespace(backend="nccl"),
                SimpleNamespace(
                    parallel_config=SimpleNamespace(
                        data_parallel_index=0, world_size=workers, rank=rank
                    ),
                    model_config=None,
                ),
                torch.device("cpu"),
                model,
            )
            for rank, model in enumerate(self.models)
        ]
        self._pool = ThreadPoolExecutor(workers)

    def call(self, method: str, info: dict) -> list[Future]:
        work = {"connect": self._connect, "receive_bucket": self._receive}[method]
        return [self._pool.submit(work, engine, info) for engine in self.engines]

    def _connect(self, engine, info: dict) -> None:
        engine.shutdown()
        engine.init_transfer_engine(engine.parse_init_info(info))

    def _receive(self, engine, info: dict) -> None:
        engine.update_weights(info)


def wait(tickets) -> list:
    return [[future.result(PATIENCE_S) for future in ticket] for ticket in tickets]


def transport_of(workers: int, buffer_bytes: int) -> NcclTransport:
    return NcclTransport(
        wait, workers_per_replica=workers, address=LOOPBACK, buffer_bytes=buffer_bytes
    )


def weights() -> list[tuple[str, torch.Tensor]]:
    return [
        *awkward_tensors(),
        *((f"{name}.half", tensor.bfloat16()) for name, tensor in awkward_tensors()),
        ("large", torch.arange(100, dtype=torch.float32)),
    ]


@pytest.mark.parametrize(("replicas", "workers"), [(1, 1), (2, 2)])
def test_every_tensor_arrives_bit_for_bit_in_one_broadcast_a_bucket(meeting, replicas, workers):
    peers = [Peer(workers) for _ in range(replicas)]
    transport = transport_of(workers, buffer_bytes=400)
    transport.connect(peers)
    cut = list(buckets(weights(), 64))
    for bucket in cut:
        transport.send(peers, bucket, None)
    assert meeting.last.sent == [bucket.num_bytes for bucket in cut]
    assert max(meeting.last.sent) == 400  # the large tensor, in a bucket of its own
    for model in (model for peer in peers for model in peer.models):
        assert model.calls == len(cut)
        assert [name for name, _ in model.loaded] == [name for name, _ in weights()]
        for (name, sent), (_, got) in zip(weights(), model.loaded, strict=True):
            assert same_bits(got, sent), name


def test_a_full_bucket_is_still_one_broadcast(meeting):
    peer, transport = Peer(1), transport_of(1, buffer_bytes=64)
    transport.connect([peer])
    (bucket,) = buckets([("a", torch.ones(8)), ("b", torch.ones(8))], 64)
    transport.send([peer], bucket, None)
    assert meeting.last.sent == [64]


def test_each_worker_has_a_rank_of_its_own_and_all_meet_in_one_place(meeting):
    transport_of(2, buffer_bytes=64).connect([Peer(2), Peer(2)])
    assert sorted(meeting.came) == [(0, 5), (1, 5), (2, 5), (3, 5), (4, 5)]
    ((address, port),) = meeting.places
    assert address == LOOPBACK
    assert 0 < port < 65536


def test_a_new_connection_destroys_the_old_communicator_on_both_sides(meeting):
    old, new = Peer(1), Peer(1)
    transport = transport_of(1, buffer_bytes=64)
    transport.connect([old])
    first = meeting.last
    transport.connect([old, new])
    assert sorted(first.destroyed) == [0, 1]
    assert sorted(meeting.came) == [(0, 2), (0, 3), (1, 2), (1, 3), (2, 3)]
    (bucket,) = buckets([("w", torch.ones(3))], 64)
    transport.send([old, new], bucket, None)
    assert first.sent == []
    assert [len(peer.models[0].loaded) for peer in (old, new)] == [1, 1]
    transport.close()
    assert meeting.last.destroyed == [0]
    transport.close()
    assert meeting.last.destroyed == [0]


class DyingPeer(Peer):
    """Its process ends while a bucket is on its way."""

    def _receive(self, engine, info: dict) -> None:
        raise ConnectionError("the process died")


def test_a_replica_that_dies_in_a_broadcast_ends_it(meeting):
    transport = transport_of(1, buffer_bytes=64)
    peers = [DyingPeer(1), Peer(1)]
    transport.connect(peers)
    (bucket,) = buckets([("w", torch.ones(3))], 64)
    started = time.monotonic()
    with pytest.raises(ConnectionError, match="the process died"):
        transport.send(peers, bucket, None)
    assert time.monotonic() - started < PATIENCE_S / 2
    assert meeting.last.destroyed == [0]


def test_a_broadcast_that_fails_here_waits_for_nobody(meeting, monkeypatch):
    transport, peer = transport_of(1, buffer_bytes=64), Peer(1)
    transport.connect([peer])

    def fail(self, tensor, src, stream=None):
        if self.rank == src:
            raise RuntimeError("NCCL error: unhandled system error")
        self._take(queue.Queue())

    monkeypatch.setattr(Communicator, "broadcast", fail)
    (bucket,) = buckets([("w", torch.ones(3))], 64)
    started = time.monotonic()
    with pytest.raises(RuntimeError, match="unhandled system error"):
        transport.send([peer], bucket, None)
    assert time.monotonic() - started < PATIENCE_S / 2
    assert meeting.last.destroyed == [0]
    peer.engines[0].shutdown()  # as the end of its process would
