"""Notices that Ray is gone, before Ray ends this process over it without a reason in the log."""

from __future__ import annotations

import logging
import os
import select
import socket
import threading
from collections.abc import Mapping
from contextlib import ExitStack

from dynamo_megatron.rollout.errors import RolloutError

logger = logging.getLogger(__name__)

LOOK_EVERY_S = 1.0
CONNECT_WITHIN_S = 3.0
FIRST_WITHIN_S = 10.0
PATIENCE = 3
"""A service of another's Ray that refused so many connections in a row is gone."""
KEEPALIVE = {socket.TCP_KEEPIDLE: 5, socket.TCP_KEEPINTVL: 2, socket.TCP_KEEPCNT: 3}
"""A machine that lost its power closes no connection."""
SETTINGS = 4
FRAME_HEADER = 9
HTTP2_GREETING = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, SETTINGS, 0, 0, 0, 0, 0])
"""What a client says first, and the type of what a server answers (RFC 9113, 3.4 and 6.5)."""

Address = tuple[str, int]


class RayWatch:
    """Holds connections to Ray's services in a thread: their end is known at once.

    Args:
        patience: connections in a row that a service may refuse.
    """

    def __init__(self, patience: int = PATIENCE) -> None:
        self._patience = patience
        self._gone: str | None = None
        self._closing = threading.Event()

    def start(self, services: Mapping[str, Address]) -> None:
        """Watch from now on.

        Args:
            services: what each is, and the address it listens on.
        """
        threading.Thread(
            target=self._run, args=(dict(services),), name="ray-watch", daemon=True
        ).start()

    def require(self) -> None:
        """Pass while Ray is there.

        Raises:
            RolloutError: it is gone, or the engine is being closed.
        """
        if self._gone is not None:
            raise RolloutError(self._gone)
        if self._closing.is_set():
            raise RolloutError("the rollout engine is being closed.")

    def close(self) -> None:
        """Stop; what still waits for a replica gives up."""
        self._closing.set()

    def _run(self, services: dict[str, Address]) -> None:
        lines: dict[str, socket.socket] = {}
        refused = dict.fromkeys(services, 0)
        with ExitStack() as closing:
            closing.callback(lambda: [line.close() for line in lines.values()])
            while self._gone is None and not self._closing.is_set():
                for name in services.keys() - lines.keys():
                    self._reconnect(name, services[name], lines, refused)
                speaking, _, _ = select.select(lines.values(), [], [], LOOK_EVERY_S)
                for name in [name for name, line in lines.items() if line in speaking]:
                    if not _read(lines[name]):
                        lines.pop(name).close()

    def _reconnect(
        self, name: str, address: Address, lines: dict[str, socket.socket], refused: dict[str, int]
    ) -> None:
        try:
            lines[name] = _connect(address)
            refused[name] = 0
        except OSError as error:
            refused[name] += 1
            if refused[name] >= self._patience and not self._closing.is_set():
                self._report(name, address, error)

    def _report(self, name: str, address: Address, failure: OSError) -> None:
        self._gone = (
            f"Ray is gone: {name} at {address[0]}:{address[1]} takes no connections ({failure}). "
            "It was killed (by hand, or because the machine had no memory left) or its node is "
            "down, and with it the replicas. Start the run again with run.resume=if_present."
        )
        logger.error("%s", self._gone)


def require_listener(address: str) -> None:
    """Ray itself takes minutes to find that nobody, or another program, listens at ``host:port``.

    Args:
        address: others than ``host:port`` pass.

    Raises:
        OSError: nobody does; or what listens speaks no gRPC, as Ray's head does.
    """
    host, _, port = address.rpartition(":")
    if not (host and port.isdecimal() and "://" not in address):
        return
    with _connect((host.strip("[]"), int(port)), within_s=FIRST_WITHIN_S) as line:
        if os.environ.get("RAY_USE_TLS", "0").lower() in ("1", "true"):
            return  # what is said there cannot be read from here
        line.sendall(HTTP2_GREETING)
        try:
            answer = line.makefile("rb").read(FRAME_HEADER)
        except OSError:
            answer = b""
    if len(answer) < FRAME_HEADER or answer[3] != SETTINGS:
        raise ConnectionError(
            f"what listens there said {answer!r} to a gRPC greeting, so it is another program. "
            "Ray's head has port 6379 unless it was started with --port; 8265 is its dashboard's"
        )


def _connect(address: Address, within_s: float = CONNECT_WITHIN_S) -> socket.socket:
    line = socket.create_connection(address, timeout=within_s)
    line.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in KEEPALIVE.items():
        line.setsockopt(socket.IPPROTO_TCP, option, value)
    return line


def _read(line: socket.socket) -> bool:
    """Pass over what a service says (a greeting); False when it has ended the connection."""
    try:
        return bool(line.recv(4096))
    except OSError:
        return False
