import json
import subprocess
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

from dynamo_megatron.checkpoint.errors import CheckpointError
from dynamo_megatron.checkpoint.export import export_hf
from tests.policies import Layout, write_qwen3
from tests.ranks import run_on_ranks
from tests.unit.checkpoint.helpers import policy, train

TINY = Path(__file__).parents[3] / "dynamo_megatron/assets/tiny_policy"
COPIED = ["generation_config.json", "tokenizer.json", "tokenizer_config.json"]


def read_tensors(folder: Path) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    for path in folder.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            names = list(file.keys())
            assert not tensors.keys() & set(names), "a tensor is in two files"
            tensors.update({name: file.get_tensor(name) for name in names})
    return tensors


def export_from(model_dir, out, layout=None, *, updates=0, shard_bytes=5 << 30, **options):
    def work():
        with policy(model_dir, layout, **options) as run:
            train(run, range(updates))
            export_hf(run, model_dir, out, shard_bytes=shard_bytes)
            return {name: tensor.clone() for name, tensor in run.weights()}

    return run_on_ranks(work, layout.world_size if layout else 1)[0]


def test_the_shipped_policy_comes_out_as_it_went_in(tmp_path):
    out = tmp_path / "runs" / "final"
    export_from(TINY, out)
    source, exported = read_tensors(TINY), read_tensors(out)
    assert source.keys() == exported.keys()
    for name, tensor in source.items():
        assert exported[name].dtype == tensor.dtype
        assert torch.equal(exported[name], tensor)
    for name in [*COPIED, "chat_template.jinja"]:
        assert (out / name).read_bytes() == (TINY / name).read_bytes()
    assert {path.name for path in out.iterdir()} == {path.name for path in TINY.iterdir()}
    config = json.loads((out / "config.json").read_text())
    assert config == json.loads((TINY / "config.json").read_text())
    assert [path.name for path in out.parent.iterdir()] == ["final"]


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_transformers_loads_the_trained_policy_without_a_key_too_many_or_too_few(tied, tmp_path):
    model_dir = write_qwen3(tmp_path / "model", tied=tied)
    out = tmp_path / "out"
    layout = Layout(tensor=2, pipeline=2)
    trained = export_from(model_dir, out, layout, updates=1, shard_bytes=8000)
    model, info = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    loaded = model.state_dict()
    if tied:
        assert torch.equal(loaded.pop("lm_head.weight"), loaded["model.embed_tokens.weight"])
    assert loaded.keys() == trained.keys()
    assert all(torch.equal(loaded[name], trained[name]) for name in trained)
    before = read_tensors(model_dir)
    assert not torch.equal(before["model.norm.weight"], trained["model.norm.weight"])


def test_large_models_are_split_with_an_index(tmp_path):
    model_dir = write_qwen3(tmp_path / "model")
    out = tmp_path / "out"
    export_from(model_dir, out, shard_bytes=20_000)
    files = sorted(path.name for path in out.glob("*.safetensors"))
    assert len(files) > 2
    assert files == [
        f"model-{i + 1:05d}-of-{len(files):05d}.safetensors" for i in range(len(files))
    ]
    index = json.loads((out / "model.safetensors.index.json").read_text())
    source = read_tensors(model_dir)
    assert index["metadata"]["total_size"] == sum(t.numel() * 4 for t in source.values())
    for name, file in index["weight_map"].items():
        with safe_open(out / file, framework="pt") as stored:
            assert torch.equal(stored.get_tensor(name), source[name])
    assert index["weight_map"].keys() == source.keys()
    assert max((out / file).stat().st_size for file in files) < 30_000


def test_the_dtype_in_the_config_is_that_of_the_weights(tmp_path):
    model_dir = write_qwen3(tmp_path / "model")
    out = tmp_path / "out"
    export_from(model_dir, out, dtype=torch.bfloat16)
    source = json.loads((model_dir / "config.json").read_text())
    assert json.loads((out / "config.json").read_text()) == source | {"dtype": "bfloat16"}
    assert {tensor.dtype for tensor in read_tensors(out).values()} == {torch.bfloat16}
    assert AutoModelForCausalLM.from_pretrained(out).dtype is torch.bfloat16


def test_the_exported_tokenizer_renders_and_encodes_as_the_source(tmp_path):
    out = tmp_path / "out"
    export_from(TINY, out)
    messages = [{"role": "user", "content": "12 + 30 = ?"}]
    rendered = [
        AutoTokenizer.from_pretrained(folder).apply_chat_template(
            messages, add_generation_prompt=True, tokenize=True
        )
        for folder in (TINY, out)
    ]
    assert rendered[0] == rendered[1]


def _refused(out: Path, source: Path = TINY, *, world_size: int = 2) -> str:
    def work():
        with policy(TINY, Layout(data=world_size)) as run:
            with pytest.raises(CheckpointError) as caught:
                export_hf(run, source, out)
            return str(caught.value)

    messages = run_on_ranks(work, world_size)
    assert len(set(messages)) == 1
    return messages[0]


def test_a_folder_with_files_in_it_is_left_alone(tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "notes.txt").write_text("mine")
    assert "exists and is not an empty folder" in _refused(tmp_path / "out")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["notes.txt"]
    (tmp_path / "file").write_text("mine")
    assert "exists and is not an empty folder" in _refused(tmp_path / "file")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "out"]


def test_an_empty_folder_is_filled_and_what_a_killed_export_left_is_removed(tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out.tmp-0123abcd").mkdir()
    export_from(TINY, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert (tmp_path / "out" / "model.safetensors").is_file()


def test_a_source_without_a_configuration_is_refused(tmp_path):
    assert "has no config.json" in _refused(tmp_path / "out", source=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_fails_the_export_on_all_ranks_and_leaves_nothing(tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)], capture_output=True
    )
    if mounted.returncode:
        pytest.skip(f"a small file system cannot be mounted here: {mounted.stderr.decode()}")
    try:
        message = _refused(disk / "out")
        left = list(disk.iterdir())
    finally:
        subprocess.run(["umount", str(disk)], check=True)
    assert "No space left on device" in message and "failed on rank 0" in message
    assert left == []


class _Altered:
    """A policy whose stream of weights is not what the model has."""

    def __init__(self, run, alter) -> None:
        self.module, self.topology, self.arch = run.module, run.topology, run.arch
        self.weights = lambda: alter(list(run.weights()))


@pytest.mark.parametrize(
    ("alter", "said"),
    [
        (lambda stream: stream[:-1], r"lacks \['lm_head.weight'\]"),
        (lambda stream: [*stream, stream[-1]], r"too often .* \['lm_head.weight'\]"),
        (lambda stream: [*stream, ("model.extra", stream[-1][1])], r"\['model.extra'\]"),
    ],
    ids=["lacking", "twice", "unknown"],
)
def test_every_tensor_of_the_model_is_written_exactly_once_or_nothing_is(alter, said, tmp_path):
    def work():
        with policy(TINY) as run, pytest.raises(CheckpointError, match=said):
            export_hf(_Altered(run, alter), TINY, tmp_path / "out")

    run_on_ranks(work, 1)
    assert list(tmp_path.iterdir()) == []


def test_a_stream_may_reuse_its_memory_from_tensor_to_tensor(tmp_path):
    def through_one_buffer(stream):
        buffer = torch.empty(max(tensor.numel() for _, tensor in stream))
        for name, tensor in stream:
            view = buffer[: tensor.numel()].view_as(tensor)
            yield name, view.copy_(tensor)

    def work():
        with policy(TINY) as run:
            export_hf(_Altered(run, through_one_buffer), TINY, tmp_path / "out")

    run_on_ranks(work, 1)
    source, exported = read_tensors(TINY), read_tensors(tmp_path / "out")
    assert all(torch.equal(exported[name], source[name]) for name in source)
