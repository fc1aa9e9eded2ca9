"""The end of a service is noticed, whether it greets, is idle, or comes back."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from dynamo_megatron.rollout.errors import RolloutError
from dynamo_megatron.rollout.vllm import watch as watch_module
from dynamo_megatron.rollout.vllm.watch import RayWatch, require_listener


def listener(port: int = 0) -> socket.socket:
    service = socket.socket()
    service.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    service.bind(("127.0.0.1", port))
    service.listen()
    return service


def fails_within(watch: RayWatch, seconds: float) -> str | None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            watch.require()
        except RolloutError as error:
            return str(error)
        time.sleep(0.01)
    return None


def test_the_end_of_a_service_is_noticed_at_once_with_its_name():
    head, node = listener(), listener()
    watch = RayWatch(patience=1)
    watch.start({"its head": head.getsockname(), "its node": node.getsockname()})
    line, _ = head.accept()
    line.sendall(b"greeting")
    assert fails_within(watch, 0.5) is None
    head.close()
    line.close()
    found = fails_within(watch, 20)
    assert found is not None and "Ray is gone: its head at 127.0.0.1:" in found
    node.close()


def test_a_connection_that_is_ended_is_made_again():
    head = listener()
    watch = RayWatch(patience=1)
    watch.start({"its head": head.getsockname()})
    for _ in range(3):
        line, _ = head.accept()
        line.close()
    assert fails_within(watch, 0.3) is None
    watch.close()
    head.close()


def test_a_service_that_comes_back_in_time_was_never_gone():
    head = listener()
    port = head.getsockname()[1]
    watch = RayWatch(patience=100)
    watch.start({"its head": ("127.0.0.1", port)})
    line, _ = head.accept()
    head.close()
    line.close()
    assert fails_within(watch, 0.3) is None
    back = listener(port)
    back.settimeout(20)
    line, _ = back.accept()
    assert fails_within(watch, 0.3) is None
    watch.close()
    line.close()
    back.close()


def test_who_waits_gives_up_when_the_engine_is_closed():
    watch = RayWatch()
    watch.require()
    watch.close()
    with pytest.raises(RolloutError, match="being closed"):
        watch.require()


@contextmanager
def answering(words: bytes) -> Iterator[str]:
    """The address of a service that says the same to everybody, and listens until it is left."""
    with listener() as service:

        def serve() -> None:
            line, _ = service.accept()
            with line:
                line.sendall(words)
                while line.recv(4096):
                    pass

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield f"127.0.0.1:{service.getsockname()[1]}"
        thread.join(20)


def test_an_address_where_nobody_listens_is_refused_at_once():
    with listener() as head:
        port = head.getsockname()[1]
    with pytest.raises(OSError, match="refused"):
        require_listener(f"127.0.0.1:{port}")
    require_listener("auto")  # Ray looks for it


def test_what_answers_a_grpc_greeting_passes():
    with answering(bytes([0, 0, 6, 4, 0, 0, 0, 0, 0]) + bytes(6)) as address:
        require_listener(address)


@pytest.mark.parametrize("words", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"SSH-2.0-x\r\n", b""])
def test_another_program_that_listens_at_the_address_is_told_from_ray(words, monkeypatch):
    monkeypatch.setattr(watch_module, "FIRST_WITHIN_S", 0.3)
    with answering(words) as address, pytest.raises(OSError, match="it is another program"):
        require_listener(address)


def test_what_is_encrypted_is_left_to_ray(monkeypatch):
    monkeypatch.setenv("RAY_USE_TLS", "1")
    with answering(b"") as address:
        require_listener(address)
