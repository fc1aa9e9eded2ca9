"""What vLLM 0.32 can do, known without importing it."""

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
