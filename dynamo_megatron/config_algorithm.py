"""The algorithm's part of the schema: allocation, modulation, clipping, advantages."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from dynamo_megatron.config_base import Fraction, NonNegative, Positive, Section


class AllocationConfig(Section):
    """Sequence level: how many rollouts a prompt gets (DynaMO, section on rollout allocation)."""

    policy: Literal["dynamo", "uniform"] = "dynamo"
    """By the variance of each prompt's rewards, or the same number for every prompt."""
    n_low: Positive = 8
    """Fewest rollouts of a prompt (8 in DynaMO's script)."""
    n_high: Positive = 24
    """Most rollouts of a prompt (24 in DynaMO's script)."""
    n_mean: Positive = 16
    """Rollouts per step, divided by the number of prompts."""
    weight: Literal["sqrt", "linear"] = "sqrt"
    """``sqrt``: the standard deviation, which the optimum asks for; ``linear``: the variance."""
    fill: Literal["paper", "kkt"] = "paper"
    """``paper``: everyone gets the floor, the rest in proportion; ``kkt``: clipped proportion."""
    init: NonNegative = 8
    """A prompt with fewer recorded rollouts than max(n_low, init) is cold."""
    mastery: Fraction = 0.85
    """Accuracy from which a prompt gets the floor weight."""
    floor: Fraction = 0.01
    """Smallest weight of a prompt that is not cold."""
    decay: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    """History is multiplied by this at the end of an epoch; 1 is the paper."""
    refresh: Literal["step", "epoch"] = "step"
    """When priorities are recomputed; ``epoch`` reproduces the authors' code."""
    success_threshold: float = 0.5
    """A reward at or above it counts as a success in the history."""
    weighting: Literal["sample", "prompt"] = "sample"
    """``prompt`` gives every prompt the same total weight, whatever its group size."""

    @model_validator(mode="after")
    def _bounds(self) -> AllocationConfig:
        if self.policy == "dynamo" and not self.n_low <= self.n_mean <= self.n_high:
            raise ValueError(
                "algorithm.allocation needs n_low <= n_mean <= n_high, got "
                f"{self.n_low}, {self.n_mean}, {self.n_high}: the budget of n_mean rollouts a "
                "prompt cannot be spent within the bounds. Change one of the three."
            )
        if self.policy == "dynamo" and min(max(self.n_low, self.init), self.n_high) > self.n_mean:
            raise ValueError(
                f"algorithm.allocation: cold prompts get min(max(n_low, init), n_high) = "
                f"{min(max(self.n_low, self.init), self.n_high)} rollouts, more than n_mean = "
                f"{self.n_mean}; the first steps would overspend. Lower init or raise n_mean."
            )
        return self


class ModulationConfig(Section):
    """Token level: advantage modulation (DynaMO, gradient compensation and stabilisation)."""

    gradient_compensation: bool = True
    """Raise the advantages of confident tokens of good responses."""
    stabilization: bool = True
    """Damp the tokens whose update moves the entropy most."""
    alpha: Annotated[float, Field(ge=0.0)] = 0.2
    """The compensation factor lies in [1, 1 + alpha]."""
    lam_min: Annotated[float, Field(gt=0.0, le=1.0)] = 0.6
    """The stabilisation factor lies in [lam_min, 1]."""
    gamma: Annotated[float, Field(gt=0.0)] = 50.0
    """Steepness of the damping."""
    tau: Fraction = 0.99
    """Share of the largest entropy change at which half of the damping is reached."""
    scope: Literal["mini_batch", "step"] = "mini_batch"
    """The set whose extremes normalise entropy and entropy change."""
    stats: Literal["old", "current"] = "old"
    """Policy whose entropy and entropy change are used: before the step, or at each update."""
    change: Literal["exact", "seq_mean"] = "exact"
    """``seq_mean`` is the authors' code's stand-in for the expected term, for comparison only."""

    @model_validator(mode="after")
    def _stand_in(self) -> ModulationConfig:
        if self.change == "seq_mean" and self.stats == "current":
            raise ValueError(
                "algorithm.modulation.change=seq_mean with stats=current: the stand-in averages "
                "over a sequence, and at each update only the exact term is at hand. Set "
                "algorithm.modulation.stats=old."
            )
        return self


class ClipConfig(Section):
    """Clipping of the policy ratio."""

    low: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.2
    """The ratio is held above 1 - low where the advantage is negative."""
    high: Annotated[float, Field(gt=0.0)] = 0.28
    """And under 1 + high where it is positive; 0.28 is what DynaMO's script amounts to."""
    dual: Annotated[float, Field(gt=1.0)] | None = 10.0
    """Dual clip for negative advantages; null switches it off."""


class KlConfig(Section):
    """Penalty towards the policy at the start of the run."""

    coefficient: Annotated[float, Field(ge=0.0)] = 0.0
    """Weight of the penalty; 0 keeps no copy of the starting policy."""
    estimator: Literal["k1", "k2", "k3"] = "k3"
    """Per-token estimate of the divergence."""


class AdvantageConfig(Section):
    """Group-relative advantages."""

    normalize: Literal["std", "none"] = "std"
    """``std`` is GRPO; ``none`` leaves the scale alone (Dr.GRPO)."""
    epsilon: Annotated[float, Field(gt=0.0)] = 1e-6
    """Added to the standard deviation."""
    mask_truncated: bool = False
    """Leave truncated responses out of the loss (they are scored and counted all the same)."""


class AlgorithmConfig(Section):
    """The learning rule. Uniform allocation with both modulations off is plain GRPO."""

    advantage: AdvantageConfig = AdvantageConfig()
    allocation: AllocationConfig = AllocationConfig()
    modulation: ModulationConfig = ModulationConfig()
    clip: ClipConfig = ClipConfig()
    kl: KlConfig = KlConfig()
