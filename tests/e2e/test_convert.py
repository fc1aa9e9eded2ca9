"""The checkpoint that a run leaves converts on its own to what the run exported itself."""

from __future__ import annotations

import shutil

import pytest
from transformers import AutoModelForCausalLM

from dynamo_megatron import cli
from dynamo_megatron.assets import TINY_POLICY
from dynamo_megatron.hf.files import companion_files
from tests.forked import in_child
from tests.launch import arguments, launch, metrics_of
from tests.policies import write_model
from tests.unit.convert.helpers import assert_same_tensors, snapshot


def test_a_runs_checkpoint_converts_to_the_runs_own_export(tmp_path, capfd):
    run_dir = tmp_path / "run"
    argv = arguments(tmp_path, run_dir, parallel__tensor=2, checkpoint__export_hf=True)
    launch(argv, 2, tmp_path / "logs")
    (exported,) = (run_dir / "hf").iterdir()
    (checkpoint,) = (run_dir / "checkpoints").iterdir()
    out = tmp_path / "out"
    before = snapshot(checkpoint)
    convert = ["convert", "to-hf", str(checkpoint), str(out)]
    assert in_child(lambda: cli.main(convert)) == 0
    assert_same_tensors(out, exported)
    got, want = snapshot(out), snapshot(exported)
    want.pop("exported_from.json", None)  # the run's own note
    assert got.keys() == want.keys()
    assert all(got[name] == want[name] for name in want if not name.endswith(".safetensors"))
    assert snapshot(checkpoint) == before
    assert in_child(lambda: cli.main([*convert, "--check-only"])) == 0
    # Another checkpoint's export is not this one's.
    config = out / "config.json"
    config.write_text(config.read_text().replace('"rms_norm_eps": 1e-06', '"rms_norm_eps": 1e-05'))
    assert in_child(lambda: cli.main([*convert, "--check-only"])) == 1
    assert "norm_epsilon: saved 1e-06, now 1e-05" in capfd.readouterr().err


@pytest.mark.parametrize("family", ["qwen2", "llama3"])
def test_other_families_train_and_convert(family, tmp_path):
    # transformers' tokenizer of Qwen2 adds a token of its own to the shipped 275.
    model_dir = write_model(tmp_path / "hf", family, vocab_size=277, tied=True)
    for name in companion_files(TINY_POLICY):
        shutil.copy(TINY_POLICY / name, model_dir / name)
    run_dir = tmp_path / "run"
    argv = arguments(
        tmp_path,
        run_dir,
        model__path=str(model_dir),
        parallel__tensor=2,
        run__num_steps=1,
        data__max_prompt_tokens=48,
    )
    launch(argv, 2, tmp_path / "logs")
    # The rollout engine is transformers, fed through the same mapping.
    assert metrics_of(run_dir)[-1]["rollout/logp_gap_max"] < 1e-4
    (checkpoint,) = (run_dir / "checkpoints").iterdir()
    out = tmp_path / "out"
    assert in_child(lambda: cli.main(["convert", "to-hf", str(checkpoint), str(out)])) == 0
    _, info = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
