"""What can go wrong between the policy and its samples."""

from __future__ import annotations


class RolloutError(RuntimeError):
    """The engine cannot return what was asked for, from the weights that were asked for."""


class RequestRefusedError(RolloutError):
    """The engine does not take a request: any other replica would not either."""


class SamplerMismatchError(RuntimeError):
    """The sampler and the trainer give the same tokens different log-probabilities."""
