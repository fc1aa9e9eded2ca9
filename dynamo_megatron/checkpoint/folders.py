"""The folder of checkpoints: names, which ones are complete, which ones may go."""

from __future__ import annotations

import logging
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

from dynamo_megatron.checkpoint.errors import CheckpointError
from dynamo_megatron.checkpoint.manifest import MARKER, read_manifest, sync_folder

logger = logging.getLogger(__name__)

# A trailing ".tmp-<hex>" is a save in progress, or what a killed one left. It says nothing about
# completeness: a kill between the marker and the renaming leaves a complete one.
_NAME = re.compile(r"step_\d{8,}(?P<temporary>\.tmp-[0-9a-f]+)?")


@dataclass(frozen=True, slots=True, order=True)
class Found:
    """A complete checkpoint; the greatest is the newest."""

    step: int
    saved_at: float
    path: Path


def final_name(step: int) -> str:
    """Name of the checkpoint after ``step`` steps."""
    return f"step_{step:08d}"


def temporary_name(step: int, token: str) -> str:
    """Name while it is being written; ``token`` is hexadecimal."""
    return f"{final_name(step)}.tmp-{token}"


def complete_checkpoints(directory: Path) -> tuple[list[Found], list[Path]]:
    """Complete checkpoints, oldest first, and folders whose marker is missing or damaged.

    Only the marker decides. Folders with other names are not looked at.
    """
    found, incomplete = [], []
    for path in sorted(directory.iterdir()) if directory.is_dir() else []:
        if not _NAME.fullmatch(path.name) or not path.is_dir():
            continue
        if not (path / MARKER).exists():
            incomplete.append(path)
            continue
        try:
            manifest = read_manifest(path)
        except CheckpointError as error:
            logger.warning("%s is skipped: %s", path, error)
            incomplete.append(path)
            continue
        found.append(Found(manifest.step, manifest.saved_at, path))
    return sorted(found), incomplete


def _is_temporary(path: Path) -> bool:
    return ".tmp-" in path.name


def newest_complete(directory: Path) -> Path | None:
    """The newest complete checkpoint; half-written ones are skipped with a warning.

    Raises:
        CheckpointError: no checkpoint is complete, but one that was has lost its marker. To start
            anew beside it would look like going on.
    """
    found, incomplete = complete_checkpoints(directory)
    damaged = [path for path in incomplete if not _is_temporary(path)]
    if damaged and not found:
        raise CheckpointError(
            f"{damaged[-1]} was complete once (saves in progress have other names), but its "
            f"{MARKER} is missing or damaged, and {directory} holds no other complete checkpoint. "
            f"Restore {MARKER} from a copy, or move {damaged[-1]} away to start from model.path."
        )
    for path in incomplete:
        logger.warning(
            "%s is not complete (no readable %s: its save was interrupted or is running, or it was "
            "damaged later) and is skipped.",
            path,
            MARKER,
        )
    return found[-1].path if found else None


def fallback_advice(path: Path) -> str:
    """What to do about a damaged checkpoint."""
    older = [f for f in complete_checkpoints(path.parent)[0] if f.path != path]
    if older:
        return f" Delete {path} to fall back to step {older[-1].step} ({older[-1].path.name})."
    return f" There is no other complete checkpoint in {path.parent}: delete {path} to start anew."


def publish(temporary: Path, final: Path) -> None:
    """Give a complete checkpoint its final name; one of the same step is replaced."""
    if final.exists():
        # Moved aside, not deleted first: at every moment a complete checkpoint of this step exists.
        aside = final.with_name(f"{temporary.name}0")
        final.rename(aside)
        temporary.rename(final)
        sync_folder(final.parent)
        shutil.rmtree(aside)
    else:
        temporary.rename(final)
    sync_folder(final.parent)


def prune(directory: Path, *, keep: int, written: Path) -> None:
    """Remove leftovers of interrupted saves, and all but the newest ``keep`` checkpoints.

    Args:
        directory: holds the checkpoints.
        keep: how many complete checkpoints stay.
        written: the checkpoint just completed; never removed.
    """
    found, incomplete = complete_checkpoints(directory)
    for path in filter(_is_temporary, incomplete):
        logger.info("removing %s, left by an interrupted save", path)
        _remove(path)
    later = [f.step for f in found if f.step > read_manifest(written).step]
    if later:
        logger.warning(
            "%s holds checkpoints of later steps than the one just saved (%s): the next resume "
            "would continue from those. Delete them if they belong to a run you gave up.",
            directory,
            ", ".join(map(str, later)),
        )
    others = [f.path for f in found if f.path != written]
    for path in others[: max(len(others) - (keep - 1), 0)]:
        _remove(path)


def _remove(path: Path) -> None:
    try:
        # The marker first: a kill in between must not leave a "complete" checkpoint without files.
        (path / MARKER).unlink(missing_ok=True)
        sync_folder(path)
        shutil.rmtree(path)
    except OSError as error:
        # No reason to end a run whose checkpoint has just been written.
        logger.warning("%s could not be removed (%s); the next save tries again.", path, error)
