"""Rates and intervals, by hand and by simulation."""

import math

import numpy as np
import pytest

from dynamo_megatron.evaluate.summary import bootstrap_mean, majority, summarise, tallies
from dynamo_megatron.types import FinishReason

from .builders import problem, sample


def test_failed_verifications_are_counted_and_are_in_no_rate():
    samples = [*problem("rwee", id="a"), *problem("rrrr", id="b"), *problem("eeee", id="c")]
    (summary,) = summarise(samples)
    assert summary.pass_at_1.mean == (1 / 2 + 1) / 2
    assert (summary.num_problems, summary.unverified_problems) == (2, 1)
    assert (summary.num_samples, summary.errors) == (12, 6)
    assert summary.format_rate == 1.0


def test_pass_at_k_is_unbiased_and_over_the_problems_with_k_verified_samples():
    samples = [*problem("rwww", id="a"), *problem("wwww", id="b"), *problem("rree", id="c")]
    (summary,) = summarise(samples)
    # 1 - C(3,2)/C(4,2) = 1/2; 0; 1 - C(0,2)/C(2,2) = 1.  The third has no 4 verified samples.
    assert summary.pass_at_k[2].mean == (1 / 2 + 0 + 1) / 3
    assert summary.pass_at_k[4].mean == (1 + 0) / 2
    assert list(summary.pass_at_k) == [2, 4]


@pytest.mark.parametrize(
    ("samples", "ks"), [(1, []), (2, [2]), (3, [2, 3]), (6, [2, 4, 6]), (8, [2, 4, 8])]
)
def test_k_are_the_powers_of_two_and_the_number_of_samples(samples, ks):
    (summary,) = summarise(problem("r" * samples, id="a"))
    assert list(summary.pass_at_k) == ks


def test_the_majority_is_right_wrong_or_tied():
    def votes(*answers):
        return [
            sample("right" if a == "R" else "wrong", k=k, extracted="2" if a == "R" else a)
            for k, a in enumerate(answers)
        ]

    assert majority(votes("R", "R", "3", "4")) == 1.0
    assert majority(votes("R", "3", "3", "4")) == 0.0
    assert majority(votes("R", "3", "R", " 3 ")) == 0.5  # white space makes no other answer
    assert majority(votes("R", "3", "4")) == pytest.approx(1 / 3)
    assert majority(votes("R", "", "", "")) == 1.0  # what gives no answer does not vote
    assert majority(votes("3", "4")) == 0.0
    unverified = [sample("error", k=k, extracted="3") for k in (5, 6)]
    assert majority([*votes("R"), *unverified]) == 1.0


def test_right_answers_are_one_answer_however_they_are_written():
    samples = [sample(extracted=text, k=k) for k, text in enumerate(("1/2", "0.5"))]
    wrong = [sample("wrong", extracted="3", k=k) for k in (2, 3)]
    assert majority([*samples, *wrong]) == 0.5
    assert majority([*samples, *wrong[:1]]) == 1.0


def test_wrong_answers_are_one_answer_however_they_are_written():
    wrong = [
        sample("wrong", extracted=text, k=k)
        for k, text in enumerate(("1/2", "0.50", r"$\dfrac{1}{2}$"))
    ]
    right = [sample(k=k) for k in (3, 4)]
    # Told apart as text, two right ones would outvote three equal wrong ones.
    assert majority([*right, *wrong]) == 0.0
    assert majority([*right, *wrong[:2]]) == 0.5


def test_without_extracted_answers_there_is_no_vote():
    samples = [sample("right", extracted=""), sample("wrong", extracted="", k=1)]
    assert majority(samples) is None
    assert summarise(samples)[0].maj_at_k is None


def test_a_problem_without_an_answer_is_not_solved_by_vote():
    silent = [sample("wrong", id="b", extracted="")]
    (summary,) = summarise([*problem("r", id="a"), *silent])
    assert summary.maj_at_k.mean == 0.5


def test_sources_come_in_order_and_all_of_them_last():
    samples = [*problem("rr", id="a", source="x"), *problem("ww", id="b", source="y")]
    summaries = summarise(samples)
    assert [s.source for s in summaries] == ["x", "y", "all"]
    assert [s.pass_at_1.mean for s in summaries] == [1.0, 0.0, 0.5]


def test_over_all_sources_a_problem_counts_once_in_the_first_that_has_it():
    x = [*problem("rr", id="a", source="x"), *problem("ww", id="b", source="x")]
    again = [sample("right", id="c", source="y", problem="Compute  1+1 (a)\n")]
    new = problem("rr", id="d", source="y")
    found = summarise([*x, *again, *new])
    assert [(s.num_problems, s.num_samples, s.repeated_problems) for s in found] == [
        (2, 4, 0),
        (2, 3, 0),
        (3, 6, 1),
    ]
    assert [s.pass_at_1.mean for s in found] == [0.5, 1.0, pytest.approx(2 / 3)]
    # Within a source each problem counts: its own row says so.
    twice = [sample(id=id, source=source) for id, source in (("a", "x"), ("b", "x"), ("c", "y"))]
    assert [s.num_problems for s in summarise(twice)] == [2, 1, 2]


def test_lengths_and_truncation_count_every_response():
    samples = [
        sample("right", num_tokens=2),
        sample("error", k=1, num_tokens=6, finish_reason=FinishReason.LENGTH),
        sample("wrong", k=2, num_tokens=1),
        sample("wrong", k=3, num_tokens=3),
    ]
    (summary,) = summarise(samples)
    assert (summary.mean_tokens, summary.truncation_rate) == (3.0, 0.25)


def test_nothing_verified_has_no_rate_instead_of_zero():
    (summary,) = summarise(problem("ee", id="a"))
    assert (summary.pass_at_1, summary.pass_at_k, summary.maj_at_k) == (None, {}, None)
    assert summary.errors == 2


def test_the_threshold_decides_what_is_right():
    samples = [sample(reward=0.4), sample(k=1, reward=0.9)]
    assert [t.right for t in tallies(samples, right_from=0.3)] == [2]
    assert [t.right for t in tallies(samples, right_from=0.95)] == [0]


def test_the_bootstrap_interval_is_that_of_the_mean():
    values = [0.0] * 120 + [1.0] * 280
    interval = bootstrap_mean(values, seed=1)
    half = 1.96 * math.sqrt(0.7 * 0.3 / 400)
    assert interval.mean == 0.7
    assert interval.low == pytest.approx(0.7 - half, abs=0.005)
    assert interval.high == pytest.approx(0.7 + half, abs=0.005)


def test_the_bootstrap_covers_the_truth_about_as_often_as_it_says():
    generator = np.random.default_rng(0)
    hits = 0
    for trial in range(200):
        values = generator.beta(0.5, 0.5, size=80).tolist()  # most problems easy or hopeless
        interval = bootstrap_mean(values, seed=trial, resamples=500)
        hits += interval.low <= 0.5 <= interval.high
    assert 0.88 <= hits / 200 <= 0.99


def test_equal_seeds_give_equal_intervals_in_any_chunks(monkeypatch):
    values = [float(i % 3 == 0) for i in range(50)]
    first = bootstrap_mean(values, seed=3)
    assert first == bootstrap_mean(values, seed=3)
    assert first != bootstrap_mean(values, seed=4)
    monkeypatch.setattr("dynamo_megatron.evaluate.summary._CHUNK", 100)
    assert bootstrap_mean(values, seed=3) == first


def test_where_all_problems_agree_the_interval_still_has_its_width():
    nothing = bootstrap_mean([0.0] * 20, seed=0)
    # Wilson: z^2 / (n + z^2) = 3.8415 / 23.8415
    assert (nothing.mean, nothing.low) == (0.0, 0.0)
    assert nothing.high == pytest.approx(0.16113, abs=1e-5)
    everything = bootstrap_mean([1.0] * 20, seed=0)
    assert (everything.mean, everything.high) == (1.0, 1.0)
    assert everything.low == pytest.approx(1 - 0.16113, abs=1e-5)
    assert bootstrap_mean([], seed=0) is None
