"""Parquet in the DAPO and verl schema, and data sets that ``save_to_disk`` wrote."""

import builtins
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dynamo_megatron.config import FileSource
from dynamo_megatron.data.files import Record, kind_of, read_problem_file
from dynamo_megatron.data.problems import DataError
from dynamo_megatron.data.sources import load_problems


def verl_row(problem: str, answer, index="u-1", system=None):
    prompt = [{"role": "user", "content": problem}]
    if system:
        prompt.insert(0, {"role": "system", "content": system})
    return {
        "data_source": "math_dapo",
        "prompt": prompt,
        "ability": "MATH",
        "reward_model": {"ground_truth": answer, "style": "rule-lighteval/MATH_v2"},
        "extra_info": {"index": index},
    }


def write_parquet(path, rows):
    pq.write_table(pa.Table.from_pylist(rows), path)
    return path


def save_to_disk(folder, rows, files=1):
    """What datasets.Dataset.save_to_disk leaves: Arrow streams and the state that lists them."""
    folder.mkdir(parents=True)
    table, names = pa.Table.from_pylist(rows), []
    for k in range(files):
        part = table.slice(k * len(rows) // files, (k + 1) * len(rows) // files)
        names.append(f"data-{k:05d}-of-{files:05d}.arrow")
        with (
            pa.OSFile(str(folder / names[k]), "wb") as out,
            pa.ipc.new_stream(out, table.schema) as s,
        ):
            s.write_table(part.slice(0, len(rows) // files), max_chunksize=2)
    state = {"_data_files": [{"filename": n} for n in names], "_format_type": None}
    (folder / "state.json").write_text(json.dumps(state))
    (folder / "dataset_info.json").write_text("{}")
    return folder


def test_parquet_in_the_verl_schema_is_read_without_naming_a_key(tmp_path):
    rows = [verl_row("What is 1+1?", "2", "u-7"), verl_row("And 2+2?", "4", system="Be brief.")]
    path = write_parquet(tmp_path / "dapo.parquet", rows)
    assert list(read_problem_file(path, kind="parquet")) == [
        Record("What is 1+1?", "2", "", "math_dapo", "u-7"),
        Record("And 2+2?", "4", "Be brief.", "math_dapo", "u-1"),
    ]


def test_repeated_rows_of_parquet_are_one_problem_and_are_counted(tmp_path):
    rows = [verl_row(f"p{k % 7}", str(k % 7), index=f"u-{k}") for k in range(700)]
    path = write_parquet(tmp_path / "dapo.parquet", rows)
    loaded = load_problems([FileSource(kind="parquet", path=str(path))])
    assert [p.text for p in loaded.problems] == [f"p{k}" for k in range(7)]
    assert [p.label for p in loaded.problems] == [f"u-{k}" for k in range(7)]
    assert (loaded.duplicates, loaded.counts) == (693, {"math_dapo": 7})


def test_a_source_name_stands_above_the_records_own(tmp_path):
    path = write_parquet(tmp_path / "dapo.parquet", [verl_row("p", "1")])
    loaded = load_problems([FileSource(kind="parquet", path=str(path), name="mine")])
    assert loaded.counts == {"mine": 1}


def test_a_system_message_makes_another_problem(tmp_path):
    rows = [verl_row("p", "1"), verl_row("p", "1", system="s"), verl_row("p", "1", system="s")]
    path = write_parquet(tmp_path / "d.parquet", rows)
    loaded = load_problems([FileSource(kind="parquet", path=str(path))])
    assert [p.system for p in loaded.problems] == ["", "s"]
    assert loaded.duplicates == 1


def test_numbers_in_columns_become_plain_text(tmp_path):
    rows = [{"problem": "p", "answer": v} for v in (142.0, -0.5, 0.1)]
    path = write_parquet(tmp_path / "n.parquet", rows)
    read = list(read_problem_file(path, kind="parquet"))
    assert [r.answer for r in read] == ["142", "-0.5", "0.1"]


def test_a_number_that_is_none_is_refused_with_its_row(tmp_path):
    path = write_parquet(tmp_path / "n.parquet", [{"problem": "p", "answer": float("nan")}])
    with pytest.raises(DataError, match=r"n\.parquet, row 1: 'answer' is nan, which no response"):
        list(read_problem_file(path, kind="parquet"))


def test_a_folder_of_parquet_files_is_read_in_order(tmp_path):
    for k in (1, 0):
        write_parquet(tmp_path / f"train-{k}.parquet", [{"problem": f"p{k}", "answer": k}])
    assert [r.problem for r in read_problem_file(tmp_path, kind="parquet")] == ["p0", "p1"]
    assert kind_of(tmp_path) == "parquet"


@pytest.mark.parametrize("files", [1, 2])
def test_a_data_set_on_disk_is_read_without_the_datasets_package(tmp_path, files):
    rows = [{"question": f"q{k}", "answer": f"so {k}\n#### {k}"} for k in range(10)]
    folder = save_to_disk(tmp_path / "set", rows, files)
    assert kind_of(folder) == "arrow"
    assert list(read_problem_file(folder, kind="arrow")) == [
        Record(f"q{k}", str(k)) for k in range(10)
    ]


def test_a_data_set_of_several_splits_says_which_there_are(tmp_path):
    for split in ("train", "test"):
        save_to_disk(tmp_path / split, [{"problem": "p", "answer": "1"}])
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    with pytest.raises(DataError, match=r"several splits \(test, train\)"):
        list(read_problem_file(tmp_path, kind="arrow"))


@pytest.mark.parametrize("keep", [0.5, 0.95])
def test_truncated_tables_are_refused_by_name(tmp_path, keep):
    rows = [{"problem": f"p{k}", "answer": "1"} for k in range(50)]
    files = [
        (write_parquet(tmp_path / "t.parquet", rows), "parquet"),
        (save_to_disk(tmp_path / "set", rows) / "data-00000-of-00001.arrow", "arrow"),
    ]
    for file, kind in files:
        file.write_bytes(file.read_bytes()[: int(file.stat().st_size * keep)])
        with pytest.raises(DataError, match=file.name):
            list(read_problem_file(file if kind == "parquet" else file.parent, kind=kind))


def test_other_files_are_refused_by_name(tmp_path):
    (tmp_path / "x.parquet").write_text("{}")
    with pytest.raises(DataError, match=r"x\.parquet cannot be read as parquet"):
        list(read_problem_file(tmp_path / "x.parquet", kind="parquet"))
    with pytest.raises(DataError, match="no data set that save_to_disk wrote"):
        list(read_problem_file(tmp_path, kind="arrow"))
    with pytest.raises(DataError, match="Rename the file after its kind"):
        kind_of(tmp_path / "problems.txt")


def test_without_pyarrow_the_error_says_what_to_install(tmp_path, monkeypatch):
    path = write_parquet(tmp_path / "x.parquet", [{"problem": "p", "answer": "1"}])
    real = builtins.__import__

    def without_pyarrow(name, *args, **kwargs):
        if name.startswith("pyarrow"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without_pyarrow)
    with pytest.raises(DataError, match=r"pip install 'dynamo-megatron\[data\]'"):
        list(read_problem_file(path, kind="parquet"))
