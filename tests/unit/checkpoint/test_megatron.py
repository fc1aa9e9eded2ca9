import json
import logging
import math
import shutil

import pytest
import torch

from dynamo_megatron.checkpoint.errors import CheckpointError
from dynamo_megatron.checkpoint.manifest import model_fingerprint
from dynamo_megatron.checkpoint.megatron import MegatronCheckpointer
from dynamo_megatron.checkpoint.trainer_state import encode_state
from tests.policies import hf_weights, write_qwen3
from tests.ranks import run_on_ranks
from tests.unit.checkpoint.helpers import assert_same, checkpointer, everything, policy, train


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return write_qwen3(tmp_path_factory.mktemp("qwen3"))


@pytest.fixture(scope="module")
def directory(model_dir, tmp_path_factory):
    """Checkpoints of steps 1 and 2."""
    directory = tmp_path_factory.mktemp("checkpoints")

    def work():
        with policy(model_dir) as run:
            for step in (1, 2):
                train(run, range(step - 1, step))
                checkpointer(run, directory).save(step, {"step": step}, "run:\n  seed: 0\n")

    run_on_ranks(work, 1)
    return directory


def _fingerprint(run) -> dict:
    return model_fingerprint(run.arch, run.settings.dtype)


def refusal(model_dir, folder, *, fingerprint=None, **options) -> str:
    def work():
        with policy(model_dir, **options) as run:
            before = everything(run)
            saved = MegatronCheckpointer(
                folder.parent, run, keep=1, fingerprint=_fingerprint(run) | (fingerprint or {})
            )
            with pytest.raises(CheckpointError) as caught:
                saved.load(folder)
            assert_same(everything(run), before)
            return str(caught.value)

    return run_on_ranks(work, 1)[0]


def test_numbers_and_text_come_back_exactly():
    state = {
        "floats": [0.1, 1 / 3, 5e-324, 1.7976931348623157e308, -0.0, math.inf],
        "big": 2**80,
        "text": "🌟 é \x00 \ud800",
        "nothing": None,
        "flag": True,
        "history": {"prompt": [3, 8.0]},
    }
    back = json.loads(encode_state(state))
    assert back == state
    assert [type(value) for value in back["history"]["prompt"]] == [int, float]
    assert math.copysign(1.0, back["floats"][4]) == -1.0
    assert math.isnan(json.loads(encode_state({"x": math.nan}))["x"])


@pytest.mark.parametrize(
    ("state", "said"),
    [
        ({"history": {3: 1.0}}, r"state\.history has the key 3 \(int\)"),
        ({"a": [1, {"b": torch.zeros(1)}]}, r"state\.a\[1\]\.b is a Tensor"),
        ({"a": {1, 2}}, r"state\.a is a set"),
    ],
)
def test_a_state_that_would_come_back_as_another_is_refused(state, said):
    with pytest.raises(ValueError, match=said):
        encode_state(state)


def test_a_checkpoint_holds_what_it_says(directory):
    folder = directory / "step_00000002"
    names = {p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file()}
    assert names == {
        ".metadata",
        "__0_0.distcp",
        "common.pt",
        "metadata.json",
        "rng/rank_00000.safetensors",
        "trainer.json",
        "config.yaml",
        "complete.json",
    }
    marker = json.loads((folder / "complete.json").read_text())
    assert marker["files"].keys() == names - {"complete.json"}
    assert marker["megatron_core"] == "0.16.1"
    assert marker["layout"] == {"tensor": 1, "pipeline": 1, "data": 1, "cuda": 0}
    assert (folder / "config.yaml").read_text() == "run:\n  seed: 0\n"


def _copy(directory, tmp_path):
    shutil.copytree(directory, tmp_path / "c")
    return tmp_path / "c" / "step_00000002"


@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp", "common.pt", "trainer.json"])
def test_a_missing_or_truncated_file_is_named_with_the_step_to_fall_back_to(
    name, model_dir, directory, tmp_path
):
    folder = _copy(directory, tmp_path)
    content = (folder / name).read_bytes()
    advice = f"Delete {folder} to fall back to step 1 (step_00000001)."
    (folder / name).write_bytes(content[:-1])
    message = refusal(model_dir, folder)
    assert f"{folder / name} has {len(content) - 1} bytes" in message and advice in message
    (folder / name).unlink()
    message = refusal(model_dir, folder)
    assert f"{folder / name} is missing" in message and advice in message


def test_a_checkpoint_of_another_model_is_refused_with_the_keys_that_differ(model_dir, directory):
    folder = directory / "step_00000002"
    message = refusal(model_dir, folder, fingerprint={"num_layers": 36, "dtype": "bfloat16"})
    assert "dtype: saved 'float32', now 'bfloat16'; num_layers: saved 'nothing', now 36" in message
    assert "Delete" not in message


def test_another_optimizer_is_refused_and_its_weights_can_be_loaded(model_dir, directory):
    folder = directory / "step_00000002"
    with_settings = {"distributed": True}
    message = refusal(model_dir, folder, **with_settings)
    assert "saved with Megatron-Core's FP32Optimizer" in message
    assert "this run has DistributedOptimizer" in message

    def work():
        with policy(model_dir) as run:
            checkpointer(run, directory).load(folder)
            want = hf_weights(run)
        with policy(model_dir, **with_settings) as run:
            step = checkpointer(run, directory).load_weights(folder)
            got = hf_weights(run)
            return step, all(torch.equal(got[name], want[name]) for name in want)

    assert run_on_ranks(work, 1) == [(2, True)]


@pytest.mark.filterwarnings("ignore:.torch.distributed.:FutureWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
@pytest.mark.parametrize(
    "options",
    [{}, {"distributed": True}, {"name": "sgd"}, {"dtype": torch.bfloat16}],
    ids=["adam", "distributed", "sgd", "bfloat16"],
)
def test_a_checkpoint_before_the_first_update_brings_the_start_back(options, model_dir, tmp_path):
    def work():
        with policy(model_dir, **options) as run:
            start = everything(run)
            checkpointer(run, tmp_path).save(0, {})
            train(run, range(2))
            end = everything(run)
            saved = checkpointer(run, tmp_path)
            saved.load(saved.latest())
            again = everything(run)
            train(run, range(2))
            return start, end, again, everything(run)

    ((start, end, again, end_again),) = run_on_ranks(work, 1)
    assert_same(again, start)
    assert_same(end_again, end)


def test_bfloat16_without_optimizer_state_is_refused_because_it_would_lose_precision(
    model_dir, tmp_path
):
    def work():
        with policy(model_dir, dtype=torch.bfloat16, name="sgd") as run:
            train(run, range(1))
            with pytest.raises(CheckpointError, match="master copy of the bfloat16 weights"):
                checkpointer(run, tmp_path).save(1, {})

    run_on_ranks(work, 1)
    assert list(tmp_path.iterdir()) == []


def test_the_present_configuration_counts_and_what_changed_is_logged(model_dir, directory, caplog):
    def work():
        with policy(
            model_dir, beta2=0.99, lr=5e-4, warmup_updates=0, decay_style="constant"
        ) as run:
            with caplog.at_level(logging.WARNING):
                checkpointer(run, directory).load(directory / "step_00000002")
            (part,) = run.optimizer.chained_optimizers
            groups = [(g["lr"], g["betas"], g["max_lr"]) for g in part.optimizer.param_groups]
            steps = {float(state["step"]) for state in part.optimizer.state.values()}
            return groups, steps, run.scheduler.num_steps, caplog.text

    ((groups, steps, position, text),) = run_on_ranks(work, 1)
    assert set(groups) == {(5e-4, (0.9, 0.99), 5e-4)}
    assert (steps, position) == ({2.0}, 3)
    assert "continues with changed numbers" in text
    assert "betas: (0.9, 0.95) -> (0.9, 0.99)" in text and "max_lr: 0.001 -> 0.0005" in text


def test_keeping_no_checkpoint_is_refused(model_dir, tmp_path):
    def work():
        with policy(model_dir) as run, pytest.raises(ValueError, match="keep=0"):
            checkpointer(run, tmp_path, keep=0)

    run_on_ranks(work, 1)


def test_rollouts_sampled_ahead_are_part_of_the_checkpoint(model_dir, tmp_path):
    content = bytes(range(256)) * 5

    def work():
        with policy(model_dir) as run:
            saved = checkpointer(run, tmp_path / "c")
            saved.save(1, {}, rollouts=lambda: content)
            with_rollouts = saved.latest()
            saved.load(with_rollouts)
            saved.save(2, {})
            return saved.load_rollouts(with_rollouts), saved.load_rollouts(saved.latest())

    assert run_on_ranks(work, 1) == [(content, None)]
    folder = tmp_path / "c" / "step_00000001"
    marker = json.loads((folder / "complete.json").read_text())
    assert marker["files"]["rollouts.safetensors"]["size"] == 1280
    file = folder / "rollouts.safetensors"
    file.write_bytes(b"\1" + content[1:])
    assert f"{file} has the right size but another SHA-256" in refusal(model_dir, folder)
    file.unlink()
    assert f"{file} is missing" in refusal(model_dir, folder)


def test_rollouts_that_cannot_be_written_leave_no_checkpoint(model_dir, tmp_path):
    def full() -> bytes:
        raise OSError(28, "No space left on device")

    def work():
        with policy(model_dir) as run:
            saved = checkpointer(run, tmp_path)
            with pytest.raises(CheckpointError, match="free some space"):
                saved.save(1, {}, rollouts=full)
            return saved.latest()

    assert run_on_ranks(work, 1) == [None]
    assert list(tmp_path.iterdir()) == []
