"""The figures of an evaluation during a run, by hand."""

import json
from dataclasses import asdict

import pytest

from dynamo_megatron.evaluate.heldout import HeldoutResult, heldout_result
from dynamo_megatron.evaluate.summary import summarise

from .builders import problem, sample


def result(samples, **options) -> HeldoutResult:
    return heldout_result(summarise(samples), step=7, samples=options.pop("k", 2))


TWO_SOURCES = [
    *problem("rw", id="a", source="x"),
    *problem("rr", id="b", source="x"),
    *problem("ww", id="c", source="y"),
]


def test_metrics_by_hand():
    metrics = result(TWO_SOURCES).metrics()
    # shares of right samples 1/2, 1, 0; one of two right: 1, 1, 0
    assert metrics["eval/pass@1"] == pytest.approx(0.5)
    assert metrics["eval/pass@2"] == pytest.approx(2 / 3)
    # a ties between "2" and "3": half; b is right, c wrong
    assert metrics["eval/maj@2"] == pytest.approx(0.5)
    assert metrics["eval/x/pass@1"] == pytest.approx(0.75)
    assert metrics["eval/y/pass@1"] == 0.0
    assert metrics["eval/length_mean"] == 4.0
    assert metrics["eval/truncated_rate"] == 0.0
    assert metrics["eval/num"] == 3.0 and metrics["eval/failures"] == 0.0
    for name in ("pass@1", "pass@2", "maj@2", "x/pass@1", "y/pass@1"):
        low, high = metrics[f"eval/{name}_low"], metrics[f"eval/{name}_high"]
        assert 0.0 <= low <= metrics[f"eval/{name}"] <= high <= 1.0
    words = result(TWO_SOURCES).details()
    assert [word.split(" (")[0] for word in words] == [
        "pass@2 66.7 %",
        "maj@2 50.0 %",
        "x 75.0 %",
        "y 0.0 %",
    ]


def test_one_sample_of_each_problem_has_no_k():
    metrics = result([*problem("r", id="a"), *problem("w", id="b")], k=1).metrics()
    assert not [name for name in metrics if "maj@" in name or "pass@2" in name]
    assert metrics["eval/pass@1"] == 0.5 == metrics["eval/s/pass@1"]
    # One source is all of them: nothing is said twice.
    assert result(problem("rw", id="a"), k=1).details()[0].startswith("pass@2")
    assert result(problem("r", id="a"), k=1).details() == []


def test_failed_verifications_are_in_no_rate_but_in_the_lengths():
    samples = [
        *problem("re", id="a"),
        sample("error", id="b", num_tokens=19),
        *problem("ww", id="c"),
    ]
    metrics = result(samples).metrics()
    assert metrics["eval/pass@1"] == 0.5  # a: 1 of 1, c: 0 of 2; b was not verified
    assert metrics["eval/pass@2"] == 0.0  # c alone has two verified samples
    assert metrics["eval/num"] == 2.0 and metrics["eval/failures"] == 2.0
    assert metrics["eval/length_mean"] == (4 * 4 + 19) / 5


def test_failures_count_at_a_problem_that_an_earlier_source_has_too():
    same = [sample(o, id=o, source=o, problem="Compute 1+1") for o in ("right", "error")]
    metrics = result([*same, *problem("w", id="b", source="right")]).metrics()
    assert metrics["eval/num"] == 2.0 and metrics["eval/failures"] == 1.0


def test_without_a_verified_sample_nothing_is_claimed():
    found = result(problem("ee", id="a"))
    assert (found.num_problems, found.pass_at_1, found.low, found.high) == (0, 0.0, 0.0, 1.0)
    assert found.details() == [] and "eval/pass@2" not in found.metrics()


def test_a_result_survives_json_exactly_and_older_ones_without_figures_are_read():
    found = result(TWO_SOURCES)
    assert HeldoutResult(**json.loads(json.dumps(asdict(found)))) == found
    before = {name: value for name, value in asdict(found).items() if name != "figures"}
    old = HeldoutResult(**before)
    assert old.pass_at_1 == found.pass_at_1 and old.details() == []
    assert "eval/pass@1" in old.metrics()
