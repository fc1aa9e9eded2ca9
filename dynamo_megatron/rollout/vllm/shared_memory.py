"""The shared memory of vLLM's processes, made to end with them."""

from __future__ import annotations

from pathlib import Path

import psutil

FOLDER = Path("/dev/shm")
PREFIXES = ("psm_", "vllm_dist_")
"""How the names begin: message queues, and collectives on a CPU."""


def forget_shared_names() -> None:
    """Remove the names of the shared memory that this process and its children have open.

    Call it when all of them have opened what they share. It then lives as long as they do, however
    they end. Under their names the pieces of a killed engine stay until the machine is restarted.
    """
    own = psutil.Process()
    for process in (own, *own.children(recursive=True)):
        maps = Path(f"/proc/{process.pid}/maps")
        for line in maps.read_text().splitlines() if maps.exists() else ():
            path = Path(line.split(maxsplit=5)[-1])
            if path.parent == FOLDER and path.name.startswith(PREFIXES):
                path.unlink(missing_ok=True)
