"""What a rank raises when the others do not go along."""

from __future__ import annotations


class DivergenceError(RuntimeError):
    """Ranks that must hold the same values hold different ones."""


class PeerError(RuntimeError):
    """Another rank failed; this one stops with it.

    Attributes:
        rank: the rank that failed.
        error_type: name of the exception's class there.
        error_text: its text.
    """

    def __init__(self, rank: int, phase: str, error_type: str, error_text: str) -> None:
        super().__init__(
            f"rank {rank} failed in phase {phase!r} with {error_type}: {error_text}\n"
            f"This rank stops with it; the traceback is in rank {rank}'s log."
        )
        self.rank = rank
        self.error_type = error_type
        self.error_text = error_text
