"""Frames between the reward pool and its workers: a length, then JSON.

JSON and not pickle: what comes back from a process that handled model output is parsed, never
executed. Text travels as UTF-8 with ``surrogatepass``, so that every Python string arrives as sent.
"""

from __future__ import annotations

import json
import struct
from typing import Any

_LENGTH = struct.Struct(">Q")


class WireError(ValueError):
    """The bytes received are not frames of this protocol."""


def encode_frame(message: Any) -> bytes:
    """One message as bytes: 8 bytes of length (big-endian), then JSON."""
    body = json.dumps(message, ensure_ascii=False).encode("utf-8", "surrogatepass")
    return _LENGTH.pack(len(body)) + body


class FrameReader:
    """Cuts a stream of bytes into messages.

    Args:
        max_bytes: longest frame accepted; None accepts any.
    """

    def __init__(self, max_bytes: int | None = None) -> None:
        self._buffer = bytearray()
        self._max_bytes = max_bytes

    def feed(self, data: bytes) -> list[Any]:
        """Add bytes and return the messages that they complete, in order.

        Raises:
            WireError: a frame is not JSON, or longer than ``max_bytes``.
        """
        self._buffer += data
        messages = []
        while len(self._buffer) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._buffer)
            if self._max_bytes is not None and length > self._max_bytes:
                raise WireError(f"a frame of {length} bytes, at most {self._max_bytes} expected")
            end = _LENGTH.size + length
            if len(self._buffer) < end:
                break
            body = bytes(self._buffer[_LENGTH.size : end])
            del self._buffer[:end]
            messages.append(_decode(body))
        return messages


def _decode(body: bytes) -> Any:
    try:
        return json.loads(body.decode("utf-8", "surrogatepass"))
    except (ValueError, RecursionError) as error:
        raise WireError(f"a frame is not JSON: {error}") from error
