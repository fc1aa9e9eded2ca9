"""What a user gets wrong is refused: where it stands, what is wrong, what may be meant."""

import re
from pathlib import Path

import pytest

from dynamo_megatron.load_config import load_config
from tests.unit.load_config.conftest import GOOD, error_of, problems_of

BOMB = "a0: &a0 [1, 1, 1, 1, 1, 1, 1, 1, 1]\n" + "".join(
    f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 9)
)


def test_a_missing_file_is_named_with_the_file_that_may_be_meant(good: Path):
    message = error_of(good.parent / "godo.yaml")
    assert f"no configuration file {good.parent / 'godo.yaml'}" in message
    assert f"Did you mean {good}?" in message


def test_a_folder_and_a_binary_file_are_refused(tmp_path: Path):
    assert "cannot be read: Is a directory" in error_of(tmp_path)
    (tmp_path / "b.yaml").write_bytes(b"\xff\xfe\x00")
    assert "not UTF-8" in error_of(tmp_path / "b.yaml")


@pytest.mark.parametrize(
    ("text", "line"), [("run:\n  dir: [1\nmodel: x\n", 3), ("run: 1\n  dir: 2\n", 2)]
)
def test_bad_yaml_is_refused_with_its_line(good: Path, text: str, line: int):
    assert f"{good}, line {line} is not valid YAML" in error_of(good, text=text)


def test_a_key_that_stands_twice_is_refused_with_its_line(good: Path):
    message = error_of(good, text="run:\n  dir: a\n  num_steps: 1\n  dir: b\n")
    assert f"{good}, line 4" in message
    assert "the key dir stands twice" in message


def test_python_objects_in_yaml_are_refused(good: Path):
    assert "not valid YAML" in error_of(good, text="run: !!python/object/apply:os.getcwd []\n")


@pytest.mark.parametrize("text", ["- 1\n", "just words\n", "3\n"])
def test_a_file_that_is_no_mapping_is_refused(good: Path, text: str):
    assert "is not a mapping of sections" in error_of(good, text=text)


@pytest.mark.parametrize("text", ["a: &a\n  b: *a\n", BOMB], ids=["endless", "bomb"])
def test_aliases_that_unfold_without_end_are_refused(good: Path, text: str):
    assert "not valid YAML" in error_of(good, text=text)


def test_an_empty_file_lists_every_required_key(good: Path):
    problems = problems_of(good, text="# nothing yet\n")
    assert [p.partition(":")[0] for p in problems] == [
        "run.dir",
        "run.num_steps",
        "model.path",
        "data.train",
    ]
    assert all("required, but missing" in p for p in problems)


@pytest.mark.parametrize(
    ("key", "near"),
    [
        ("algorithm.modulation.aplha", "algorithm.modulation.alpha"),
        ("lr", "optimizer.lr"),
        ("algoritm", "algorithm"),
        ("optimzer.lr", "optimizer"),
        ("modulation", "algorithm.modulation"),
        ("cilp.low", "algorithm.clip.low"),
        ("tensor_parallel", "parallel.tensor"),
        ("data.train.0.num_problem", "data.train.0.num_problems"),
        ("data.train.1.pth", "data.train.1.path"),
    ],
)
def test_an_unknown_key_is_refused_with_the_nearest_known_one(good: Path, key: str, near: str):
    (problem,) = problems_of(good, f"{key}=1")
    assert "unknown key, did you mean" in problem
    assert near in re.split(r"[ ?]", problem)
    assert f"(override {key}=1)" in problem


def test_an_unknown_key_in_the_file_is_refused_with_its_line(good: Path):
    text = GOOD + "algorithm:\n  modulation:\n    aplha: 0.2\n"
    (problem,) = problems_of(good, text=text)
    place, _, words = problem.partition(": ")
    assert place == "algorithm.modulation.aplha (line 12)"
    assert words == "unknown key, did you mean algorithm.modulation.alpha?"


def test_an_unknown_key_like_no_other_lists_those_of_its_section(good: Path):
    (problem,) = problems_of(good, "algorithm.clip.zzzz=1")
    assert problem.endswith("unknown key; algorithm.clip has low, high, dual.")


def test_the_keys_of_an_unknown_section_are_looked_up_one_by_one(good: Path):
    (problem,) = problems_of(good, "sampling={max_tokens: 3}")
    assert problem.startswith("sampling.max_tokens")
    assert "rollout.max_tokens" in problem


def test_a_key_of_another_kind_of_source_says_so(good: Path):
    (problem,) = problems_of(good, "data.train.0.path=x")
    assert "data.train.0.path" in problem
    assert "exists for kind jsonl | json | parquet | arrow, not for kind arithmetic" in problem


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ('run.num_steps="3"', ["got '3' (text), wanted: integer >= 1.", "Remove the quotes."]),
        ("run.num_steps=3.0", ["got 3.0 (a number), wanted: integer >= 1. Write 3."]),
        ("run.num_steps=true", ["got true (true or false), wanted: integer >= 1."]),
        ("run.num_steps=0", ["got 0 (an integer), wanted: integer >= 1."]),
        ("run.num_steps=", ["got nothing (null), wanted: integer >= 1."]),
        ("run.dir=3", ["got 3 (an integer), wanted: text. Put it in quotes."]),
        ("optimizer.lr=abc", ["got 'abc' (text), wanted: number > 0."]),
        ("optimizer.lr=.nan", ["wanted: ", "number > 0"]),
        ("rollout.temperature=.inf", ["got inf (a number), wanted: finite number > 0."]),
        ("run.resume=nevr", ["wanted: never | always | if_present. Did you mean never?"]),
        ("model.recompute=1", ["got 1 (an integer), wanted: true or false."]),
        ('model.recompute="yes"', ["Write true or false, without quotes."]),
        (
            "data.train.0.kind=foo",
            [
                "got 'foo' (text), wanted: "
                "arithmetic | reasoning_gym | jsonl | json | parquet | arrow."
            ],
        ),
        ("data.train.0=5", ["got 5 (an integer), wanted: a section."]),
        ("data.train=[]", ["got [] (a list), wanted: list of sections at least 1 long."]),
        ("algorithm=4", ["got 4 (an integer), wanted: a section."]),
        ("algorithm.clip.dual=1", ["got 1 (an integer), wanted: number > 1 or null."]),
        ("evaluation=null", ["the section is empty."]),
    ],
)
def test_an_ill_typed_value_is_refused_with_key_value_and_type(
    good: Path, override: str, words: list[str]
):
    (problem,) = problems_of(good, override)
    key = override.partition("=")[0]
    key = "data.train.0" if key == "data.train.0.kind" else key
    assert problem.startswith(key)
    assert f"(override {override})" in problem
    for word in words:
        assert word in problem


def test_the_override_that_decided_is_the_one_named(good: Path):
    (problem,) = problems_of(good, "run.num_steps=a", "run={num_steps: b}", "run.num_steps=c")
    assert problem.startswith("run.num_steps (override run.num_steps=c): got 'c'")
    (problem,) = problems_of(good, "run.num_steps=c", "run={num_steps: b}")
    assert problem.startswith("run.num_steps (override run={num_steps: b}): got 'b'")


def test_a_source_without_kind_says_which_kinds_there_are(good: Path):
    (problem,) = problems_of(good, "data.train=[{name: x}]")
    assert problem.startswith("data.train.0.kind: required, but missing.")
    assert "(arithmetic | reasoning_gym | jsonl | json | parquet | arrow)" in problem


@pytest.mark.parametrize("override", ["run.dir", "=3", "--run.dir", " =3"])
def test_an_override_without_key_or_value_is_refused(good: Path, override: str):
    (problem,) = problems_of(good, override)
    assert "not of the form key=value" in problem


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("data.train=[1,", "is not valid YAML"),
        ("data.train.9.kind=json", "list index out of range"),
        ("data.train.x=3", "'x'"),
    ],
)
def test_an_override_that_cannot_be_merged_is_refused(good: Path, override: str, words: str):
    (problem,) = problems_of(good, override)
    assert f"override {override!r}" in problem
    assert words in problem


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("run.dir=${nope}", "Interpolation key 'nope' not found"),
        ("run.dir=${oc.env:DYNAMO_MEGATRON_UNSET}", "DYNAMO_MEGATRON_UNSET"),
        ("run.dir=???", "Set run.dir=..."),
    ],
)
def test_a_value_that_cannot_be_resolved_names_its_key(good: Path, override: str, words: str):
    (problem,) = problems_of(good, override)
    assert problem.startswith("run.dir: ")
    assert words in problem


def test_the_schema_s_own_messages_come_through_unchanged(good: Path):
    (problem,) = problems_of(good, "algorithm.allocation.n_low=20")
    assert problem.startswith(
        "algorithm.allocation needs n_low <= n_mean <= n_high, got 20, 16, 24"
    )
    assert "Value error" not in problem


def test_all_problems_are_listed_together(good: Path):
    problems = problems_of(good, "lr=1", "run.num_steps=0", "parallel.tensor=x", "run.resume=no")
    # YAML reads a bare no as false.
    assert len(problems) == 4
    assert "4 problems in the configuration" in error_of(
        good, "lr=1", "run.num_steps=0", "a=1", "b=1"
    )


@pytest.mark.parametrize("address", ["foo", "host:", "host:0", "host:70000", "ray://host:10001"])
def test_an_address_where_no_ray_head_can_be_is_refused_with_the_form_it_has(good, address):
    found = error_of(good, f'rollout.vllm.ray_address="{address}"')
    assert "rollout.vllm.ray_address" in found and "HOST:PORT" in found


@pytest.mark.parametrize("address", ["auto", "head-7.example:6379", "[fe80::1]:6379"])
def test_addresses_of_ray_heads_pass(good, address):
    load_config(good, [f'rollout.vllm.ray_address="{address}"'])


def test_a_decay_that_ends_within_the_warm_up_is_refused(good):
    found = error_of(good, "optimizer.warmup_updates=10", "optimizer.decay_updates=10")
    assert "the decay would end before the peak is reached" in found
    load_config(good, ["optimizer.warmup_updates=10", "optimizer.decay_updates=11"])
