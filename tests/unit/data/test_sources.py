"""All sources together: ids, names, counts and duplicates."""

import hashlib
import json

import pytest

from dynamo_megatron.config import ArithmeticSource, FileSource
from dynamo_megatron.data.arithmetic import arithmetic_problems
from dynamo_megatron.data.problems import DataError, Problem
from dynamo_megatron.data.sources import load_problems


def file_source(path, records, **options) -> FileSource:
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps({"problem": p, "answer": a}) + "\n" for p, a in records))
    return FileSource(kind="jsonl", path=str(path), **options)


def test_a_prompt_id_is_the_hash_of_text_answer_and_source():
    problem = Problem(text="Compute 1+1", answer="2", source="s")
    content = b'["Compute 1+1", "2", "s"]'
    assert problem.id == hashlib.sha256(content).hexdigest()[:20]
    # Pinned: history and seeds of old checkpoints are keyed by it.
    assert problem.id == "4db1ace7743daafb7f20"


def test_ids_tell_any_two_different_problems_apart():
    triples = [
        ("a", "b", "c"),
        ("ab", "", "c"),
        ("a", "bc", ""),
        ("a", 'b", "c', ""),
        ("b", "a", "c"),
    ]
    assert len({Problem(text=t, answer=a, source=s).id for t, a, s in triples}) == len(triples)


def test_sources_are_read_in_order_and_counted_by_name(tmp_path):
    first = file_source(tmp_path / "first.jsonl", [("a", "1"), ("b", "2")])
    second = ArithmeticSource(kind="arithmetic", num_problems=3, split="heldout", seed=5)
    third = file_source(tmp_path / "third.jsonl", [("a", "1")], name="named")
    loaded = load_problems([first, second, third])
    generated = arithmetic_problems(3, seed=5, split="heldout")
    assert [(p.text, p.answer, p.source) for p in loaded.problems] == [
        ("a", "1", "first"),
        ("b", "2", "first"),
        *[(g.problem, g.answer, "arithmetic") for g in generated],
        ("a", "1", "named"),
    ]
    assert loaded.counts == {"first": 2, "arithmetic": 3, "named": 1}
    assert (loaded.duplicates, loaded.contradictions) == (0, 0)


def test_a_repeated_problem_of_a_source_is_kept_once_and_counted(tmp_path):
    source = file_source(tmp_path / "s.jsonl", [("a", "1"), ("b", "2"), ("a", " 1"), ("a", "1")])
    loaded = load_problems([source])
    assert [p.text for p in loaded.problems] == ["a", "b"]
    assert loaded.counts == {"s": 2}
    assert loaded.duplicates == 2


def test_sources_with_the_same_given_name_are_one(tmp_path):
    parts = [
        file_source(tmp_path / name, records, name="all")
        for name, records in [("x.jsonl", [("a", "1"), ("b", "2")]), ("y.jsonl", [("b", "2")])]
    ]
    loaded = load_problems(parts)
    assert loaded.counts == {"all": 2}
    assert loaded.duplicates == 1


def test_two_files_may_not_fall_back_on_one_name(tmp_path):
    parts = [
        file_source(tmp_path / folder / "train.jsonl", [("a", "1")]) for folder in ("one", "two")
    ]
    with pytest.raises(DataError, match="'train'"):
        load_problems(parts)
    with pytest.raises(DataError, match="'arithmetic'"):
        load_problems(
            [
                file_source(tmp_path / "arithmetic.jsonl", [("a", "1")]),
                ArithmeticSource(kind="arithmetic", num_problems=1, split="train"),
            ]
        )


def test_one_problem_with_two_answers_is_reported(tmp_path, caplog):
    source = file_source(tmp_path / "s.jsonl", [("a", "1"), ("a", "2"), ("b", "1")])
    loaded = load_problems([source])
    assert (len(loaded.problems), loaded.duplicates, loaded.contradictions) == (3, 0, 1)
    assert "1 problem(s) come with more than one reference answer, such as 'a'" in caplog.text


def test_ids_do_not_depend_on_place_or_company(tmp_path):
    forward = load_problems([file_source(tmp_path / "s.jsonl", [("a", "1"), ("b", "2")])])
    backward = load_problems(
        [file_source(tmp_path / "s.jsonl", [("b", "2"), ("c", "3"), ("a", "1")])]
    )
    ids = {p.text: p.id for p in backward.problems}
    assert [p.id for p in forward.problems] == [ids["a"], ids["b"]]
