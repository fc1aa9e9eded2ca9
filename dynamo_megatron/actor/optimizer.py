"""Megatron-Core's optimizer and schedule, and a step that refuses non-finite gradients."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.optimizer.optimizer import ChainedOptimizer, MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerSettings:
    """The numbers of the optimizer; one unit of the schedule is one update.

    Attributes:
        name: AdamW, or SGD (for tests that compare weights).
        lr: peak learning rate.
        min_lr: learning rate after the decay.
        warmup_updates: updates of linear warm-up; the first one already moves.
        decay_style: from the peak to ``min_lr``.
        decay_updates: update at which ``min_lr`` is reached.
        weight_decay: on matrices; norms and biases have none.
        beta1, beta2, epsilon: Adam's.
        clip_grad: largest global gradient norm; 0 for no clipping.
        distributed: shard optimizer state over data-parallel ranks.
    """

    name: Literal["adam", "sgd"]
    lr: float
    min_lr: float
    warmup_updates: int
    decay_style: Literal["constant", "linear", "cosine"]
    decay_updates: int
    weight_decay: float
    beta1: float
    beta2: float
    epsilon: float
    clip_grad: float
    distributed: bool


def build_optimizer(
    model: DistributedDataParallel, settings: OptimizerSettings, dtype: torch.dtype
) -> MegatronOptimizer:
    """Megatron-Core's optimizer over one model chunk."""
    return get_megatron_optimizer(
        OptimizerConfig(
            optimizer=settings.name,
            lr=settings.lr,
            min_lr=settings.min_lr,
            weight_decay=settings.weight_decay,
            adam_beta1=settings.beta1,
            adam_beta2=settings.beta2,
            adam_eps=settings.epsilon,
            sgd_momentum=0.0,
            clip_grad=settings.clip_grad,
            bf16=dtype is torch.bfloat16,
            params_dtype=dtype,
            use_distributed_optimizer=settings.distributed,
        ),
        [model],
    )


def build_scheduler(
    optimizer: MegatronOptimizer, settings: OptimizerSettings
) -> OptimizerParamScheduler:
    """Learning-rate schedule, positioned at the first update.

    A fresh scheduler stands before the first update, where a warm-up from zero would waste it.
    """
    # A run that is shorter than its warm-up ends in the middle of it, as the same run's first
    # updates would if it were longer; Megatron-Core wants the decay to end after it.
    decay = max(settings.decay_updates, settings.warmup_updates + 1)
    scheduler = OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=settings.lr,
        min_lr=settings.min_lr,
        lr_warmup_steps=settings.warmup_updates,
        lr_decay_steps=decay,
        lr_decay_style=settings.decay_style,
        start_wd=settings.weight_decay,
        end_wd=settings.weight_decay,
        wd_incr_steps=decay,
        wd_incr_style="constant",
    )
    scheduler.step(1)
    return scheduler


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """Global gradient norm before clipping, and whether the weights moved."""

    grad_norm: float
    applied: bool


@torch.no_grad()
def step_if_finite(optimizer: MegatronOptimizer, clip_grad: float) -> StepOutcome:
    """Clip and apply the gradients, unless their global norm is not finite.

    The norm is reduced over all ranks before anybody decides, so one rank's NaN or infinity stops
    the step on all of them; weights and optimizer state then stay exactly as they were.
    """
    found_inf = optimizer.prepare_grads()
    grad_norm = float(optimizer.get_grad_norm())
    if found_inf or not math.isfinite(grad_norm):
        return StepOutcome(grad_norm, applied=False)
    if clip_grad > 0:
        for part in _parts(optimizer):
            if parameters := part.get_parameters():
                clip_grad_by_total_norm_fp32(list(parameters), clip_grad, grad_norm)
    optimizer.step_with_ready_grads()
    return StepOutcome(grad_norm, applied=True)


def _parts(optimizer: MegatronOptimizer) -> list[MegatronOptimizer]:
    if isinstance(optimizer, ChainedOptimizer):
        return optimizer.chained_optimizers
    return [optimizer]
