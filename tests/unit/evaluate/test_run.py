"""An evaluation repeats, goes on where it stopped and never mixes two policies' samples."""

import json
from dataclasses import replace

import pytest

from dynamo_megatron.evaluate import run
from dynamo_megatron.evaluate.run import SAMPLES_NAME, SETTINGS_NAME, open_samples
from dynamo_megatron.evaluate.samples import SampleFile, SamplesError
from dynamo_megatron.evaluate.summary import summarise
from dynamo_megatron.types import VerdictStatus

from .conftest import SETTINGS


def evaluate(plan, engine, reward, out, settings):
    with open_samples(out, settings) as file:
        return run.evaluate(plan, engine, reward, file, settings)


def keys(samples):
    return [(sample.id, sample.k) for sample in samples]


def test_every_problem_gets_every_sample_in_order(plan, engine, reward, tmp_path):
    samples = evaluate(plan, engine, reward, tmp_path, SETTINGS)
    assert keys(samples) == [(prompt.id, k) for prompt in plan.prompts for k in range(3)]
    assert all(sample.status is VerdictStatus.OK for sample in samples)
    with SampleFile(tmp_path / SAMPLES_NAME) as file:
        assert sorted(keys(file.read())) == sorted(keys(samples))


def test_equal_seeds_repeat_and_others_do_not(plan, engine, reward, tmp_path):
    first = evaluate(plan, engine, reward, tmp_path / "1", SETTINGS)
    again = evaluate(replace(plan, batch=18), engine, reward, tmp_path / "2", SETTINGS)
    other = evaluate(replace(plan, seed=5), engine, reward, tmp_path / "3", SETTINGS)
    assert first == again
    assert summarise(first) == summarise(again)
    assert [s.response for s in first] != [s.response for s in other]
    assert keys(first) == keys(other)


def test_greedy_samples_do_not_depend_on_the_seed(plan, engine, reward, tmp_path):
    greedy = replace(plan, samples=1, temperature=None)
    first = evaluate(greedy, engine, reward, tmp_path / "1", SETTINGS)
    other = evaluate(replace(greedy, seed=9), engine, reward, tmp_path / "2", SETTINGS)
    assert [s.response for s in first] == [s.response for s in other]


def test_an_interrupted_evaluation_goes_on_where_it_stopped(plan, engine, reward, tmp_path):
    whole = evaluate(plan, engine, reward, tmp_path / "whole", SETTINGS)
    out = tmp_path / "cut"
    engine.asked, engine.stop_at = [], 2
    with pytest.raises(KeyboardInterrupt):
        evaluate(plan, engine, reward, out, SETTINGS)
    assert engine.asked == [6, 6]
    # As a kill in the middle of a write leaves it: two samples and a half of the second portion.
    lines = (out / SAMPLES_NAME).read_bytes().splitlines(keepends=True)
    (out / SAMPLES_NAME).write_bytes(b"".join(lines[:8]) + lines[8][:50])
    engine.asked, engine.stop_at = [], None
    assert evaluate(plan, engine, reward, out, SETTINGS) == whole
    assert engine.asked == [6, 6]  # the first two problems are whole
    assert len((out / SAMPLES_NAME).read_bytes().splitlines()) == len(whole)  # none twice
    engine.asked = []
    assert evaluate(plan, engine, reward, out, SETTINGS) == whole
    assert engine.asked == []


def test_samples_and_problems_may_grow(plan, engine, reward, tmp_path):
    small = replace(plan, prompts=plan.prompts[:2], samples=2)
    first = evaluate(small, engine, reward, tmp_path, SETTINGS)
    grown = evaluate(plan, engine, reward, tmp_path, SETTINGS)
    assert [s for s in grown if (s.id, s.k) in keys(first)] == first
    assert len(grown) == 18


def test_samples_of_other_settings_are_not_added_to(plan, engine, reward, tmp_path):
    evaluate(plan, engine, reward, tmp_path, SETTINGS)
    with pytest.raises(SamplesError, match=r"temperature was 1\.0, is 0\.6"):
        evaluate(plan, engine, reward, tmp_path, {**SETTINGS, "temperature": 0.6})
    (tmp_path / SETTINGS_NAME).unlink()
    with pytest.raises(SamplesError, match="what made them is not known"):
        evaluate(plan, engine, reward, tmp_path, SETTINGS)


def test_the_reward_from_which_a_sample_is_right_may_change(plan, engine, reward, tmp_path):
    whole = evaluate(plan, engine, reward, tmp_path, {**SETTINGS, "right_from": 0.5})
    engine.asked = []
    changed = {**SETTINGS, "right_from": 0.9}
    assert evaluate(plan, engine, reward, tmp_path, changed) == whole
    assert engine.asked == []
    assert json.loads((tmp_path / SETTINGS_NAME).read_text()) == changed


def test_settings_without_a_sample_bind_nobody(plan, engine, reward, tmp_path):
    engine.stop_at = 0
    with pytest.raises(KeyboardInterrupt):
        evaluate(plan, engine, reward, tmp_path, SETTINGS)
    assert [path.name for path in tmp_path.iterdir()] == [SETTINGS_NAME]
    engine.asked, engine.stop_at = [], None
    other = {**SETTINGS, "temperature": 0.6}
    assert len(evaluate(plan, engine, reward, tmp_path, other)) == 18
    assert json.loads((tmp_path / SETTINGS_NAME).read_text()) == other


def test_a_refused_folder_is_left_as_it_is(plan, engine, reward, tmp_path):
    evaluate(plan, engine, reward, tmp_path, SETTINGS)
    with (tmp_path / SAMPLES_NAME).open("ab") as file:
        file.write(b'{"id": "cut sho')
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(SamplesError), open_samples(tmp_path, {**SETTINGS, "model": "other"}):
        pass
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_labels_of_the_data_set_are_kept_with_the_samples(plan, engine, reward, tmp_path):
    name = {plan.prompts[0].id: "test/algebra/7"}
    samples = evaluate(replace(plan, labels=name), engine, reward, tmp_path, SETTINGS)
    assert [s.label for s in samples[:4]] == ["test/algebra/7"] * 3 + [""]
