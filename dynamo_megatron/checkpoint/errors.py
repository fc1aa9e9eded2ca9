"""The error of this package, and raising it on every rank."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint.api import CheckpointException

from dynamo_megatron.parallel.broadcast import gather_bytes
from dynamo_megatron.parallel.reduce import any_rank

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class CheckpointError(RuntimeError):
    """A checkpoint or an export that cannot be written or read."""


def os_error_behind(error: RuntimeError) -> OSError | None:
    """The operating system's error that made ``torch.save`` fail, if that is what happened.

    After a full disk torch's zip writer complains of an unexpected position; the real error is in
    the context.
    """
    cause = error.__context__
    while cause is not None and not isinstance(cause, OSError):
        cause = cause.__context__
    return cause


@contextmanager
def together(doing: str, group: ProcessGroup) -> Iterator[None]:
    """Run a block on every rank; when it fails on any, raise the same error on all.

    The block itself must not contain a collective that a failing rank would miss. (Torch's
    distributed checkpoint has its own, in which every rank hears of a failure.)

    Args:
        doing: what the block does, for the message ("writing /runs/a/step_00000012").
        group: the ranks that take part.

    Raises:
        CheckpointError: with the failing rank and its reason, on every rank.

    Collectives on ``group``: 1 MAX; after a failure 2 all-gathers.
    """
    error: CheckpointError | None = None
    try:
        yield
    except (Exception, CheckpointException) as caught:  # torch's derives from BaseException
        # Whatever it was, the other ranks must hear of it.
        error = _as_checkpoint_error(caught, doing, dist.get_rank(group))
    if not any_rank(error is not None, group=group):
        return
    said = gather_bytes(str(error or "").encode(), group=group)
    # One text everywhere, that of the first rank with an error; a rank's own one is its cause.
    raise CheckpointError(next(text.decode() for text in said if text)) from error


def _as_checkpoint_error(error: BaseException, doing: str, rank: int) -> CheckpointError:
    if isinstance(error, CheckpointError):
        return error
    cause = error
    if isinstance(error, CheckpointException) and error.failures:
        # torch's own collective save or load failed: it has told every rank who and why.
        rank, (cause, _) = next(iter(error.failures.items()))
    said = f"{type(cause).__name__}: {cause}"
    if isinstance(cause, OSError) and cause.errno in _FULL:
        said += (
            ". The file system or a quota is full: free some space, lower checkpoint.keep, or "
            "point run.dir elsewhere. Older checkpoints are untouched"
        )
    told = CheckpointError(f"{doing} failed on rank {rank} ({said}).")
    told.__cause__ = cause
    return told
