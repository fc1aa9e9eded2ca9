"""The file of samples: appended to, read back, cut where a run was killed."""

import errno
import fcntl
import json
from dataclasses import asdict

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


def test_a_file_that_is_one_cut_line_holds_nothing_and_an_empty_one_is_not_left(tmp_path):
    path = tmp_path / "samples.jsonl"
    path.write_text("x" * 200_000)
    with SampleFile(path) as file:
        assert list(file.read()) == []
        assert path.read_bytes() == b""
    assert not path.exists()


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


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("reward", '"1.0"', "its reward is '1.0', not of type float"),
        ("reward", "true", "its reward is True, not of type float"),
        ("reward", "NaN", "its reward is nan, not a finite number"),
        ("reward", "1" * 400, "too large"),
        ("reward", "null", "its reward is None"),
        ("k", "1.0", "its k is 1.0, not of type int"),
        ("k", "-1", "its k is -1, which is negative"),
        ("formatted", "1", "its formatted is 1, not of type bool"),
        ("problem", "7", "its problem is 7, not of type str"),
        ("status", '"fine"', "'fine' is not a valid VerdictStatus"),
        ("finish_reason", "[]", "its finish_reason is"),
        ("problem", "[" * 100_000, "is no sample"),
    ],
)
def test_a_value_of_another_type_is_refused_with_its_line(tmp_path, field, value, words):
    path = tmp_path / "samples.jsonl"
    values = {name: json.dumps(entry) for name, entry in asdict(sample(k=1)).items()}
    line = ", ".join(f'"{name}": {entry}' for name, entry in {**values, field: value}.items())
    path.write_text(sample().line() + "{" + line + "}\n")
    with pytest.raises(SamplesError, match=r"samples\.jsonl, line 2 is no sample") as caught:
        read(path)
    assert words in str(caught.value)


def test_a_whole_number_is_a_reward(tmp_path):
    path = tmp_path / "samples.jsonl"
    path.write_text(sample().line().replace('"reward": 1.0', '"reward": 1'))
    assert read(path) == [sample()]


def test_one_at_a_time_has_the_file_and_the_next_when_it_is_closed(tmp_path):
    path = tmp_path / "samples.jsonl"
    with SampleFile(path) as file:
        with pytest.raises(SamplesError, match=r"another evaluation is writing .*samples\.jsonl"):
            SampleFile(path)
        file.append([sample()])
    with SampleFile(path) as file:
        file.append([sample(k=1)])
    assert len(read(path)) == 2


def test_a_file_that_its_holder_removed_is_not_written_to(tmp_path, monkeypatch):
    path = tmp_path / "samples.jsonl"
    holder = SampleFile(path)
    lock = fcntl.flock

    def close_first(*arguments):
        monkeypatch.setattr(fcntl, "flock", lock)
        holder.close()  # empty: it removes what was just opened
        lock(*arguments)

    monkeypatch.setattr(fcntl, "flock", close_first)
    with SampleFile(path) as file:
        file.append([sample()])
    assert read(path) == [sample()]


def test_where_there_are_no_locks_an_evaluation_does_without(tmp_path, monkeypatch, caplog):
    def unsupported(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", unsupported)
    with SampleFile(tmp_path / "samples.jsonl") as file:
        file.append([sample()])
    assert read(tmp_path / "samples.jsonl") == [sample()]
    assert "cannot be locked (" in caplog.text and "No locks available" in caplog.text
