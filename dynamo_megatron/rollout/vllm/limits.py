"""What vLLM 0.32 and Ray can do, known without importing them."""

from __future__ import annotations

TEMPERATURES = 0.01, 2.0
"""It refuses more, and takes less for the lower bound without an error."""


def check_temperature(name: str, temperature: float) -> None:
    """Refuse a temperature at which vLLM would sample from another policy, or not at all.

    Args:
        name: of the value, for the message.
        temperature: above 0.

    Raises:
        ValueError: it is out of range.
    """
    low, high = TEMPERATURES
    if not low <= temperature <= high:
        raise ValueError(
            f"{name}={temperature:g}: vLLM samples at {low:g} to {high:g} only. It refuses more, "
            "and takes less for the former without an error. Choose one in between, or the "
            "embedded engine (hf)."
        )


def is_head_address(text: str) -> bool:
    """Whether a Ray head can be there: ``host:port``."""
    host, _, port = text.rpartition(":")
    return "/" not in text and bool(host) and port.isdecimal() and 0 < int(port) < 65536
