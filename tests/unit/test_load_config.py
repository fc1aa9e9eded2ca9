"""Reading a configuration: what a user gets right arrives exactly, what is wrong is explained."""

import os
import re
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from dynamo_megatron.config import Config
from dynamo_megatron.config_keys import config_keys, nearest_keys
from dynamo_megatron.load_config import (
    ConfigError,
    describe_config,
    load_config,
    to_yaml,
    write_resolved,
)

GOOD = """\
run:
  dir: runs/a
  num_steps: 3
model:
  path: builtin:tiny
data:
  train:
    - {kind: arithmetic, num_problems: 5, split: train}
    - {kind: jsonl, path: problems.jsonl}
"""


BOMB = "a0: &a0 [1, 1, 1, 1, 1, 1, 1, 1, 1]\n" + "".join(
    f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 9)
)


@pytest.fixture
def good(tmp_path: Path) -> Path:
    path = tmp_path / "good.yaml"
    path.write_text(GOOD)
    return path


def error_of(path: Path, *overrides: str, text: str | None = None) -> str:
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides)
    return str(caught.value)


def problems_of(path: Path, *overrides: str, text: str | None = None) -> list[str]:
    lines = error_of(path, *overrides, text=text).splitlines()
    return [line.removeprefix("  - ") for line in lines if line.startswith("  - ")]


# --- what is right -------------------------------------------------------------------------------


def test_values_of_the_file_arrive_and_the_rest_are_defaults(good: Path):
    config = load_config(good)
    assert config.run.dir == "runs/a"
    assert config.run.num_steps == 3
    assert config.data.train[0].kind == "arithmetic"
    assert config.data.train[1].path == "problems.jsonl"
    assert config.optimizer.lr == 1e-6


@pytest.mark.parametrize(
    ("written", "lr"), [("1e-6", 1e-6), ("1.0e-06", 1e-6), ("1E-3", 1e-3), ("1", 1.0), (".5", 0.5)]
)
def test_a_number_is_read_as_one_however_it_is_written(good: Path, written: str, lr: float):
    good.write_text(GOOD + f"optimizer:\n  lr: {written}\n")
    assert load_config(good).optimizer.lr == lr
    assert isinstance(load_config(good).optimizer.lr, float)
    good.write_text(GOOD)
    assert load_config(good, [f"optimizer.lr={written}"]).optimizer.lr == lr


def test_overrides_win_over_the_file_and_the_last_one_wins(good: Path):
    config = load_config(
        good,
        [
            "run.num_steps=7",
            "algorithm.modulation.alpha=0.1",
            "run.num_steps=8",
            "data.train.0.num_problems=9",
            "data.train[1].name=mine",
            "algorithm.clip.dual=null",
            "batch={micro_batch_tokens: 64}",
        ],
    )
    assert config.run.num_steps == 8
    assert config.algorithm.modulation.alpha == 0.1
    assert config.data.train[0].num_problems == 9
    assert config.data.train[1].name == "mine"
    assert config.algorithm.clip.dual is None
    assert config.batch.micro_batch_tokens == 64


def test_an_override_replaces_a_list_as_a_whole(good: Path):
    config = load_config(good, ["data.train=[{kind: json, path: b.json}]"])
    assert [source.kind for source in config.data.train] == ["json"]


def test_an_equals_sign_in_a_value_belongs_to_the_value(good: Path):
    assert load_config(good, ["run.dir=runs/lr=3"]).run.dir == "runs/lr=3"


def test_interpolations_are_resolved_after_the_overrides(good: Path, monkeypatch):
    monkeypatch.setenv("MODELS", "/models")
    good.write_text(
        GOOD.replace("builtin:tiny", "${oc.env:MODELS}/${run.seed}").replace(
            "runs/a", "r${run.seed}"
        )
    )
    config = load_config(good, ["run.seed=4"])
    assert config.model.path == "/models/4"
    assert config.run.dir == "r4"


# --- what is wrong -------------------------------------------------------------------------------


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


# --- there and back ------------------------------------------------------------------------------

TRICKY = [
    "1e-6",
    "null",
    "true",
    "${run.seed}",
    "\\${x}",
    "a\\\\${b}",
    "x: y",
    "- z",
    "0x1f",
    "'",
    "~",
]


@pytest.mark.parametrize("value", TRICKY)
def test_text_that_looks_like_something_else_survives_the_round_trip(good: Path, value: str):
    config = load_config(good)
    config = config.model_copy(update={"run": config.run.model_copy(update={"dir": value})})
    good.write_text(to_yaml(config))
    assert load_config(good) == config


text = st.text(
    st.characters(blacklist_categories=("Cs",)) | st.sampled_from("${}\\:#'\" -"), max_size=12
).filter(lambda value: value != "???")


@settings(max_examples=80, deadline=None)
@given(
    run_dir=text,
    lr=st.floats(min_value=1e-300, max_value=1e300),
    tensor=st.integers(1, 10**6),
    name=st.none() | text,
)
def test_any_config_survives_the_round_trip(tmp_path_factory, run_dir, lr, tensor, name):
    config = Config.model_validate(
        {
            "run": {"dir": run_dir, "num_steps": 1},
            "model": {"path": "builtin:tiny"},
            "data": {"train": [{"kind": "json", "path": run_dir, "name": name}]},
            "parallel": {"tensor": tensor},
            "optimizer": {"lr": lr},
        }
    )
    path = tmp_path_factory.mktemp("round") / "config.yaml"
    path.write_text(to_yaml(config), encoding="utf-8")
    assert load_config(path) == config


def test_write_resolved_leaves_one_readable_file_with_every_default(good: Path, tmp_path: Path):
    config = load_config(good, ["run.seed=3"])
    run_dir = tmp_path / "new" / "run"
    target = write_resolved(config, run_dir)
    assert os.listdir(run_dir) == ["config.yaml"]
    assert load_config(target) == config
    assert yaml.safe_load(target.read_text())["optimizer"]["weight_decay"] == 0.1
    write_resolved(load_config(good), run_dir)
    assert load_config(target).run.seed == 0


def test_write_resolved_keeps_the_old_file_when_writing_fails(
    good: Path, tmp_path: Path, monkeypatch
):
    target = write_resolved(load_config(good), tmp_path / "run")
    before = target.read_bytes()

    def full_disk(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full_disk)
    with pytest.raises(OSError, match="No space left"):
        write_resolved(load_config(good, ["run.seed=9"]), tmp_path / "run")
    assert target.read_bytes() == before
    assert os.listdir(tmp_path / "run") == ["config.yaml"]


# --- documentation -------------------------------------------------------------------------------


def test_the_description_has_every_key_with_type_default_and_meaning():
    described = describe_config()
    assert "run.num_steps    (integer >= 1; required)\n    Steps of the loop" in described
    assert "optimizer.lr    (number > 0; default 1.0e-06)" in described
    assert "algorithm.clip.dual    (number > 1 or null; default 10.0)" in described
    assert "run.resume    (never | always | if_present; default never)" in described
    assert "# Sampling." in described
    leaves = [key.path for key in config_keys() if not key.is_section]
    assert [path for path in leaves if f"\n{path}    (" not in described] == []


def test_the_description_can_be_narrowed_to_a_section_or_a_key():
    described = describe_config("algorithm.clip")
    assert "algorithm.clip.low" in described
    assert "algorithm.kl" not in described
    assert describe_config("run.seed").startswith("run.seed    (integer >= 0; default 0)\n")
    with pytest.raises(ConfigError, match=r"no configuration key algorithm\.clp\. Did you mean"):
        describe_config("algorithm.clp")


def test_nearest_keys_of_nonsense_are_none():
    assert nearest_keys("qqqq", config_keys()) == []
