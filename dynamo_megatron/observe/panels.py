"""The panels of a run's pictures: each draws some metrics over the steps on given axes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import PowerNorm
from matplotlib.ticker import FuncFormatter, MaxNLocator, PercentFormatter

# Okabe and Ito: told apart with any colour vision, and by lightness in print.
BLUE, ORANGE, GREEN = "#0072B2", "#D55E00", "#009E73"
GREY = "#5F6368"

FEW = 40
"""Up to so many steps are drawn as points; more of them as a faint line and its running mean."""
_HEAT_COLUMNS = 240
"""A heat map of more steps than this averages neighbours."""

Rows = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """A drawing and the metrics of which it needs at least one."""

    draw: Callable[[Axes, Rows], None]
    needs: tuple[str, ...]

    def has_data(self, rows: Rows) -> bool:
        """Some step recorded one of the metrics."""
        return any(_usable(row.get(name)) for name in self.needs for row in rows)


def _reward(axes: Axes, rows: Rows) -> None:
    _line(axes, rows, "reward/mean", "training reward", BLUE)
    _, rewards = _series(rows, "reward/mean")
    _, rates = _series(rows, "reward/pass_rate")
    # Rewards of 0 and 1 make the two the same line.
    if len(rates) != len(rewards) or not np.allclose(rates, rewards):
        _line(axes, rows, "reward/pass_rate", "training pass rate", GREEN)
    _heldout(axes, rows)
    axes.set(title="Reward", ylabel="mean reward, share solved")
    _legend(axes)


def _heldout(axes: Axes, rows: Rows) -> None:
    with_score = [row for row in rows if _usable(row.get("eval/pass@1"))]
    if not with_score:
        return
    steps = [row["step"] for row in with_score]
    scores = [row["eval/pass@1"] for row in with_score]
    ends = [
        [_distance(row, "eval/pass@1_low") for row in with_score],
        [_distance(row, "eval/pass@1_high") for row in with_score],
    ]
    axes.errorbar(
        steps,
        scores,
        yerr=ends,
        color=ORANGE,
        marker="D",
        markersize=5,
        lw=1.4,
        ls=":" if len(steps) > 1 else "",
        capsize=3,
        label="held-out pass@1" + (", 95% interval" if np.any(ends) else ""),
        zorder=5,
    )


def _distance(row: Mapping[str, Any], bound: str) -> float:
    value = row.get(bound)
    return abs(value - row["eval/pass@1"]) if _usable(value) else 0.0


def _entropy(axes: Axes, rows: Rows) -> None:
    _line(axes, rows, "entropy/old_mean", "before the updates", BLUE)
    _line(axes, rows, "train/entropy", "during the updates", ORANGE, style="--")
    axes.set(title="Policy entropy", ylabel="nats per token")
    _from_zero(axes)
    _legend(axes)


def _gradient_norm(axes: Axes, rows: Rows) -> None:
    _line(axes, rows, "train/grad_norm", "before clipping", BLUE)
    _, norms = _series(rows, "train/grad_norm")
    if len(norms) and norms.min() > 0 and norms.max() > 50 * norms.min():
        axes.set_yscale("log")
    else:
        _from_zero(axes)
    steps, skipped = _series(rows, "train/skipped")
    for number, step in enumerate(steps[skipped > 0]):
        label = "update skipped" if number == 0 else None
        axes.axvline(step, color=ORANGE, lw=1.2, ls="--", alpha=0.8, label=label)
    axes.set(title="Gradient norm", ylabel="global L2 norm")
    _legend(axes)


def _group_sizes(axes: Axes, rows: Rows) -> None:
    edges, sizes, shares = _heat(rows)
    mesh = axes.pcolormesh(
        edges,
        np.arange(sizes[0], sizes[-1] + 2) - 0.5,
        np.ma.masked_equal(shares, 0.0),
        cmap="GnBu",
        # The root keeps a few prompts visible beside a step where all have the same size.
        norm=PowerNorm(0.5, vmin=0.0, vmax=float(shares.max())),
        rasterized=True,
    )
    axes.figure.colorbar(
        mesh, ax=axes, label="share of prompts", format=PercentFormatter(1.0, decimals=0), pad=0.02
    ).outline.set_visible(False)
    steps, values = _series(rows, "allocation/size_mean")
    if len(values):
        axes.plot(
            steps, values, color=ORANGE, lw=1.4, ls="--", marker="" if steps[1:].size else "_"
        )
    # Equal groups are one row: room around it shows that it is one.
    axes.set_ylim(sizes[0] - 1.5, sizes[-1] + 1.5)
    axes.yaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    axes.grid(False)
    # A legend would cover sizes.
    axes.set(title="Group sizes (dashed: mean)", ylabel="rollouts per prompt")


def _heat(rows: Rows) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Edges of the columns in steps, sizes, and the share of prompts [size, column]."""
    with_sizes = [row for row in rows if _usable(row.get("allocation/hist"))]
    counts = [{int(k): n for k, n in row["allocation/hist"].items()} for row in with_sizes]
    used = [size for count in counts for size, number in count.items() if number]
    sizes = np.arange(min(used), max(used) + 1)
    steps = np.array([row["step"] for row in with_sizes])
    span = steps[-1] - steps[0] + 1
    num_columns = min(int(span), _HEAT_COLUMNS)
    edges = np.linspace(steps[0] - 0.5, steps[-1] + 0.5, num_columns + 1)
    column_of = np.clip(np.searchsorted(edges, steps) - 1, 0, num_columns - 1)
    total = np.zeros((len(sizes), num_columns))
    for column, count in zip(column_of, counts, strict=True):
        for size, number in count.items():
            if number:
                total[size - sizes[0], column] += number
    prompts = total.sum(axis=0, keepdims=True)
    return edges, sizes, np.divide(total, prompts, out=np.zeros_like(total), where=prompts > 0)


def _shares(axes: Axes, rows: Rows) -> None:
    _line(axes, rows, "modulation/compensated_share", "compensated (factor > 1)", BLUE)
    _line(axes, rows, "modulation/damped_share", "damped (factor < 1)", ORANGE)
    axes.set(title="Tokens modulated", ylabel="share of tokens, log scale")
    # Many tokens are compensated and very few damped; both must be seen. Below 0.01 % is linear.
    axes.set_yscale("symlog", linthresh=1e-4)
    axes.set_ylim(0.0, 1.0)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda share, _: f"{100 * share:g}%"))
    _legend(axes)


def _factors(axes: Axes, rows: Rows) -> None:
    axes.axhline(1.0, color=GREY, lw=1.0, ls="--")
    _line(axes, rows, "modulation/compensation_mean", "gradient compensation", BLUE)
    _line(axes, rows, "modulation/stabilization_mean", "update stabilisation", ORANGE)
    axes.set(title="Advantage factors", ylabel="mean factor")
    _legend(axes)


def _gap(axes: Axes, rows: Rows) -> None:
    _line(axes, rows, "rollout/logp_gap_max", "largest", ORANGE)
    _line(axes, rows, "rollout/logp_gap_mean", "mean", BLUE)
    # A few wrong tokens are far above the mean. Below 1e-7 is rounding.
    axes.set_yscale("symlog", linthresh=1e-7)
    axes.set(title="Trainer against sampler", ylabel="|difference of logp|, nats, log scale")
    axes.set_ylim(bottom=0.0)
    _legend(axes)


def _ratios(axes: Axes, rows: Rows) -> None:
    axes.axhline(1.0, color=GREY, lw=1.0, ls="--")
    _line(axes, rows, "rollout/ratio_q99", "ratio, 99 % quantile", ORANGE)
    _line(axes, rows, "rollout/ratio_q01", "ratio, 1 % quantile", GREEN)
    _line(axes, rows, "rollout/effective_sample_size", "effective sample size", BLUE)
    axes.set(title="Probability ratios", ylabel="trainer / sampler, share of tokens")
    axes.ticklabel_format(axis="y", useOffset=False)
    _legend(axes)


PLOTS: Mapping[str, tuple[Panel, ...]] = {
    "reward": (Panel(draw=_reward, needs=("reward/mean", "reward/pass_rate", "eval/pass@1")),),
    "entropy": (Panel(draw=_entropy, needs=("entropy/old_mean", "train/entropy")),),
    "group_sizes": (Panel(draw=_group_sizes, needs=("allocation/hist",)),),
    "modulation": (
        Panel(draw=_shares, needs=("modulation/compensated_share", "modulation/damped_share")),
        Panel(
            draw=_factors,
            needs=("modulation/compensation_mean", "modulation/stabilization_mean"),
        ),
    ),
    "gradient_norm": (Panel(draw=_gradient_norm, needs=("train/grad_norm",)),),
    "mismatch": (
        Panel(draw=_gap, needs=("rollout/logp_gap_mean", "rollout/logp_gap_max")),
        Panel(draw=_ratios, needs=("rollout/effective_sample_size", "rollout/ratio_q99")),
    ),
}
"""Each picture's panels, by the picture's name."""


def _usable(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(value.values())
    return isinstance(value, int | float) and math.isfinite(value)


def _series(rows: Rows, name: str) -> tuple[np.ndarray, np.ndarray]:
    """Steps and finite values of one metric, where it was recorded."""
    found = [row for row in rows if _usable(row.get(name))]
    return np.array([row["step"] for row in found]), np.array([row[name] for row in found])


def _line(axes: Axes, rows: Rows, name: str, label: str, color: str, style: str = "-") -> None:
    steps, values = _series(rows, name)
    if len(steps) == 0:
        return
    if len(steps) <= FEW:
        axes.plot(steps, values, style, color=color, marker="o", ms=3.5, lw=1.5, label=label)
        return
    axes.plot(steps, values, color=color, alpha=0.25, lw=0.8)
    axes.plot(steps, _running_mean(values), style, color=color, lw=2.0, label=label)


def _running_mean(values: np.ndarray) -> np.ndarray:
    """Centred mean over a twentieth of the values; at the ends over what there is."""
    window = np.ones(max(3, len(values) // 20) | 1)
    return np.convolve(values, window, "same") / np.convolve(np.ones(len(values)), window, "same")


def _from_zero(axes: Axes) -> None:
    if axes.dataLim.ymin >= 0:
        axes.set_ylim(0.0, 1.08 * axes.dataLim.ymax or 1.0)


def _legend(axes: Axes) -> None:
    if axes.get_legend_handles_labels()[1]:
        axes.legend(loc="best", facecolor="white", edgecolor="none", framealpha=0.85)
