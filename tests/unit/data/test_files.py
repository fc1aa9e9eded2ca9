"""Every fault of a problem file is an error that says where; everything else is read as meant."""

import json

import pytest

from dynamo_megatron.data.files import Record, read_problem_file
from dynamo_megatron.data.problems import DataError


def write(tmp_path, content: str | bytes, kind: str):
    path = tmp_path / f"problems.{kind}"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def read(tmp_path, content: str | bytes, kind: str = "jsonl", **options):
    return list(read_problem_file(write(tmp_path, content, kind), kind=kind, **options))


def test_json_lines_are_read_in_order(tmp_path):
    content = '{"problem": "a", "answer": "1"}\n\n{"problem": " b\\n", "answer": " 2 ", "x": []}\n'
    assert read(tmp_path, content) == [Record("a", "1"), Record(" b\n", "2")]


def test_the_last_line_needs_no_end(tmp_path):
    assert read(tmp_path, '{"problem": "a", "answer": "1"}') == [Record("a", "1")]


def test_a_json_list_is_read_in_order(tmp_path):
    content = '[{"problem": "a", "answer": "1"},\n {"problem": "b", "answer": "2"}]'
    assert read(tmp_path, content, "json") == [Record("a", "1"), Record("b", "2")]


@pytest.mark.parametrize("kind", ["json", "jsonl"])
def test_a_byte_order_mark_and_any_alphabet_are_read(tmp_path, kind):
    text = '{"problem": "\u00e9\u4e2d\U0001f600\u2028", "answer": "\u03c0"}'
    content = f"\ufeff[{text}]" if kind == "json" else f"\ufeff{text}\n{text}\n"
    assert set(read(tmp_path, content, kind)) == {Record("\u00e9\u4e2d\U0001f600\u2028", "\u03c0")}


def test_other_keys_can_be_named(tmp_path):
    content = '{"question": "a", "solution": "1", "answer": null}\n'
    records = read(tmp_path, content, problem_key="question", answer_key="solution")
    assert records == [Record("a", "1")]


@pytest.mark.parametrize(("limit", "count"), [(1, 1), (2, 2), (5, 3), (None, 3)])
@pytest.mark.parametrize("kind", ["json", "jsonl"])
def test_a_limit_takes_the_first_problems(tmp_path, kind, limit, count):
    items = [json.dumps({"problem": f"p{k}", "answer": k}) for k in range(3)]
    content = f"[{','.join(items)}]" if kind == "json" else "\n".join(items)
    assert read(tmp_path, content, kind, limit=limit) == [
        Record(f"p{k}", str(k)) for k in range(count)
    ]


def test_lines_after_the_limit_are_not_looked_at(tmp_path):
    assert read(tmp_path, '{"problem": "a", "answer": 1}\n{broken', limit=1) == [Record("a", "1")]


@pytest.mark.parametrize(
    ("number", "text"),
    [
        ("142", "142"),
        ("142.0", "142"),
        ("-142.0", "-142"),
        ("-0.0", "0"),
        ("0", "0"),
        ("1e3", "1000"),
        ("1.5e1", "15"),
        ("0.5", "0.5"),
        ("0.1", "0.1"),
        ("3.1400", "3.1400"),
        ("2.5e-3", "0.0025"),
        ("12345678901234567890123", "12345678901234567890123"),
        ("12345678901234567890123.0", "12345678901234567890123"),
        ("9007199254740993.0", "9007199254740993"),  # 2^53 + 1: a float would lose the 1
    ],
)
def test_a_numeric_answer_becomes_its_plain_text(tmp_path, number, text):
    assert read(tmp_path, f'{{"problem": "a", "answer": {number}}}') == [Record("a", text)]


@pytest.mark.parametrize(
    ("record", "words"),
    [
        ('{"problem": "a"}', ["no 'answer'", "['problem']", "answer_key"]),
        ('{"answer": 1, "text": "a"}', ["no 'problem'", "['answer', 'text']"]),
        ("{}", ["no 'problem'", "[]"]),
        ('{"problem": "a", "answer": null}', ["'answer' is null"]),
        ('{"problem": "a", "answer": ""}', ["'answer' is empty"]),
        ('{"problem": "a", "answer": " \\n"}', ["'answer' is empty"]),
        ('{"problem": "a", "answer": ["1"]}', ["'answer' is a list"]),
        ('{"problem": "a", "answer": {"x": 1}}', ["'answer' is an object"]),
        ('{"problem": "a", "answer": true}', ["'answer' is a boolean"]),
        ('{"problem": "a", "answer": 1e999999999}', ["'answer' is 1E+999999999, too far"]),
        ('{"problem": "a", "answer": NaN}', ["NaN is not a JSON number"]),
        ('{"problem": "a", "answer": -Infinity}', ["-Infinity is not a JSON number"]),
        ('{"problem": 3, "answer": 1}', ["'problem' is a number", "must be a string"]),
        ('{"problem": null, "answer": 1}', ["'problem' is null"]),
        ('{"problem": ["a"], "answer": 1}', ["'problem' is a list"]),
        ('{"problem": " ", "answer": 1}', ["'problem' is empty"]),
        ('{"problem": "a\\ud800", "answer": 1}', ["'problem'", "surrogate", "character 1"]),
        ('{"problem": "a", "answer": "\\udc00"}', ["'answer'", "surrogate"]),
        ('"a"', ["is a string, not an object"]),
        ("null", ["is null, not an object"]),
    ],
)
@pytest.mark.parametrize("kind", ["json", "jsonl"])
def test_an_unusable_record_is_named_with_its_place(tmp_path, kind, record, words):
    good = '{"problem": "a", "answer": 1}'
    content = f"[{good}, {record}]" if kind == "json" else f"{good}\n{record}\n"
    with pytest.raises(DataError) as caught:
        read(tmp_path, content, kind)
    message = str(caught.value)
    place = {"json": ", item 2", "jsonl": ", line 2"}[kind]
    constant = "is not a JSON number" in words[0]  # found by the parser, which reads a list whole
    assert f"problems.{kind}" in message
    assert place in message or (constant and kind == "json")
    assert [word for word in words if word not in message] == []


@pytest.mark.parametrize(
    ("content", "kind", "words"),
    [
        ("", "jsonl", ["holds no problem"]),
        ("\n \n", "jsonl", ["holds no problem"]),
        ("", "json", ["holds no problem"]),
        ("[]", "json", ["holds no problem"]),
        ('{"problem": "a", "answer": 1}\n{"problem": "b", "ans', "jsonl", ["line 2", "truncated"]),
        ('{"problem": "a", "answer": 1}\n{"problem": "b",}\n', "jsonl", ["line 2", "not JSON"]),
        ('[{"problem": "a", "answer": 1}, {"pro', "json", ["not one JSON value", "copy the file"]),
        ('{"problem": "a", "answer": 1}\n{"problem": "a"}', "json", ["it is of kind jsonl"]),
        ('{"problem": "a", "answer": 1}', "json", ["an object, not a list", "of kind jsonl"]),
        ('[{"problem": "a", "answer": 1}]', "jsonl", ["line 1 is a list", "of kind json"]),
        (b'{"problem": "a", "answer": 1}\n{"problem": "\xe9"}', "jsonl", ["line 2", "0xe9"]),
        (b'{"problem": "a\xc3', "jsonl", ["line 1", "not UTF-8"]),
        (b'["\xff"]', "json", ["not UTF-8", "byte 2 is 0xff"]),
        ('{"problem": "a", "answer": 1}'.encode("utf-16"), "jsonl", ["not UTF-8"]),
        (b"\x1f\x8b\x08\x00", "jsonl", ["not UTF-8"]),
        ('{"problem": "a", "answer": ' + "9" * 5000 + "}", "jsonl", ["line 1 is not JSON"]),
        ("[" * 100_000, "json", ["not one JSON value"]),
    ],
)
def test_an_unusable_file_is_named(tmp_path, content, kind, words):
    with pytest.raises(DataError) as caught:
        read(tmp_path, content, kind)
    message = str(caught.value)
    assert [word for word in [f"problems.{kind}", *words] if word not in message] == []


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(DataError, match=r"nowhere\.json does not exist"):
        list(read_problem_file(tmp_path / "nowhere.json", kind="json"))
    with pytest.raises(DataError, match="does not exist"):
        list(read_problem_file(tmp_path, kind="json"))
