"""Temporary folders that say whose they are, so that those of killed runs can be removed."""

from __future__ import annotations

import json
import logging
import os
import shutil
import tempfile
from dataclasses import asdict
from pathlib import Path

from dynamo_megatron.rollout.vllm.processes import ProcessId, is_gone, own_process

RAY, WEIGHTS = "dynamo-ray-", "dynamo-weights-"
"""How the folders are called: of a Ray that is started here, and where weights are handed over."""
OWNER_NAME = "owner.json"
SHORT_TEMP = 40
"""Ray's sockets lie under its folder, and a socket's path has at most 107 characters."""

logger = logging.getLogger(__name__)


def make_folder(prefix: str) -> str:
    """A new folder that says whose it is; what a killed process left is cleared away first.

    A process that is killed by SIGKILL, or for memory, cannot remove its own: tens to hundreds of
    megabytes each.

    Args:
        prefix: ``RAY`` or ``WEIGHTS``.
    """
    temp = _short_temp()
    for folder in temp.glob(f"{prefix}*"):
        if _is_abandoned(folder):
            logger.info("removing %s, which a run left that was killed", folder)
            shutil.rmtree(folder, ignore_errors=True)
    made = tempfile.mkdtemp(prefix=prefix, dir=temp)
    (Path(made) / OWNER_NAME).write_text(json.dumps(asdict(own_process())), encoding="utf-8")
    return made


def _is_abandoned(folder: Path) -> bool:
    """Whether it is ours, of this node, and its process is no more; in doubt it is not."""
    try:
        if folder.is_symlink() or folder.stat().st_uid != os.getuid():
            return False
        owner = ProcessId(**json.loads((folder / OWNER_NAME).read_text(encoding="utf-8")))
        return is_gone(owner)
    except (OSError, ValueError, TypeError):
        return False


def _short_temp() -> Path:
    folder = tempfile.gettempdir()
    return Path(folder if len(folder) <= SHORT_TEMP else "/tmp")
