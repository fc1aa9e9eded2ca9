"""Notices that Ray is gone, before Ray ends this process over it without a reason in the log."""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Mapping

from dynamo_megatron.rollout.errors import RolloutError

logger = logging.getLogger(__name__)

LOOK_EVERY_S = 1.0
ANSWER_WITHIN_S = 3.0
LOOKS = 3
"""A service that refused so many connections in a row is gone."""

Address = tuple[str, int]


class RayWatch:
    """Knocks at Ray's services from a thread."""

    def __init__(self) -> None:
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
        missed = dict.fromkeys(services, 0)
        while self._gone is None and not self._closing.wait(LOOK_EVERY_S):
            for name, address in services.items():
                failure = _knock(address)
                missed[name] = missed[name] + 1 if failure else 0
                if missed[name] == LOOKS and not self._closing.is_set():
                    self._report(name, address, failure)
                    return

    def _report(self, name: str, address: Address, failure: OSError | None) -> None:
        self._gone = (
            f"Ray is gone: {name} at {address[0]}:{address[1]} takes no connections ({failure}). "
            "It was killed (by hand, or because the machine had no memory left) or its node is "
            "down, and with it the replicas. Start the run again with run.resume=if_present."
        )
        logger.error("%s", self._gone)


def _knock(address: Address) -> OSError | None:
    try:
        socket.create_connection(address, timeout=ANSWER_WITHIN_S).close()
    except OSError as error:
        return error
    return None
