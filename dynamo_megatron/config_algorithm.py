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


BANDS = {"masked": (0.5, 5.0), "geometric": (0.999, 1.002), "product": (0.5, 2.0)}
"""Bands of kept ratios unless the user gives others: of a token, and the two of a sequence."""


class CorrectionConfig(Section):
    """Loss weights against the mismatch of trainer and sampler, q = pi_train / pi_sampler.

    DynaMO's script has none. The ratios are at the policy before the update (the gap that
    ``rollout/logp_gap_mean`` reports); a dropped token stays in the loss denominator, and the
    penalty ``algorithm.kl`` is not weighted.
    """

    kind: Literal["none", "truncated", "masked", "sequence", "sequence_masked"] = "none"
    """min(q, cap) of a token; q inside a band, else dropped; both of the whole sequence."""
    sequence_ratio: Literal["geometric", "product"] = "geometric"
    """For sequence_masked: geometric mean of q with weight 1, or product of q as the weight."""
    cap: Annotated[float, Field(ge=1.0)] | None = None
    """Largest weight, for truncated and sequence; null: 2."""
    low: Annotated[float, Field(ge=0.0, le=1.0)] | None = None
    """Smallest ratio kept; null: 0.5 for masked and product, 0.999 for geometric."""
    high: Annotated[float, Field(ge=1.0)] | None = None
    """Largest ratio kept; null: 5 for masked, 2 for product, 1.002 for geometric."""
    veto: Annotated[float, Field(gt=0.0, lt=1.0)] | None = None
    """Drop a sequence in which any token's q is below this, e.g. 1e-4; null: no veto."""

    @property
    def cap_or_default(self) -> float:
        """The largest weight."""
        return 2.0 if self.cap is None else self.cap

    @property
    def band(self) -> tuple[float, float]:
        """Smallest and largest ratio that is kept."""
        low, high = BANDS["masked" if self.kind == "masked" else self.sequence_ratio]
        return low if self.low is None else self.low, high if self.high is None else self.high

    @model_validator(mode="after")
    def _unused(self) -> CorrectionConfig:
        banded = self.kind in ("masked", "sequence_masked")
        users = {
            "cap": ("truncated or sequence", self.kind in ("truncated", "sequence")),
            "low": ("masked or sequence_masked", banded),
            "high": ("masked or sequence_masked", banded),
            "veto": ("truncated, masked, sequence or sequence_masked", self.kind != "none"),
        }
        for name, (kinds, used) in users.items():
            value = getattr(self, name)
            if value is not None and not used:
                raise ValueError(
                    f"algorithm.correction.{name}={value} with algorithm.correction.kind="
                    f"{self.kind}: this kind does not look at {name}, and the run would not be "
                    f"the one that was meant. Set kind to {kinds}, or {name} to null."
                )
        if self.sequence_ratio == "product" and self.kind != "sequence_masked":
            raise ValueError(
                f"algorithm.correction.sequence_ratio=product with algorithm.correction.kind="
                f"{self.kind}: only sequence_masked chooses between the two ratios. Set "
                "kind=sequence_masked, or leave sequence_ratio out."
            )
        return self


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
    correction: CorrectionConfig = CorrectionConfig()
    old_logp: Literal["trainer", "sampler"] = "trainer"
    """Old policy of the clipped ratio: recomputed by the trainer, or as sampled (bypass). Bypass
    clips mismatch and update together and needs correction.kind=none. It saves no pass here: the
    trainer's statistics are needed for modulation and gap, and modulation takes them at ratio 1."""

    @model_validator(mode="after")
    def _bypass(self) -> AlgorithmConfig:
        if self.old_logp == "sampler" and self.correction.kind != "none":
            raise ValueError(
                f"algorithm.old_logp=sampler with algorithm.correction.kind={self.correction.kind}:"
                " with the sampler's log-probabilities as the old policy, old policy and sampler "
                "are the same and their ratio is 1; the clipped ratio holds the mismatch already, "
                "and a weight would count it twice. Set algorithm.correction.kind=none or "
                "algorithm.old_logp=trainer."
            )
        return self
