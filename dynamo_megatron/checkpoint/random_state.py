"""States of the random number generators of one rank, as tensors."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch
from megatron.core.tensor_parallel.random import (
    CudaRNGStatesTracker,
    get_cuda_rng_tracker,
    model_parallel_cuda_manual_seed,
)
from torch import Tensor

_CPU, _CUDA, _TRACKER = "torch.cpu", "torch.cuda", "tracker."


def _tracker() -> CudaRNGStatesTracker:
    tracker = get_cuda_rng_tracker()
    assert tracker is not None, "init_topology makes it"
    return tracker


def capture_random_state() -> dict[str, Tensor]:
    """States of torch's CPU and current CUDA generator and of Megatron's tracker, uint8 on CPU."""
    states = {_CPU: torch.get_rng_state()}
    if torch.cuda.is_available():
        states[_CUDA] = torch.cuda.get_rng_state()
    for name, state in _tracker().get_states().items():
        states[_TRACKER + name] = state.cpu()
    return {name: state.clone() for name, state in states.items()}


def restore_random_state(states: Mapping[str, Tensor]) -> None:
    """Continue from captured states, on a host of the same kind."""
    _tracker().set_states(
        {
            name.removeprefix(_TRACKER): state.clone()
            for name, state in states.items()
            if name.startswith(_TRACKER)
        }
    )
    if torch.cuda.is_available():
        torch.cuda.set_rng_state(states[_CUDA])
    torch.set_rng_state(states[_CPU])


def reseed_from(states: Mapping[str, Tensor], step: int) -> int:
    """Seed all generators from a captured state, for a layout that the states do not fit.

    The same on every rank but for Megatron's own offsets, and another stream than that of the
    start of the run, which would repeat its numbers.

    Returns:
        The seed.
    """
    digest = hashlib.sha256(states[_CPU].numpy().tobytes() + step.to_bytes(8, "little")).digest()
    seed = int.from_bytes(digest[:4], "little")
    torch.manual_seed(seed)
    model_parallel_cuda_manual_seed(seed)
    return seed
