"""Ctrl-C and SIGTERM end a conversion as an interruption, whatever exception came of them."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from pathlib import Path

import pytest

from dynamo_megatron.assets import TINY_POLICY
from dynamo_megatron.convert import command, conversion
from tests.forked import in_child

SIGNALS = [signal.SIGINT, signal.SIGTERM]


def interrupted(arguments: list[str], monkeypatch, capfd, target, name, replacement) -> None:
    """Runs the command with one of its parts replaced, and expects the end of an interruption."""
    monkeypatch.setattr(target, name, replacement)
    assert in_child(lambda: command.main(arguments)) == 130
    said = capfd.readouterr()
    assert said.err.endswith("dynamo-megatron convert: interrupted; nothing was left behind.\n")
    assert "Traceback" not in said.err and said.out == ""


def arguments_of(direction: str, tiny: Path, out: Path) -> list[str]:
    source = tiny if direction == "to-hf" else TINY_POLICY
    return [direction, str(source), str(out)]


@pytest.mark.parametrize("number", SIGNALS)
@pytest.mark.parametrize("direction", ["to-hf", "to-megatron"])
def test_an_interrupted_conversion_leaves_nothing(
    direction, number, tiny, tmp_path, monkeypatch, capfd
):
    def slow(*_, **__):
        assert len(list(tmp_path.glob("a/out.tmp-*"))) == 1
        os.kill(os.getpid(), number)
        time.sleep(60)

    arguments = arguments_of(direction, tiny, tmp_path / "a" / "out")
    interrupted(arguments, monkeypatch, capfd, conversion, "check_pair", slow)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("error", [RuntimeError, ValueError, OSError])
@pytest.mark.parametrize("direction", ["to-hf", "to-megatron"])
def test_a_reader_that_makes_another_error_of_it(
    direction, error, tiny, tmp_path, monkeypatch, capfd
):
    """As torch's reader of zip files does: "read of closed file", and the file is "damaged"."""

    def turned(*_):
        try:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(60)
        except KeyboardInterrupt:
            raise error("read of closed file") from None

    reader = conversion.CheckpointWeights if direction == "to-hf" else conversion.SafetensorsReader
    arguments = arguments_of(direction, tiny, tmp_path / "out")
    name = "_read" if direction == "to-hf" else "tensor"
    interrupted(arguments, monkeypatch, capfd, reader, name, turned)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("direction", ["to-hf", "to-megatron"])
def test_an_interruption_that_is_lost_on_its_way_ends_the_conversion_at_the_next_tensor(
    direction, tiny, tmp_path, monkeypatch, capfd
):
    reader = conversion.CheckpointWeights if direction == "to-hf" else conversion.SafetensorsReader
    tensor = reader.tensor

    def lost(*arguments):
        with suppress(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGTERM)
        return tensor(*arguments)

    arguments = arguments_of(direction, tiny, tmp_path / "out")
    interrupted(arguments, monkeypatch, capfd, reader, "tensor", lost)
    assert list(tmp_path.iterdir()) == []


def test_a_second_signal_does_not_interrupt_the_cleaning_up(tiny, tmp_path, monkeypatch, capfd):
    from dynamo_megatron.convert import folder

    remove = folder.shutil.rmtree

    def impatient(*arguments, **options):
        os.kill(os.getpid(), signal.SIGINT)
        remove(*arguments, **options)

    def slow(*_, **__):
        monkeypatch.setattr(folder.shutil, "rmtree", impatient)
        os.kill(os.getpid(), signal.SIGINT)

    arguments = arguments_of("to-hf", tiny, tmp_path / "out")
    interrupted(arguments, monkeypatch, capfd, conversion, "check_pair", slow)
    assert list(tmp_path.iterdir()) == []


def test_an_interrupted_check_ends_as_one_too(tiny, monkeypatch, capfd):
    def slow(*_, **__):
        os.kill(os.getpid(), signal.SIGTERM)

    arguments = ["to-megatron", str(TINY_POLICY), str(tiny), "--check-only"]
    interrupted(arguments, monkeypatch, capfd, conversion, "check_pair", slow)


def test_what_was_not_interrupted_is_an_error_of_its_own(tiny, tmp_path, monkeypatch, capfd):
    def broken(*_):
        raise ValueError("read of closed file")

    monkeypatch.setattr(conversion.CheckpointWeights, "_read", broken)
    assert in_child(lambda: command.main(["to-hf", str(tiny), str(tmp_path / "out")])) == 1
    assert capfd.readouterr().err == "dynamo-megatron convert: read of closed file\n"
