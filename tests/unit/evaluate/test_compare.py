"""Two evaluations of the same problems."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from dynamo_megatron import cli
from dynamo_megatron.evaluate.compare import (
    Evaluation,
    compare,
    differing_settings,
    match,
    most_changed,
    read_evaluation,
)
from dynamo_megatron.evaluate.run import write_settings
from dynamo_megatron.evaluate.samples import SampleFile, SamplesError

from .builders import problem

SETTINGS = {"model": "a", "weights": "1", "temperature": 1.0, "max_tokens": 64, "verifier": "math"}


def evaluation(outcomes: dict[str, str], source="s", **settings) -> Evaluation:
    """Outcomes by problem, a letter a sample: r, w, e."""
    samples = [s for id, of in outcomes.items() for s in problem(of, id=id, source=source)]
    return Evaluation(samples=tuple(samples), settings=SETTINGS | settings)


def write(folder, outcomes: dict[str, str], **settings):
    folder.mkdir()
    of = evaluation(outcomes, **settings)
    with SampleFile(folder / "samples.jsonl") as file:
        file.append(of.samples)
    write_settings(folder, of.settings)
    return folder


def test_the_gain_is_the_mean_of_the_differences_with_their_own_spread():
    first = evaluation({"a": "rrww", "b": "wwww", "c": "rrrw"})
    second = evaluation({"c": "rrrw", "b": "rwww", "a": "rrrr"})
    (found,) = compare(match(first, second).pairs)
    # Differences .5, .25, 0: mean .25, standard deviation .25, 1.95996 * .25 / sqrt(3) = .28290.
    assert (found.num_problems, found.better, found.worse) == (3, 2, 0)
    assert (found.before, found.after) == pytest.approx((5 / 12, 2 / 3))
    assert found.gain is not None
    assert (found.gain.mean, found.gain.low, found.gain.high) == pytest.approx(
        (0.25, -0.03290, 0.53290), abs=1e-5
    )


def test_numbers_of_samples_may_differ_and_failed_verifications_count_for_neither():
    pairing = match(
        evaluation({"a": "rw", "b": "ee", "c": "r", "d": "re"}),
        evaluation({"a": "rrrw", "b": "rr", "d": "wwe", "e": "r"}),
    )
    assert [(p.id, p.before, p.after) for p in pairing.pairs] == [("a", 0.5, 0.75), ("d", 1, 0)]
    assert (pairing.only_first, pairing.only_second, pairing.unverified) == (1, 1, 1)
    assert [p.id for p in most_changed(pairing.pairs, 5)] == ["d", "a"]
    assert [p.id for p in most_changed(pairing.pairs, 1)] == ["d"]


def test_sources_are_compared_apart_and_together():
    first, second = evaluation({"a": "r", "b": "w"}), evaluation({"a": "w", "b": "r"})
    other = evaluation({"c": "w", "d": "w"}, source="t")
    both = [replace(e, samples=(*e.samples, *other.samples)) for e in (first, second)]
    found = compare(match(*both).pairs)
    assert [(c.source, c.num_problems, c.better, c.worse) for c in found] == [
        ("s", 2, 1, 1),
        ("t", 2, 0, 0),
        ("all", 4, 1, 1),
    ]


@pytest.mark.parametrize("outcomes", [{"a": "r"}, {"a": "r", "b": "w"}])
def test_problems_that_all_changed_alike_say_nothing_of_the_spread(outcomes):
    (found,) = compare(match(evaluation(outcomes), evaluation(outcomes)).pairs)
    assert found.gain is None and found.before == found.after


def test_a_reward_counts_as_right_from_where_its_evaluation_says():
    strict = evaluation({"a": "r"}, right_from=2.0)
    (pair,) = match(strict, evaluation({"a": "r"})).pairs
    assert (pair.before, pair.after) == (0.0, 1.0)
    assert differing_settings(strict, evaluation({"a": "r"})) == ["right_from: 2.0 and 0.5"]


def test_settings_beside_the_model_that_differ_are_named():
    first = evaluation({"a": "r"}, append="")
    second = evaluation({"a": "r"}, model="b", weights="2", temperature=None, top_p=1.0)
    assert differing_settings(first, second) == ["temperature: 1.0 and None"]


def test_tokenizer_and_template_are_the_models_and_another_verifier_is_named():
    first = evaluation({"a": "r"}, text_files="1", verifier_source="1", right_from=0.5)
    second = evaluation({"a": "r"}, text_files="2", verifier_source="2", right_from=0.5)
    assert differing_settings(first, second) == ["verifier_source: '1' and '2'"]


def test_over_all_sources_a_problem_is_compared_once():
    one = evaluation({"a": "r", "b": "w"})
    copy = tuple(replace(s, id=f"{s.id}'", source="t") for s in one.samples)
    both = replace(one, samples=(*one.samples, *copy))
    assert [(c.source, c.num_problems) for c in compare(match(both, both).pairs)] == [
        ("s", 2),
        ("t", 2),
        ("all", 2),
    ]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"problem": "Compute 2+2"}, r"its problem is 'Compute 1\+1 \(b\)' .* 'Compute 2\+2'"),
        ({"answer": "4"}, "its answer is '2' .* '4'"),
    ],
)
def test_one_id_for_two_problems_is_refused(change, words):
    first = evaluation({"a": "r", "b": "r"})
    second = replace(
        first, samples=tuple(replace(s, **change) if s.id == "b" else s for s in first.samples)
    )
    with pytest.raises(SamplesError, match=f"the id b stands for two problems: {words}"):
        match(first, second)


def test_two_evaluations_without_a_common_problem_are_refused():
    with pytest.raises(SamplesError, match="of 1 and 2 problems 0 are the same"):
        match(evaluation({"a": "r"}), evaluation({"b": "r", "c": "w"}))


def test_the_command_prints_the_comparison_and_writes_it(tmp_path, capsys):
    first = write(tmp_path / "first", {"a": "rw", "b": "ww", "c": "r"})
    second = write(tmp_path / "second", {"a": "rr", "b": "ww", "c": "r"}, max_tokens=32)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*.js*")}
    out = tmp_path / "compared.json"
    assert cli.main(["compare", str(first), str(second), "--json", str(out)]) == 0
    said = capsys.readouterr()
    assert "max_tokens: 64 and 32" in said.err
    for cell in ("50.0%", "66.7%", "+16.7", "-16.0 to +49.3", "50% -> 100%  Compute 1+1"):
        assert cell in said.out
    assert max(map(len, said.out.splitlines())) <= 80
    record = json.loads(out.read_text())
    assert record["comparisons"][0]["gain"]["mean"] == pytest.approx(1 / 6)
    assert [p["id"] for p in record["problems"]] == ["a", "b", "c"]
    assert {path: path.read_bytes() for path in before} == before


def test_an_evaluation_that_was_cut_off_is_read_to_its_last_whole_line(tmp_path):
    folder = write(tmp_path / "first", {"a": "rw"})
    with (folder / "samples.jsonl").open("ab") as file:
        file.write(b'{"id": "b"')
    size = (folder / "samples.jsonl").stat().st_size
    assert [s.k for s in read_evaluation(folder).samples] == [0, 1]
    assert (folder / "samples.jsonl").stat().st_size == size


@pytest.mark.parametrize(
    ("damage", "text"),
    [
        (lambda f: (f / "samples.jsonl").unlink(), "is no evaluation: it needs samples.jsonl"),
        (lambda f: (f / "settings.json").write_text("[1]"), "settings.json cannot be read"),
        (lambda f: write_settings(f, {"right_from": None}), "its right_from is None, not a number"),
        (lambda f: (f / "samples.jsonl").write_text('{"a": 1}\n'), "line 1 is no sample"),
        (lambda f: (f / "samples.jsonl").write_text(""), "holds no sample"),
    ],
)
def test_a_folder_that_holds_no_evaluation_is_refused(damage, text, tmp_path, capsys):
    first = write(tmp_path / "first", {"a": "rw"})
    second = write(tmp_path / "second", {"a": "rw"})
    damage(second)
    assert cli.main(["compare", str(first), str(second)]) == 2
    assert text in capsys.readouterr().err
