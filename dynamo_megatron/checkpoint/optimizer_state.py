"""The optimizer's state and numbers, and the schedule's position, across a resume."""

from __future__ import annotations

import logging
from typing import Any

import torch
from megatron.core.optimizer.optimizer import ChainedOptimizer, MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

logger = logging.getLogger(__name__)

# What belongs to the state: which parameters, and (distributed optimizer) how many updates.
_STATE_KEYS = ("params", "step")
# Set by the schedule before every update.
_SCHEDULED_KEYS = ("lr", "weight_decay")


def optimizer_kind(optimizer: MegatronOptimizer) -> str:
    """Megatron-Core's class, which decides what its state looks like."""
    return "+".join(sorted({type(part).__name__ for part in _parts(optimizer)}))


def has_state(optimizer: MegatronOptimizer) -> bool:
    """This rank's optimizer holds state: an update was made, by an optimizer that keeps any."""
    return any(state for inner in _inner(optimizer) for state in inner.state.values())


def load_optimizer(optimizer: MegatronOptimizer, state: dict[str, Any]) -> None:
    """Take moments and update counts from ``state``, everything else from the configuration.

    Megatron-Core would also take learning rate bounds, betas and so on from the checkpoint, so a
    changed configuration would be ignored without a word. What changed is logged.
    """
    configured = [
        {key: value for key, value in group.items() if key not in _STATE_KEYS}
        for group in optimizer.param_groups
    ]
    optimizer.load_state_dict(state)
    for group, numbers in zip(optimizer.param_groups, configured, strict=True):
        changed = [
            f"{key}: {group.get(key)} -> {value}"
            for key, value in numbers.items()
            if key not in _SCHEDULED_KEYS and group.get(key) != value
        ]
        if changed:
            logger.warning("the optimizer continues with changed numbers: %s", "; ".join(changed))
        group.update(numbers)
    for inner in _inner(optimizer):
        if any("step" in state for state in inner.state.values()):
            # torch's AdamW counts in its state; the count that Megatron-Core's distributed
            # optimizer leaves in the groups would only go stale.
            for group in inner.param_groups:
                group.pop("step", None)


def clear_optimizer(optimizer: MegatronOptimizer) -> None:
    """Return to the state before the first update; the parameters are the model's present ones."""
    for inner in _inner(optimizer):
        inner.state.clear()
        for group in inner.param_groups:
            group.pop("step", None)
    optimizer.reload_model_params()


def set_schedule(scheduler: OptimizerParamScheduler, steps: int) -> None:
    """Put the schedule at a position; its numbers are the configuration's.

    ``scheduler.load_state_dict`` is not used: it adds the position to the present one, and
    insists on the numbers of the checkpoint.
    """
    scheduler.num_steps = 0
    scheduler.step(increment=steps)


def _parts(optimizer: MegatronOptimizer) -> list[MegatronOptimizer]:
    if isinstance(optimizer, ChainedOptimizer):
        return optimizer.chained_optimizers
    return [optimizer]


def _inner(optimizer: MegatronOptimizer) -> list[torch.optim.Optimizer]:
    return [part.optimizer for part in _parts(optimizer) if part.optimizer is not None]
