"""What an evaluation leaves for people: ``summary.json``, pictures, a page, and a table."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from dynamo_megatron.algo.passk import Interval
from dynamo_megatron.evaluate.page import write_page
from dynamo_megatron.evaluate.plots import draw
from dynamo_megatron.evaluate.samples import RIGHT_FROM, Sample
from dynamo_megatron.evaluate.summary import ALL, Summary

SUMMARY_NAME = "summary.json"
PAGE_NAME = "index.html"
PLOTS_NAME = "plots"
_CAPTION = (
    "n problems; second line: 95 % interval over problems (bootstrap; Wilson's where all are alike)"
)


def write_summary(
    out: Path,
    *,
    title: str,
    settings: Mapping[str, Any],
    facts: Mapping[str, Any],
    summaries: Sequence[Summary],
) -> None:
    """Write the figures into the folder.

    Args:
        out: the evaluation's folder.
        title: what was evaluated.
        settings: how.
        facts: what was left out or could not be read.
        summaries: by source.
    """
    record = {
        "model": title,
        "settings": dict(settings),
        **facts,
        "results": [asdict(summary) for summary in summaries],
    }
    (out / SUMMARY_NAME).write_text(
        json.dumps(record, indent=2, ensure_ascii=False) + "\n", encoding="utf-8"
    )


def write_report(
    out: Path,
    *,
    title: str,
    settings: Mapping[str, Any],
    summaries: Sequence[Summary],
    samples: Sequence[Sample],
    right_from: float = RIGHT_FROM,
    pictures: bool = True,
) -> None:
    """Write pictures and page into the folder.

    Args:
        out: the evaluation's folder.
        title: what was evaluated.
        settings: how; shown on the page.
        summaries: by source.
        samples: all of them.
        right_from: reward from which a sample is right.
        pictures: draw them; else the page is without.
    """
    plots = []
    if pictures:
        plots = draw(summaries, samples, out / PLOTS_NAME, right_from=right_from)
    write_page(
        out / PAGE_NAME,
        title=title,
        settings=settings,
        summaries=summaries,
        samples=samples,
        plots=plots,
        right_from=right_from,
    )


def results_table(summaries: Sequence[Summary]) -> Table:
    """The results by source, with 95 % intervals under them, for a terminal of 80 columns."""
    # All the k do not fit on a line; the page has them.
    most = max((k for summary in summaries for k in summary.pass_at_k), default=1)
    table = Table(
        box=SIMPLE_HEAD,
        header_style="bold",
        pad_edge=False,
        caption=_CAPTION + _repeats(summaries[-1].repeated_problems),
        caption_justify="left",
    )
    table.add_column("source", overflow="fold", min_width=10)
    names = ["n", "pass@1", *([f"pass@{most}"] if most > 1 else []), f"maj@{most}"]
    for name in (*names, "tokens", "cut", "errors"):
        table.add_column(name, justify="right", no_wrap=True, min_width=len(name))
    for s in summaries:
        if s.source == ALL:
            table.add_section()
        cells = [str(s.num_problems), _rate(s.pass_at_1)]
        cells += [_rate(s.pass_at_k.get(most))] if most > 1 else []
        cells += [_rate(s.maj_at_k), f"{s.mean_tokens:.0f}", f"{s.truncation_rate:.1%}"]
        # Text: a source's name may hold what rich would take for markup.
        table.add_row(Text(s.source), *cells, str(s.errors))
    return table


def _repeats(count: int) -> str:
    problems = "problem" if count == 1 else "problems"
    return f"; {ALL}: without {count} {problems} that an earlier source has" if count else ""


def _rate(interval: Interval | None) -> str:
    if interval is None:
        return "-"
    return f"{interval.mean:.1%}\n[dim]{100 * interval.low:.1f}-{100 * interval.high:.1f}[/dim]"
