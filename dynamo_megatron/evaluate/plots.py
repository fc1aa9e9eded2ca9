"""Pictures of an evaluation."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from dynamo_megatron.algo.passk import Interval
from dynamo_megatron.evaluate.samples import RIGHT_FROM, Sample
from dynamo_megatron.evaluate.summary import ALL, Summary

# Okabe and Ito: told apart with any colour vision, and by lightness in print.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#5F6368")
_OUTCOMES = (("right", "#009E73"), ("wrong", "#D55E00"), ("error", "#5F6368"))
_BINS = 40


def draw(
    summaries: Sequence[Summary],
    samples: Sequence[Sample],
    folder: Path,
    *,
    right_from: float = RIGHT_FROM,
) -> list[Path]:
    """Write ``accuracy.png``, ``lengths.png`` and, from two samples a problem, ``pass_at_k.png``.

    Args:
        summaries: by source.
        samples: all of them.
        folder: made when it is not there.
        right_from: reward from which a sample is right.

    Returns:
        The files written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    written = [_accuracy(summaries, folder / "accuracy.png")]
    if any(summary.pass_at_k for summary in summaries):
        written.append(_pass_at_k(summaries, folder / "pass_at_k.png"))
    written.append(_lengths(samples, folder / "lengths.png", right_from))
    return written


def _accuracy(summaries: Sequence[Summary], path: Path) -> Path:
    """pass@1 and maj@k of each source, a row each."""
    figure = Figure(figsize=(7.0, 1.4 + 0.55 * len(summaries)), layout="constrained")
    axes = figure.subplots()
    for row, summary in enumerate(summaries):
        for interval, shift, colour, marker in (
            (summary.pass_at_1, -0.12, _COLOURS[0], "o"),
            (summary.maj_at_k, 0.12, _COLOURS[1], "s"),
        ):
            if interval is not None:
                low, high = _distances(interval)
                axes.errorbar(
                    interval.mean,
                    row + shift,
                    xerr=[[low], [high]],
                    fmt=marker,
                    color=colour,
                    capsize=3,
                )
    axes.plot([], [], "o", color=_COLOURS[0], label="pass@1")
    if any(summary.maj_at_k for summary in summaries):
        axes.plot([], [], "s", color=_COLOURS[1], label="majority vote")
    names = [f"{_short(s.source)} ({s.num_problems})" for s in summaries]
    axes.set_yticks(range(len(summaries)), names)
    axes.set(xlim=(-0.02, 1.02), ylim=(len(summaries) - 0.5, -0.5))
    _finish(axes, "Share of problems solved, 95 % intervals", percent="x")
    figure.legend(loc="outside lower right", ncols=2, frameon=False)
    return _save(figure, path)


def _pass_at_k(summaries: Sequence[Summary], path: Path) -> Path:
    figure = Figure(figsize=(7.0, 4.4), layout="constrained")
    axes = figure.subplots()
    ticks: set[int] = {1}
    for place, summary in enumerate(summaries):
        if summary.pass_at_1 is None:
            continue
        curve = {1: summary.pass_at_1, **summary.pass_at_k}
        ticks |= curve.keys()
        last = summary.source == ALL
        colour = "black" if last else _COLOURS[place % len(_COLOURS)]
        axes.fill_between(
            list(curve),
            [i.low for i in curve.values()],
            [i.high for i in curve.values()],
            color=colour,
            alpha=0.12,
            linewidth=0,
        )
        axes.plot(
            list(curve),
            [i.mean for i in curve.values()],
            "o--" if last else "o-",
            color=colour,
            label=_short(summary.source),
            markersize=4,
        )
    axes.set_xscale("log", base=2)
    axes.set_xticks(sorted(ticks), [str(k) for k in sorted(ticks)], minor=False)
    axes.minorticks_off()
    axes.set(xlabel="samples k", ylim=(-0.02, 1.02))
    _finish(axes, "Unbiased pass@k, 95 % bands", percent="y")
    axes.legend(frameon=False, fontsize=9)
    return _save(figure, path)


def _lengths(samples: Sequence[Sample], path: Path, right_from: float) -> Path:
    figure = Figure(figsize=(7.0, 3.6), layout="constrained")
    axes = figure.subplots()
    longest = max(sample.num_tokens for sample in samples)
    edges = np.linspace(0, longest + 1, min(_BINS, longest + 1) + 1)
    groups = [
        (name, colour, [s.num_tokens for s in samples if s.outcome(right_from) == name])
        for name, colour in _OUTCOMES
    ]
    present = [group for group in groups if group[2]]
    axes.hist(
        [lengths for _, _, lengths in present],
        bins=edges.tolist(),
        stacked=True,
        color=[colour for _, colour, _ in present],
        label=[f"{name} ({len(lengths)})" for name, _, lengths in present],
    )
    cut = sum(sample.truncated for sample in samples)
    axes.set(xlabel="tokens of a response", ylabel="responses")
    _finish(axes, f"Lengths; {cut} of {len(samples)} cut by the token limit")
    axes.legend(frameon=False, fontsize=9)
    return _save(figure, path)


def _finish(axes: Axes, title: str, *, percent: str = "") -> None:
    axes.set_title(title, loc="left", fontsize=11.5, fontweight="bold")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(color="#E8EAED")
    axes.set_axisbelow(True)
    if percent:
        axis = axes.xaxis if percent == "x" else axes.yaxis
        axis.set_major_formatter(PercentFormatter(1.0, decimals=0))


def _distances(interval: Interval) -> tuple[float, float]:
    # Of a skewed sample the mean may lie a rounding error outside the percentiles.
    return max(0.0, interval.mean - interval.low), max(0.0, interval.high - interval.mean)


def _short(name: str) -> str:
    # A dollar sign would start a formula.
    text = name if len(name) <= 28 else f"{name[:27]}\u2026"
    return text.replace("$", r"\$")


def _save(figure: Figure, path: Path) -> Path:
    figure.savefig(path, dpi=150)
    return path
