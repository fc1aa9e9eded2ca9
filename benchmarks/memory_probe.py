"""Bytes a call holds and peaks at on a CPU, from the kernel's own account of the process."""

import ctypes
import gc
from collections.abc import Callable
from pathlib import Path

STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def _field(name: str) -> int:
    for line in STATUS.read_text().splitlines():
        if line.startswith(name):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"{STATUS} has no {name}: memory is measured on Linux only.")


def peak_above_now(call: Callable[[], object]) -> tuple[object, int]:
    """What ``call`` returned, and the bytes of its peak above what was resident before."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # else freed memory is taken again, and nothing seems used
    CLEAR.write_text("5")  # sets the high-water mark to what is resident now
    before = _field("VmRSS")
    result = call()
    return result, max(_field("VmHWM") - before, 0)
