"""Pictures of a run, from its metrics file alone.

``python -m dynamo_megatron.observe.plots RUN_DIR`` draws them again at any time.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from dynamo_megatron.observe.panels import FEW, GREY, PLOTS, Panel, Rows
from dynamo_megatron.observe.sinks import METRICS_NAME, read_metrics

PLOTS_NAME = "plots"
"""The pictures' folder in a run's folder."""

_STYLE: dict[Any, Any] = {
    "font.size": 10,
    "axes.titlesize": 11.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.titlepad": 9,
    "axes.labelcolor": "#3C4043",
    "axes.edgecolor": "#BDC1C6",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#E8EAED",
    "xtick.color": GREY,
    "ytick.color": GREY,
    "legend.fontsize": 9,
    "figure.facecolor": "white",
    "savefig.dpi": 150,
}


def make_plots(run_dir: str | Path) -> list[Path]:
    """Draw what a run's ``metrics.jsonl`` holds into its ``plots`` folder.

    One picture for each subject that was recorded, and ``overview.png`` with all of them. A run
    of one step, without evaluations or with fewer metrics gives fewer or barer pictures.

    Returns:
        The files written.

    Raises:
        FileNotFoundError: the folder has no metrics.
        ValueError: the metrics hold no step.
    """
    run_dir = Path(run_dir)
    path = run_dir / METRICS_NAME
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist. Give the folder of a run, its run.dir.")
    rows = read_metrics(path)
    if not rows:
        raise ValueError(f"{path} holds no step: there is nothing to draw before the first ends.")
    live = {
        name: drawable
        for name, panels in PLOTS.items()
        if (drawable := [panel for panel in panels if panel.has_data(rows)])
    }
    folder = run_dir / PLOTS_NAME
    folder.mkdir(exist_ok=True)
    with rc_context(_STYLE):
        written = [
            _save(_grid(panels, rows, columns=2, size=(6.0, 3.8)), folder / f"{name}.png")
            for name, panels in live.items()
        ]
        if live:
            panels = [panel for group in live.values() for panel in group]
            overview = _grid(panels, rows, columns=3, size=(4.8, 3.2))
            overview.suptitle(_title(run_dir, rows), fontsize=13, x=0.01, ha="left")
            written.append(_save(overview, folder / "overview.png"))
    return written


def main(argv: Sequence[str] | None = None) -> int:
    """Draw the pictures of a run's folder; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m dynamo_megatron.observe.plots",
        description="Draw the pictures of a run from its metrics.jsonl into its plots folder.",
    )
    parser.add_argument("run_dir", metavar="RUN_DIR", help="the run's folder (run.dir)")
    try:
        written = make_plots(parser.parse_args(argv).run_dir)
    except (OSError, ValueError) as error:
        sys.stderr.write(f"{parser.prog}: {error}\n")
        return 2
    sys.stdout.write("".join(f"{path}\n" for path in written))
    return 0


def _title(run_dir: Path, rows: Rows) -> str:
    first, last = rows[0]["step"], rows[-1]["step"]
    steps = f"step {first}" if first == last else f"steps {first} to {last}"
    legend = " (faint: each step, bold: running mean)" if len(rows) > FEW else ""
    return f"{run_dir.resolve().name}: {steps}{legend}"


def _grid(
    panels: Sequence[Panel], rows: Rows, *, columns: int, size: tuple[float, float]
) -> Figure:
    columns = min(columns, len(panels))
    lines = math.ceil(len(panels) / columns)
    figure = Figure(figsize=(size[0] * columns, size[1] * lines), layout="constrained")
    for place, panel in enumerate(panels, start=1):
        axes = figure.add_subplot(lines, columns, place)
        panel.draw(axes, rows)
        axes.set_xlabel("step")
        # Whole steps, and room beside a single one.
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
        if rows[0]["step"] == rows[-1]["step"]:
            axes.set_xlim(rows[0]["step"] - 1, rows[0]["step"] + 1)
    return figure


def _save(figure: Figure, path: Path) -> Path:
    partial = path.with_name(f".{path.name}.partial")
    figure.savefig(partial, format="png")
    partial.replace(path)
    return path


if __name__ == "__main__":
    sys.exit(main())
