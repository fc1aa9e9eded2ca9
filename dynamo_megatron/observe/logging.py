"""Logs of a distributed run: every record says its rank, rank 0 keeps a file."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

from tqdm import tqdm

LOG_NAME = "run.log"
"""The log's file in a run's folder."""

_NOISY = ("megatron", "transformers", "matplotlib", "httpx", "filelock", "PIL", "fsspec")


class _ConsoleHandler(logging.Handler):
    """Writes to stderr above a progress bar instead of through it."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            tqdm.write(self.format(record), file=sys.stderr)
        except Exception:
            self.handleError(record)


class _RunFileHandler(logging.FileHandler):
    """A type of our own, so that setting up again replaces no handler but ours."""


def setup_logging(rank: int, run_dir: str | Path | None = None) -> None:
    """Configure the root logger of this process; calling again replaces what it set up.

    Rank 0 says INFO and above, on stderr and (given ``run_dir``) in ``run.log``; the other ranks
    say WARNING and above on stderr. Libraries that talk a lot are held to WARNING.

    Args:
        rank: global rank, in front of every record.
        run_dir: the run's folder; a run that is continued appends to its log.
    """
    root = logging.getLogger()
    for handler in list(root.handlers):
        if isinstance(handler, _ConsoleHandler | _RunFileHandler):
            root.removeHandler(handler)
            handler.close()
    handlers: list[logging.Handler] = [_ConsoleHandler()]
    if rank == 0 and run_dir is not None:
        Path(run_dir).mkdir(parents=True, exist_ok=True)
        handlers.append(_RunFileHandler(Path(run_dir) / LOG_NAME, encoding="utf-8"))
    level = logging.INFO if rank == 0 else logging.WARNING
    formatter = logging.Formatter(
        f"%(asctime)s [rank {rank}] %(levelname)s %(name)s: %(message)s", "%Y-%m-%d %H:%M:%S"
    )
    for handler in handlers:
        handler.setFormatter(formatter)
        handler.setLevel(level)
        root.addHandler(handler)
    root.setLevel(level)
    for name in _NOISY:
        logging.getLogger(name).setLevel(logging.WARNING)
