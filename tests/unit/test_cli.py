"""The command line teaches, and refuses cleanly."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from dynamo_megatron import __version__
from dynamo_megatron.cli import config_from_arguments, main

GOOD = """\
run: {dir: runs/a, num_steps: 3}
model: {path: builtin:tiny}
data: {train: [{kind: arithmetic, num_problems: 5, split: train}]}
"""


@pytest.fixture
def good(tmp_path: Path, monkeypatch) -> Path:
    monkeypatch.delenv("RANK", raising=False)
    path = tmp_path / "good.yaml"
    path.write_text(GOOD)
    return path


def refused(capsys, *argv: str) -> str:
    """What stderr says when ``train`` refuses these arguments."""
    with pytest.raises(SystemExit) as caught:
        main(["train", *argv])
    assert caught.value.code == 2
    out, err = capsys.readouterr()
    assert out == ""
    return err


@pytest.mark.parametrize(
    "arrange",
    [
        lambda f: ["--config", f, "run.seed=2", "run.num_steps=9"],
        lambda f: ["run.seed=2", "run.num_steps=9", "--config", f],
        lambda f: ["run.seed=2", "--config", f, "run.num_steps=9"],
        lambda f: [f"--config={f}", "run.seed=5", "run.seed=2", "run.num_steps=9"],
    ],
)
def test_overrides_may_stand_before_and_after_the_file(good: Path, arrange):
    config = config_from_arguments(arrange(str(good)))
    assert (config.run.seed, config.run.num_steps) == (2, 9)


def test_a_configuration_error_is_one_clean_message_and_exit_code_2(good: Path, capsys):
    err = refused(capsys, "--config", str(good), "algorithm.modulation.aplha=0.3")
    assert err.startswith(f"dynamo-megatron train: {good}: 1 problem")
    assert "did you mean algorithm.modulation.alpha?" in err
    assert "Traceback" not in err


@pytest.mark.parametrize("rank", ["1", "15"])
def test_other_ranks_refuse_in_silence(good: Path, capsys, monkeypatch, rank: str):
    monkeypatch.setenv("RANK", rank)
    assert refused(capsys, "--config", str(good), "lr=3") == ""
    assert refused(capsys, "--nonsense") == ""


def test_rank_0_speaks(good: Path, capsys, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    assert "optimizer.lr" in refused(capsys, "--config", str(good), "lr=3")


def test_train_without_a_file_says_so(capsys):
    assert "required: --config" in refused(capsys)


def test_an_override_with_dashes_is_told_how_to_write_it(good: Path, capsys):
    err = refused(capsys, "--config", str(good), "--run.num_steps=3")
    assert "--run.num_steps=3. Overrides are written without dashes" in err


@pytest.mark.parametrize("argv", [["--help"], ["train", "--help"]])
def test_help_teaches_with_three_examples_and_says_where_output_goes(capsys, argv):
    with pytest.raises(SystemExit) as caught:
        main(argv)
    assert caught.value.code == 0
    out = capsys.readouterr().out
    for words in (
        "train --config configs/",
        "torchrun --standalone --nproc-per-node 2 -m dynamo_megatron.train",
        "optimizer.lr=3e-4",
        "under run.dir",
        "metrics.jsonl",
    ):
        assert words in out


def test_every_example_of_the_help_loads(capsys, monkeypatch):
    with pytest.raises(SystemExit):
        main(["--help"])
    text = capsys.readouterr().out.replace("\\\n", " ")
    commands = [line.split() for line in text.splitlines() if "--config configs/" in line]
    assert len(commands) == 3
    monkeypatch.chdir(Path(__file__).parents[2])
    configs = [config_from_arguments(words[words.index("--config") :]) for words in commands]
    assert [config.parallel.tensor for config in configs] == [1, 2, 1]
    assert configs[2].algorithm.clip.dual is None


def test_config_prints_the_schema(capsys):
    assert main(["config"]) == 0
    everything = capsys.readouterr().out
    assert everything.startswith("# run\n")
    assert "optimizer.lr    (number > 0; default 1.0e-06)" in everything
    assert main(["config", "--key", "algorithm.clip"]) == 0
    clip = capsys.readouterr().out
    assert clip.startswith("# algorithm.clip\n")
    assert "optimizer" not in clip


def test_config_refuses_a_key_that_does_not_exist(capsys):
    assert main(["config", "--key", "algorithm.clp"]) == 2
    assert "Did you mean algorithm.clip?" in capsys.readouterr().err


def test_help_config_prints_the_schema_without_a_file(capsys):
    with pytest.raises(SystemExit) as caught:
        config_from_arguments(["--help-config"])
    assert caught.value.code == 0
    assert "optimizer.lr" in capsys.readouterr().out


def test_version(capsys):
    with pytest.raises(SystemExit):
        main(["--version"])
    assert capsys.readouterr().out == f"dynamo-megatron {__version__}\n"


def test_a_bad_configuration_is_answered_before_torch_is_imported(good: Path):
    code = (
        "import sys\n"
        "from dynamo_megatron.cli import main\n"
        "try:\n"
        "    main(sys.argv[1:])\n"
        "except SystemExit as end:\n"
        "    sys.exit(40 + end.code if {'torch', 'megatron'}.isdisjoint(sys.modules) else 1)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "train", "--config", str(good), "lr=1"],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=Path(__file__).parents[2],
        env={key: value for key, value in os.environ.items() if key != "RANK"},
    )
    assert done.returncode == 42, done.stderr
    assert "did you mean optimizer.lr?" in done.stderr
    assert "Traceback" not in done.stderr
