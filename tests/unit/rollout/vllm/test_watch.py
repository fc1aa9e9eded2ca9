"""The end of a service is noticed, whether it greets, is idle, or comes back."""

from __future__ import annotations

import socket
import time

import pytest

from dynamo_megatron.rollout.errors import RolloutError
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


def test_an_address_where_nobody_listens_is_refused_at_once():
    with listener() as head:
        port = head.getsockname()[1]
        require_listener(f"127.0.0.1:{port}")
    with pytest.raises(OSError, match="refused"):
        require_listener(f"127.0.0.1:{port}")
    require_listener("auto")  # Ray looks for it
