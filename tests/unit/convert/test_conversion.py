"""Hugging Face in and out again: nothing lost, nothing half-written, nothing wrong unnoticed."""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from dynamo_megatron.assets import TINY_POLICY
from dynamo_megatron.checkpoint.errors import CheckpointError
from dynamo_megatron.convert import command, conversion
from dynamo_megatron.convert.errors import ConversionError
from dynamo_megatron.hf.architecture import ArchitectureError
from dynamo_megatron.hf.reader import WeightsError
from tests.forked import in_child
from tests.policies import FAMILIES, write_model

ROOT = Path(__file__).parents[3]
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
MAIN = "import sys; from dynamo_megatron.cli import main; sys.exit(main())"


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for path in folder.glob("*.safetensors"):
        tensors = load_file(path)
        assert not tensors.keys() & found.keys(), "a tensor is in two files"
        found |= tensors
    return found


def assert_same_tensors(folder: Path, source: Path) -> None:
    got, want = tensors_of(folder), tensors_of(source)
    assert got.keys() == want.keys()
    for name in want:
        assert got[name].dtype == want[name].dtype
        assert torch.equal(got[name], want[name]), name


def snapshot(folder: Path) -> dict[str, bytes]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Path:
    """The shipped policy as a checkpoint."""
    out = tmp_path_factory.mktemp("tiny") / "checkpoint"
    in_child(lambda: conversion.to_megatron(TINY_POLICY, out))
    return out


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_goes_in_and_comes_out_bit_by_bit(family, dtype, tied, tmp_path):
    model_dir = write_model(tmp_path / "hf", family, tied=tied, dtype=dtype)

    def work():
        into = conversion.to_megatron(model_dir, tmp_path / "megatron")
        out = conversion.to_hf(tmp_path / "megatron", tmp_path / "out")
        return into.check, out.check

    for check in in_child(work):
        assert check.num_tensors == len(tensors_of(model_dir))
        assert check.max_logit > 1, "the probe says something"
        assert check.max_logit_difference < 2e-5
    assert_same_tensors(tmp_path / "out", model_dir)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf", "megatron", "out"]
    source_config = json.loads((model_dir / "config.json").read_text())
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == source_config


def test_the_result_loads_in_transformers_without_a_key_too_many_or_too_few(tiny, tmp_path):
    out = tmp_path / "out"
    in_child(lambda: conversion.to_hf(tiny, out, shard_bytes=300_000))
    model, info = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    want = AutoModelForCausalLM.from_pretrained(TINY_POLICY)
    prompt = torch.tensor([[1, 5, 9]])
    options = {"do_sample": False, "max_new_tokens": 8, "attention_mask": torch.ones(1, 3)}
    assert torch.equal(model.generate(prompt, **options), want.generate(prompt, **options))
    messages = [{"role": "user", "content": "12 + 30 = ?"}]
    texts = [
        AutoTokenizer.from_pretrained(folder).apply_chat_template(
            messages, add_generation_prompt=True, tokenize=False
        )
        for folder in (out, TINY_POLICY)
    ]
    assert texts[0] == texts[1]
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 2
    for name, file in index["weight_map"].items():
        with safe_open(out / file, framework="pt") as stored:
            assert name in stored.keys()  # noqa: SIM118 - safe_open is no mapping


@pytest.mark.parametrize("asked", ["bfloat16", "float16"])
def test_the_dtype_is_as_asked_and_rounds_to_nearest(asked, tiny, tmp_path):
    dtype = getattr(torch, asked)
    in_child(lambda: conversion.to_hf(tiny, tmp_path / "out", dtype=dtype))
    source = tensors_of(TINY_POLICY)
    for name, tensor in tensors_of(tmp_path / "out").items():
        assert torch.equal(tensor, source[name].to(dtype))
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["dtype"] == asked


def test_the_vocabulary_is_that_of_the_config_and_not_of_the_tokenizer(tmp_path):
    model_dir = write_model(tmp_path / "hf", "qwen3", vocab_size=330)
    shutil.copy(TINY_POLICY / "tokenizer.json", model_dir)  # 275 tokens

    def work():
        conversion.to_megatron(model_dir, tmp_path / "megatron")
        conversion.to_hf(tmp_path / "megatron", tmp_path / "out")

    in_child(work)
    assert tensors_of(tmp_path / "out")["lm_head.weight"].shape[0] == 330


def test_a_tied_model_that_stores_its_head_twice_is_taken_once(tmp_path):
    model_dir = write_model(tmp_path / "hf", "llama3", tied=True)
    tensors = tensors_of(model_dir)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, model_dir / "model.safetensors", metadata={"format": "pt"})

    def work():
        conversion.to_megatron(model_dir, tmp_path / "megatron")
        conversion.to_hf(tmp_path / "megatron", tmp_path / "out")

    in_child(work)
    assert "lm_head.weight" not in tensors_of(tmp_path / "out")
    tensors["lm_head.weight"] += 1
    save_file(tensors, model_dir / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConversionError, match="tie_word_embeddings"):
        in_child(lambda: conversion.to_megatron(model_dir, tmp_path / "again"))


class TestTheCheck:
    """A conversion that is wrong is noticed, and leaves no output."""

    @pytest.fixture(params=["qwen2", "qwen3"])
    def model_dir(self, request, tmp_path):
        return write_model(tmp_path / "hf", request.param)

    def _fails(self, work, out: Path, match: str) -> None:
        with pytest.raises(ConversionError, match=match):
            in_child(work)
        assert not out.exists()
        assert list(out.parent.glob(f"{out.name}.tmp-*")) == []

    def test_a_mapping_that_is_wrong_both_ways_is_seen_in_the_logits(
        self, model_dir, tmp_path, monkeypatch
    ):
        # Keys where values belong: the round trip is bitwise all the same.
        fuse = conversion.fuse

        def swapped(kind, parts, arch):
            if kind == "qkv":
                parts = [parts[0], parts[2], parts[1]]
            return fuse(kind, parts, arch)

        monkeypatch.setattr(conversion, "fuse", swapped)
        monkeypatch.setattr("dynamo_megatron.convert.self_check.fuse", swapped)
        out = tmp_path / "out"
        self._fails(lambda: conversion.to_megatron(model_dir, out), out, "compute other logits")

    @pytest.mark.parametrize(
        ("option", "value"), [("rope_theta", 2e4), ("rms_norm_eps", 1e-2), ("rope_type", "linear")]
    )
    def test_a_configuration_that_transformers_reads_otherwise_is_seen_in_the_logits(
        self, option, value, model_dir, tmp_path, monkeypatch
    ):
        def other(folder, positions):
            path = folder / "config.json"
            raw = json.loads(path.read_text())
            rope = raw["rope_parameters"]
            rope |= {"factor": 2.0}
            (rope if option in rope else raw)[option] = value
            path.write_text(json.dumps(raw))
            return hf_layers(folder, positions)

        from dynamo_megatron.convert import self_check

        hf_layers = self_check.HfLayers
        monkeypatch.setattr(self_check, "HfLayers", other)
        out = tmp_path / "out"
        self._fails(lambda: conversion.to_megatron(model_dir, out), out, "compute other logits")

    def test_one_wrong_number_is_seen(self, model_dir, tmp_path, monkeypatch):
        write = conversion.CheckpointWriter.add

        def flipped(self, key, tensor, **layer):
            if key.endswith("linear_fc2.weight") and layer["layer"] == 3:
                tensor = tensor.clone()
                tensor[5, 7] = torch.nextafter(tensor[5, 7], torch.tensor(math.inf))
            write(self, key, tensor, **layer)

        monkeypatch.setattr(conversion.CheckpointWriter, "add", flipped)
        out = tmp_path / "out"
        self._fails(
            lambda: conversion.to_megatron(model_dir, out),
            out,
            r"model\.layers\.3\.mlp\.down_proj\.weight .* hold different numbers",
        )

    def test_check_only_passes_a_pair_and_refuses_a_changed_one(self, tiny, tmp_path):
        out = tmp_path / "out"
        in_child(lambda: conversion.to_hf(tiny, out))
        before = snapshot(out)
        for written in ("hf", "megatron"):
            report = in_child(lambda w=written: conversion.check(tiny, out, written=w))
            assert report.num_tensors == len(tensors_of(TINY_POLICY))
        assert snapshot(out) == before
        tensors = tensors_of(out)
        tensors["model.norm.weight"][0] += 1e-3
        save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(ConversionError, match=r"model\.norm\.weight .* different numbers"):
            in_child(lambda: conversion.check(tiny, out, written="hf"))


class TestBadInput:
    """A clear error; nothing is left; the source is as it was."""

    @pytest.fixture()
    def model_dir(self, tmp_path):
        return write_model(tmp_path / "hf", "smollm2")

    def _refused(self, convert, source: Path, out: Path, error, match: str) -> None:
        before = snapshot(source)
        with pytest.raises(error, match=match):
            in_child(lambda: convert(source, out))
        assert snapshot(source) == before
        assert not out.exists()
        assert list(out.parent.glob("*.tmp-*")) == []

    def test_missing_shard(self, model_dir, tmp_path):
        model = AutoModelForCausalLM.from_pretrained(model_dir)
        shutil.rmtree(model_dir)
        model.save_pretrained(model_dir, max_shard_size="100KB")
        (model_dir / sorted(p.name for p in model_dir.glob("*.safetensors"))[1]).unlink()
        match = "model-00002-of-.* is not there"
        self._refused(conversion.to_megatron, model_dir, tmp_path / "out", WeightsError, match)

    def test_an_index_that_does_not_belong_to_the_files(self, model_dir, tmp_path):
        index = {"weight_map": {"model.norm.weight": "model.safetensors"}}
        (model_dir / "model.safetensors.index.json").write_text(json.dumps(index))
        self._refused(
            conversion.to_megatron, model_dir, tmp_path / "out", WeightsError, "do not agree"
        )

    def test_truncated_safetensors(self, model_dir, tmp_path):
        path = model_dir / "model.safetensors"
        path.write_bytes(path.read_bytes()[:-10])
        self._refused(
            conversion.to_megatron, model_dir, tmp_path / "out", WeightsError, "truncated"
        )

    def test_other_family(self, model_dir, tmp_path):
        path = model_dir / "config.json"
        path.write_text(path.read_text().replace('"llama"', '"mistral"'))
        self._refused(
            conversion.to_megatron, model_dir, tmp_path / "out", ArchitectureError, "mistral"
        )

    def test_weights_of_another_shape_and_too_few_layers(self, model_dir, tmp_path):
        path = model_dir / "config.json"
        config = json.loads(path.read_text())
        path.write_text(json.dumps(config | {"intermediate_size": 40}))
        out = tmp_path / "out"
        self._refused(
            conversion.to_megatron, model_dir, out, ConversionError, r"gate_proj.*\(48, 64\)"
        )
        path.write_text(json.dumps(config | {"num_hidden_layers": 3}))
        self._refused(
            conversion.to_megatron, model_dir, out, ConversionError, r"beyond.*layers\.3\."
        )

    def test_tokenizer_larger_than_the_embedding(self, tmp_path):
        model_dir = write_model(tmp_path / "hf", "qwen3", vocab_size=9)
        shutil.copy(TINY_POLICY / "tokenizer.json", model_dir)
        match = r"token ids up to \d+, and the embedding .* 9 rows"
        self._refused(conversion.to_megatron, model_dir, tmp_path / "out", ArchitectureError, match)

    def test_existing_output_folder_is_left_alone(self, model_dir, tiny, tmp_path):
        out = tmp_path / "out"
        out.mkdir()
        (out / "mine").write_text("mine")
        for convert, source in ((conversion.to_megatron, model_dir), (conversion.to_hf, tiny)):
            with pytest.raises(CheckpointError, match="is not an empty folder"):
                in_child(lambda c=convert, s=source: c(s, out))
        assert snapshot(out) == {"mine": b"mine"}

    def test_mixed_dtypes_need_a_choice(self, model_dir, tmp_path):
        tensors = tensors_of(model_dir)
        tensors["model.norm.weight"] = tensors["model.norm.weight"].bfloat16()
        save_file(tensors, model_dir / "model.safetensors", metadata={"format": "pt"})
        self._refused(
            conversion.to_megatron, model_dir, tmp_path / "out", ConversionError, "BF16, F32.*one"
        )
        in_child(lambda: conversion.to_megatron(model_dir, tmp_path / "out", dtype=torch.float32))

    @pytest.mark.parametrize("damage", ["truncate", "flip", "lose", "marker", "config"])
    def test_damaged_checkpoint(self, damage, tiny, tmp_path):
        source = shutil.copytree(tiny, tmp_path / "checkpoint")
        path = source / "__0_0.distcp"
        content = bytearray(path.read_bytes())
        if damage == "truncate":
            path.write_bytes(content[:-1])
        elif damage == "flip":
            content[len(content) // 2] ^= 1
            path.write_bytes(content)
        elif damage == "lose":
            path.unlink()
        elif damage == "marker":
            (source / "complete.json").unlink()
        else:
            config = source / "hf" / "config.json"
            config.write_text(config.read_text().replace("10000.0", "20000.0"))
        match = {
            "truncate": "truncated",
            "flip": "CRC-32|cannot be read",
            "lose": "is missing",
            "marker": "without a complete.json",
            "config": "SHA-256",
        }[damage]
        self._refused(
            conversion.to_hf,
            source,
            tmp_path / "out",
            (CheckpointError, ConversionError),
            match,
        )

    def test_legacy_checkpoints_are_refused_with_a_way_out(self, tmp_path):
        folder = tmp_path / "iter_0000100"
        (folder / "mp_rank_00").mkdir(parents=True)
        (folder / "mp_rank_00" / "model_optim_rng.pt").write_bytes(b"")
        for given in (folder, tmp_path):
            match = r"legacy Megatron-LM checkpoint .*torch_dist"
            with pytest.raises(ConversionError, match=match):
                in_child(lambda g=given: conversion.to_hf(g, tmp_path / "out"))

    def test_a_folder_of_checkpoints_names_one_of_them(self, tiny, tmp_path):
        shutil.copytree(tiny, tmp_path / "checkpoints" / "step_00000004")
        with pytest.raises(ConversionError, match=r"give one of them.*step_00000004"):
            in_child(lambda: conversion.to_hf(tmp_path / "checkpoints", tmp_path / "out"))

    def test_source_of_another_model(self, tiny, model_dir, tmp_path):
        with pytest.raises(ConversionError, match=r"vocab_size: saved 275, now 101"):
            in_child(lambda: conversion.to_hf(tiny, tmp_path / "out", source=model_dir))

    @pytest.mark.parametrize("direction", ["to_hf", "to_megatron"])
    def test_no_space_left(self, direction, tiny, tmp_path):
        disk = tmp_path / "disk"
        disk.mkdir()
        mounted = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)], capture_output=True
        )
        if mounted.returncode:
            pytest.skip(f"a small file system cannot be mounted: {mounted.stderr.decode()}")
        source = tiny if direction == "to_hf" else TINY_POLICY
        convert = getattr(conversion, direction)
        try:
            with pytest.raises(ConversionError, match="GiB free"):
                in_child(lambda: convert(source, disk / "out"))
            with pytest.raises(OSError, match="No space left"):
                in_child(lambda: _without_margin(convert, source, disk / "out"))
            left = list(disk.iterdir())
        finally:
            subprocess.run(["umount", str(disk)], check=True)
        assert left == []

    def test_what_a_killed_conversion_left_is_removed_by_the_next(self, tiny, tmp_path):
        (tmp_path / "out.tmp-0123abcd").mkdir()
        in_child(lambda: conversion.to_hf(tiny, tmp_path / "out"))
        assert [path.name for path in tmp_path.iterdir()] == ["out"]


def _without_margin(convert, source: Path, out: Path) -> None:
    """As if another program had filled the disk after the space was looked at."""
    from dynamo_megatron.convert import folder

    folder._MARGIN = -(10**12)
    convert(source, out)


class TestCommand:
    def _run(self, *arguments, **options):
        return subprocess.run(
            [sys.executable, "-c", MAIN, *map(str, arguments)],
            capture_output=True,
            text=True,
            env=ENVIRONMENT,
            timeout=120,
            **options,
        )

    def test_converts_checks_and_refuses_with_exit_codes(self, tmp_path):
        out = tmp_path / "out"
        done = self._run("convert", "to-megatron", TINY_POLICY, out)
        assert done.returncode == 0, done.stderr
        assert "47 tensors equal bit by bit" in done.stdout and "differ by at most" in done.stdout
        again = self._run("convert", "to-megatron", TINY_POLICY, out)
        assert again.returncode == 1 and "is not an empty folder" in again.stderr
        assert "Traceback" not in again.stderr

    @pytest.mark.parametrize("arguments", [[], ["to-hf"], ["to-hf", "a", "b", "--shard-gib", "0"]])
    def test_wrong_arguments_are_refused_before_anything_is_imported(self, arguments, capsys):
        with pytest.raises(SystemExit) as ended:
            command.main(arguments)
        assert ended.value.code == 2
        assert "usage: dynamo-megatron convert" in capsys.readouterr().err

    def test_an_interrupted_conversion_leaves_nothing(self, tiny, tmp_path):
        code = (
            "import sys, time\n"
            "import megatron_patches; megatron_patches.apply()\n"
            "from dynamo_megatron.convert import command, conversion\n"
            "def slow(*_, **__):\n"
            "    sys.stdout.write('checking\\n'); sys.stdout.flush(); time.sleep(60)\n"
            "conversion.check_pair = slow\n"
            f"sys.exit(command.main(['to-hf', {str(tiny)!r}, {str(tmp_path / 'out')!r}]))\n"
        )
        process = subprocess.Popen(
            [sys.executable, "-c", code],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=ENVIRONMENT,
        )
        assert process.stdout.readline() == "checking\n"
        assert len(list(tmp_path.glob("out.tmp-*"))) == 1
        os.kill(process.pid, signal.SIGTERM)
        started = time.monotonic()
        _, stderr = process.communicate(timeout=30)
        assert time.monotonic() - started < 10
        assert process.returncode != 0 and "interrupted" in stderr
        assert list(tmp_path.iterdir()) == []
