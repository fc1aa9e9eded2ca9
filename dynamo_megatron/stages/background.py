"""One piece of rank 0's work beside the training step, in a thread."""

from __future__ import annotations

import logging
from collections.abc import Callable
from threading import Event, Thread

logger = logging.getLogger(__name__)

ABANDON_LIMIT_S = 10.0
"""How long a thread that was told to give up is waited for."""


class Abandoned(Exception):
    """Raised in the thread when its result is not wanted any more."""


Work = Callable[[Callable[[], None]], bytes]
"""Called with a check, which it calls often: the check raises ``Abandoned`` to end it."""


class _Call(Thread):
    """One call and what became of it. A daemon: one that never returns keeps no process alive."""

    def __init__(self, work: Work, name: str) -> None:
        super().__init__(name=name, daemon=True)
        self._work = work
        self.unwanted = Event()
        self.result = b""
        self.failure: BaseException | None = None

    def run(self) -> None:
        try:
            self.result = self._work(self._check)
        except BaseException as error:  # raised where the result is taken
            self.failure = error

    def _check(self) -> None:
        if self.unwanted.is_set():
            raise Abandoned


class Background:
    """At most one call at a time, in a thread that must not touch ``torch.distributed``."""

    def __init__(self) -> None:
        self._call: _Call | None = None

    @property
    def busy(self) -> bool:
        """A call was started whose result was not taken."""
        return self._call is not None

    def start(self, work: Work, *, name: str) -> None:
        """Begin ``work`` and return at once."""
        assert self._call is None, "the result of the call before was not taken"
        self._call = _Call(work, name)
        self._call.start()

    def result(self) -> bytes:
        """Wait for the call and return what it returned, or raise what it raised."""
        call, self._call = self._call, None
        assert call is not None, "nothing was started"
        call.join()
        if call.failure is not None:
            raise call.failure
        return call.result

    def give_up(self) -> None:
        """The call's result is not wanted, if there is a call: it ends at its next check."""
        if self._call is not None:
            self._call.unwanted.set()

    def close(self) -> None:
        """Give the call up and wait a little for its thread."""
        self.give_up()
        call, self._call = self._call, None
        if call is None:
            return
        call.join(ABANDON_LIMIT_S)
        if call.is_alive():
            logger.warning("%s does not end and is left behind", call.name)
