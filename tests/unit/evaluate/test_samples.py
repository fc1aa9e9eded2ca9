"""The file of samples: appended to, read back, cut where a run was killed."""

import json

import pytest

from dynamo_megatron.evaluate.samples import SampleFile, SamplesError

from .builders import sample


def read(path):
    with SampleFile(path) as file:
        return list(file.read())


def test_samples_are_read_back_as_written(tmp_path):
    path = tmp_path / "deep" / "samples.jsonl"
    written = [
        sample("right", response="a\n\u2028\x00</script>\U0001f600"),
        sample("error", k=1, label="u-1", response="half a pair \ud800"),
    ]
    with SampleFile(path) as file:
        file.append(written[:1])
        file.append(written[1:])
    assert read(path) == written
    assert len(path.read_bytes().splitlines()) == 2


@pytest.mark.parametrize("cut", [1, 30, 200])
def test_a_line_that_was_cut_short_is_dropped_and_written_again(tmp_path, cut):
    path = tmp_path / "samples.jsonl"
    written = [sample(k=k) for k in range(3)]
    with SampleFile(path) as file:
        file.append(written)
    whole = path.read_bytes()
    path.write_bytes(whole[:-cut])
    assert read(path) == written[:2]
    with SampleFile(path) as file:
        file.append(written[2:])
    assert path.read_bytes() == whole


def test_a_file_that_is_one_cut_line_becomes_empty(tmp_path):
    path = tmp_path / "samples.jsonl"
    path.write_text("x" * 200_000)
    assert read(path) == []
    assert path.read_bytes() == b""


def test_a_sample_that_came_twice_counts_once(tmp_path):
    with SampleFile(tmp_path / "s.jsonl") as file:
        file.append([sample(), sample("wrong"), sample(k=1)])
    assert read(tmp_path / "s.jsonl") == [sample(), sample(k=1)]


@pytest.mark.parametrize(
    "line", ["{}", "nonsense", json.dumps({"id": "x"}), "[]", '{"status": "ok"}']
)
def test_a_line_that_is_no_sample_is_refused_with_its_number(tmp_path, line):
    path = tmp_path / "samples.jsonl"
    path.write_text(sample().line() + line + "\n")
    with pytest.raises(SamplesError, match=r"samples\.jsonl, line 2 is no sample"):
        read(path)
