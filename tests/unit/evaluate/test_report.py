"""What is left for people to look at."""

import json
from io import StringIO

import pytest
from rich.console import Console

from dynamo_megatron.evaluate.plots import draw
from dynamo_megatron.evaluate.report import results_table, write_report, write_summary
from dynamo_megatron.evaluate.summary import summarise

from .builders import problem, sample


def table(summaries, width=80) -> str:
    console = Console(width=width, record=True, file=StringIO())
    console.print(results_table(summaries))
    return console.export_text()


def test_the_table_fits_a_terminal_and_takes_names_as_text():
    samples = [
        *problem("rrww", id="a", source="[red]aime[/red]"),
        *problem("rwwe", id="b", source="b"),
    ]
    text = table(summarise(samples))
    assert "[red]aime" in text
    assert max(len(line) for line in text.splitlines()) <= 80
    for cell in ("50.0%", "33.3%", "41.7%", "pass@4", "maj@4", "errors"):
        assert cell in text
    assert "\u2026" not in text  # nothing was cut


def test_the_caption_names_both_intervals_and_what_the_last_row_leaves_out():
    alike = " ".join(table(summarise(problem("r", id="a"))).split())
    assert "95 % interval over problems (bootstrap; Wilson's where all are alike)" in alike
    assert "earlier source" not in alike
    twice = [sample(id="a", source="x"), sample(id="b", source="y")]
    shown = " ".join(table(summarise(twice)).split())
    assert "all: without 1 problem that an earlier source has" in shown


def test_the_summary_file_holds_every_figure(tmp_path):
    samples = problem("rw", id="a")
    summaries = summarise(samples)
    settings = {"seed": 0}
    facts = {"duplicates_removed": 3}
    write_summary(tmp_path, title="m", settings=settings, facts=facts, summaries=summaries)
    write_report(tmp_path, title="m", settings=settings, summaries=summaries, samples=samples)
    record = json.loads((tmp_path / "summary.json").read_text())
    assert record["duplicates_removed"] == 3
    (result,) = record["results"]
    # One problem is one trial. Wilson: 1/2 -+ z / (2 sqrt(1 + z^2)).
    assert result["pass_at_1"] == pytest.approx(
        {"mean": 0.5, "low": 0.0546, "high": 0.9454}, abs=1e-4
    )
    assert result["pass_at_k"]["2"]["mean"] == 1.0
    assert {p.name for p in tmp_path.rglob("*") if p.is_file()} == {
        "summary.json",
        "index.html",
        "accuracy.png",
        "pass_at_k.png",
        "lengths.png",
    }


def test_page_and_pictures_take_right_and_wrong_from_the_given_reward(tmp_path):
    # With 0.5 the reward of a right sample, no sample has it; from 0.5 up it is right.
    samples = [sample("right", reward=0.4), sample("wrong", k=1, reward=0.1)]
    options = {"title": "m", "settings": {}, "samples": samples}
    for number, right_from in enumerate((0.5, 0.3)):
        out = tmp_path / str(number)
        out.mkdir()
        summaries = summarise(samples, right_from=right_from)
        write_report(out, summaries=summaries, right_from=right_from, pictures=False, **options)
    strict, lenient = ((tmp_path / n / "index.html").read_text() for n in "01")
    assert strict.count('"outcome": "wrong"') == 2
    assert lenient.count('"outcome": "right"') == 1 == lenient.count('"outcome": "wrong"')
    assert not (tmp_path / "0" / "plots").exists() and "<img" not in strict


def test_pictures_are_drawn_of_whatever_there_is(tmp_path):
    for number, samples in enumerate(
        [
            problem("e", id="a"),
            problem("r", id="a", source="a $ and _ and a name that is far too long for an axis"),
            [*problem("rr", id="a", source="x"), *problem("eee", id="b", source="y")],
        ]
    ):
        written = draw(summarise(samples), samples, tmp_path / str(number))
        assert all(path.read_bytes().startswith(b"\x89PNG") for path in written)
