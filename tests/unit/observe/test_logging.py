"""Logs: each record with its rank, rank 0's in a file, others' only when it matters."""

import logging
from pathlib import Path

import pytest

from dynamo_megatron.observe.logging import setup_logging


@pytest.fixture(autouse=True)
def restored_logging():
    root = logging.getLogger()
    level, handlers = root.level, list(root.handlers)
    yield
    for handler in [h for h in root.handlers if h not in handlers]:
        root.removeHandler(handler)
        handler.close()
    root.setLevel(level)


def test_rank_0_writes_to_stderr_and_to_the_run_s_file(tmp_path: Path, capsys):
    setup_logging(0, tmp_path / "run")
    logging.getLogger("dynamo_megatron.x").info("hello")
    line = (tmp_path / "run" / "run.log").read_text()
    assert "[rank 0] INFO dynamo_megatron.x: hello" in line
    out, err = capsys.readouterr()
    assert (out, err) == ("", line)


def test_other_ranks_have_no_file_and_say_warnings_only(tmp_path: Path, capsys):
    setup_logging(3, tmp_path)
    logging.getLogger("dynamo_megatron.x").info("not this")
    logging.getLogger("dynamo_megatron.x").warning("but this")
    err = capsys.readouterr().err
    assert "[rank 3] WARNING dynamo_megatron.x: but this" in err
    assert "not this" not in err
    assert list(tmp_path.iterdir()) == []


def test_setting_up_again_replaces_and_does_not_double(tmp_path: Path, capsys):
    setup_logging(0, tmp_path)
    setup_logging(0, tmp_path)
    logging.getLogger("dynamo_megatron").info("once")
    assert (tmp_path / "run.log").read_text().count("once") == 1
    assert capsys.readouterr().err.count("once") == 1


def test_a_continued_run_appends_to_its_log(tmp_path: Path):
    setup_logging(0, tmp_path)
    logging.getLogger("dynamo_megatron").info("before")
    setup_logging(0, tmp_path)
    logging.getLogger("dynamo_megatron").info("after")
    text = (tmp_path / "run.log").read_text()
    assert text.index("before") < text.index("after")


@pytest.mark.parametrize("name", ["megatron.core.optimizer", "matplotlib.font_manager", "httpx"])
def test_talkative_libraries_are_held_to_warnings(capsys, name: str):
    setup_logging(0)
    logging.getLogger(name).info("noise")
    logging.getLogger(name).warning("signal")
    err = capsys.readouterr().err
    assert "noise" not in err
    assert "signal" in err
