"""``dynamo-megatron compare FIRST SECOND``."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table

    from dynamo_megatron.evaluate.compare import Comparison, Pair, Pairing

USAGE_ERROR = 2

_ABOUT = """\
Compare two evaluations of the same problems: by how much the second model is better, with a 95 %
interval of the difference problem by problem, and the problems that changed most.
"""
_EXAMPLES = """\
examples:
  a model before and after training:
    dynamo-megatron compare evaluations/Qwen3-0.6B evaluations/step_000200
  a run's first and last held-out evaluation:
    dynamo-megatron compare runs/mine/evaluations/step_000000 runs/mine/evaluations/step_000200

All of samples.jsonl is compared. An evaluation that was repeated into its folder with fewer
--samples, --data or --limit keeps the samples of before there: its summary.json is over fewer.
A problem that several sources hold counts once over all of them, in the first.
"""
_PROBLEM_LENGTH = 60


def main(argv: Sequence[str] | None = None) -> int:
    """Compare from the command line.

    Returns:
        0, or 2 when the folders hold nothing that can be compared.
    """
    arguments = _parse(argv)
    # torch takes seconds to import; a typo is answered before that.
    from dynamo_megatron.evaluate.compare import (
        compare,
        differing_settings,
        match,
        most_changed,
        read_evaluation,
    )

    try:
        first, second = (read_evaluation(path) for path in (arguments.first, arguments.second))
        pairing = match(first, second)
        comparisons = compare(pairing.pairs)
        if arguments.json is not None:
            _write(arguments.json, pairing, comparisons)
    except (ValueError, OSError) as error:
        sys.stderr.write(f"dynamo-megatron compare: {error}\n")
        return USAGE_ERROR
    for line in differing_settings(first, second):
        sys.stderr.write(f"warning: not only the models differ. {line}\n")
    _print(pairing, comparisons, most_changed(pairing.pairs, arguments.changed))
    return 0


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="dynamo-megatron compare",
        description=_ABOUT,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("first", type=Path, metavar="FIRST", help="folder of an evaluation")
    add("second", type=Path, metavar="SECOND", help="folder of another, of the same problems")
    add("--changed", type=int, default=5, metavar="N", help="problems to show (5)")
    add("--json", type=Path, metavar="FILE", help="write all figures and problems there")
    arguments = parser.parse_args(argv)
    if arguments.changed < 0:
        parser.error(f"--changed {arguments.changed} is negative")
    return arguments


def _print(pairing: Pairing, comparisons: Sequence[Comparison], changed: Sequence[Pair]) -> None:
    from rich.console import Console
    from rich.text import Text

    console = Console()
    console.print(comparison_table(comparisons))
    for count, what in (
        (pairing.only_first, "only in the first"),
        (pairing.only_second, "only in the second"),
        (pairing.unverified, "without a verified sample in one of them"),
    ):
        if count:
            console.print(f"left out: {count} problems {what}")
    for pair in changed:
        problem = " ".join(pair.problem.split())
        short = problem if len(problem) <= _PROBLEM_LENGTH else problem[:_PROBLEM_LENGTH] + "..."
        # Text: a problem may hold what rich would take for markup.
        console.print(Text(f"{pair.before:4.0%} -> {pair.after:4.0%}  {short}"))


def comparison_table(comparisons: Sequence[Comparison]) -> Table:
    """The comparisons by source, for a terminal of 80 columns."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    table = Table(
        box=SIMPLE_HEAD,
        header_style="bold",
        pad_edge=False,
        caption="pass@1 over the n problems of both; interval: 95 %, of the paired differences",
        caption_justify="left",
    )
    table.add_column("source", overflow="fold", min_width=10)
    for name in ("n", "first", "second", "gain", "interval", "better", "worse"):
        table.add_column(name, justify="right", no_wrap=True, min_width=len(name))
    for c in comparisons:
        interval = "-"
        if c.gain is not None:
            interval = f"{100 * c.gain.low:+.1f} to {100 * c.gain.high:+.1f}"
        rates = f"{c.before:.1%}", f"{c.after:.1%}", f"{100 * (c.after - c.before):+.1f}"
        table.add_row(
            Text(c.source), str(c.num_problems), *rates, interval, str(c.better), str(c.worse)
        )
    return table


def _write(path: Path, pairing: Pairing, comparisons: Sequence[Comparison]) -> None:
    record = {
        "comparisons": [asdict(comparison) for comparison in comparisons],
        "only_first": pairing.only_first,
        "only_second": pairing.only_second,
        "unverified": pairing.unverified,
        "problems": [asdict(pair) for pair in pairing.pairs],
    }
    path.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
