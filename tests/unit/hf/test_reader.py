"""Which weights a folder holds: those that transformers loads, or a refusal."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import save_file

from dynamo_megatron.hf.reader import SafetensorsReader, WeightsError

INDEX = "model.safetensors.index.json"


def write(folder, name, **values):
    tensors = {key: torch.tensor([float(value)]) for key, value in values.items()}
    save_file(tensors, folder / name, metadata={"format": "pt"})


def write_index(folder, weight_map):
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def values_of(folder):
    with SafetensorsReader(folder) as reader:
        return {name: reader.tensor(name).item() for name in reader.names()}


def refused(folder, match):
    with pytest.raises(WeightsError, match=match):
        SafetensorsReader(folder)


def test_one_file_is_the_model_and_other_files_beside_it_are_not(tmp_path):
    write(tmp_path, "model.safetensors", a=1)
    write(tmp_path, "zzz.safetensors", a=2, b=3)
    assert values_of(tmp_path) == {"a": 1.0}
    with SafetensorsReader(tmp_path) as reader:
        assert reader.surplus_files() == ["zzz.safetensors"]


def test_an_index_names_the_files_of_the_model_and_others_are_not_read(tmp_path):
    write(tmp_path, "1.safetensors", a=1)
    write(tmp_path, "2.safetensors", b=2)
    write(tmp_path, "consolidated.safetensors", a=3, b=4)
    write_index(tmp_path, {"a": "1.safetensors", "b": "2.safetensors"})
    assert values_of(tmp_path) == {"a": 1.0, "b": 2.0}
    with SafetensorsReader(tmp_path) as reader:
        assert reader.surplus_files() == ["consolidated.safetensors"]


def test_one_file_beside_an_index_is_refused(tmp_path):
    write(tmp_path, "model.safetensors", a=1)
    write(tmp_path, "1.safetensors", a=2)
    write_index(tmp_path, {"a": "1.safetensors"})
    refused(tmp_path, r"weights twice: model\.safetensors, which transformers loads.*Delete")


def test_an_adapter_that_transformers_would_add_is_refused(tmp_path):
    write(tmp_path, "model.safetensors", a=1)
    write(tmp_path, "adapter_model.safetensors", b=1)
    (tmp_path / "adapter_config.json").write_text("{}")
    refused(tmp_path, r"holds an adapter \(adapter_config\.json\).*merge_and_unload")


def test_files_without_the_usual_name_or_an_index_are_refused(tmp_path):
    refused(tmp_path, r"has neither .*\(others there: none")
    write(tmp_path, "mine.safetensors", a=1)
    refused(tmp_path, r"has neither .*\(others there: mine\.safetensors")


def test_a_tensor_in_two_files_is_refused(tmp_path):
    write(tmp_path, "1.safetensors", a=1)
    write(tmp_path, "2.safetensors", a=2, b=2)
    write_index(tmp_path, {"a": "2.safetensors", "b": "2.safetensors", "c": "1.safetensors"})
    refused(tmp_path, r"a is in both 1\.safetensors and 2\.safetensors")


@pytest.mark.parametrize("file", ["../outside.safetensors", "a/b.safetensors", "..", "", 3, None])
def test_an_index_that_points_elsewhere_is_refused(file, tmp_path):
    folder = tmp_path / "model"
    (folder / "a").mkdir(parents=True)
    write(tmp_path, "outside.safetensors", w=1)
    write(folder / "a", "b.safetensors", w=1)
    write_index(folder, {"w": file})
    refused(folder, rf"{INDEX} puts w into .*not the name of a file")


@pytest.mark.parametrize(
    ("content", "match"),
    [
        (b"{", "is not JSON"),
        (b"\xff\xfe", "is not JSON"),
        (b"[]", "has no weight_map"),
        (b"{}", "has no weight_map"),
        (b'{"weight_map": {}}', "has no weight_map"),
        (b'{"weight_map": ["1.safetensors"]}', "has no weight_map"),
    ],
)
def test_a_broken_index_is_named(content, match, tmp_path):
    write(tmp_path, "1.safetensors", a=1)
    (tmp_path / INDEX).write_bytes(content)
    refused(tmp_path, f"{INDEX} {match}")
