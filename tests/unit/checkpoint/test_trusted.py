"""A hostile pickle, in each place where a checkpoint is unpickled, never runs."""

import io
import os
import pickle
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint import BytesStorageMetadata
from torch.distributed.checkpoint.filesystem import _StorageInfo

from dynamo_megatron.checkpoint.errors import CheckpointError
from dynamo_megatron.checkpoint.manifest import read_manifest, record_files, write_manifest
from tests.policies import write_qwen3
from tests.ranks import run_on_ranks
from tests.unit.checkpoint.helpers import checkpointer, everything, policy, train


class Hostile:
    """Makes a folder when it is unpickled."""

    def __init__(self, evidence: Path) -> None:
        self.evidence = str(evidence)

    def __reduce__(self):
        return os.mkdir, (self.evidence,)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return write_qwen3(tmp_path_factory.mktemp("qwen3"))


@pytest.fixture(scope="module")
def saved(model_dir, tmp_path_factory):
    directory = tmp_path_factory.mktemp("checkpoints")

    def work():
        with policy(model_dir) as run:
            train(run, range(1))
            checkpointer(run, directory).save(1, {})

    run_on_ranks(work, 1)
    return directory / "step_00000001"


def _in_index(folder: Path, evidence: Path) -> str:
    (folder / ".metadata").write_bytes(pickle.dumps(Hostile(evidence)))
    return ".metadata"


def _in_index_beside_its_records(folder: Path, evidence: Path) -> str:
    index = pickle.loads((folder / ".metadata").read_bytes())
    index.planner_data = Hostile(evidence)
    (folder / ".metadata").write_bytes(pickle.dumps(index))
    return ".metadata"


def _in_common(folder: Path, evidence: Path) -> str:
    common = torch.load(folder / "common.pt", weights_only=True)
    torch.save(common | {"more": Hostile(evidence)}, folder / "common.pt")
    return "common.pt"


def _in_a_tensor(folder: Path, evidence: Path) -> str:
    content = io.BytesIO()
    torch.save(Hostile(evidence), content)
    _point_to(folder, "optimizer.state.exp_avg.decoder.final_layernorm.weight", content)
    return "__0_0.distcp"


def _point_to(folder: Path, key: str, content: io.BytesIO) -> None:
    file = folder / "__0_0.distcp"
    offset = file.stat().st_size
    with file.open("ab") as stream:
        stream.write(content.getvalue())
    index = pickle.loads((folder / ".metadata").read_bytes())
    (place,) = [entry for entry in index.storage_data if entry.fqn == key]
    index.storage_data[place] = _StorageInfo(file.name, offset, len(content.getvalue()))
    (folder / ".metadata").write_bytes(pickle.dumps(index))


PLACES = [_in_index, _in_index_beside_its_records, _in_common, _in_a_tensor]


def _doctored(saved: Path, target: Path, change) -> str:
    """Copy, change, and write a marker that fits: the attacker can do that too."""
    shutil.copytree(saved, target)
    named = change(target)
    write_manifest(target, replace(read_manifest(saved), files=_records(target)))
    return named


def _records(folder: Path):
    (folder / "complete.json").unlink()
    return record_files(folder, {})


def _load(model_dir, folder: Path) -> tuple[str, bool]:
    """The message of the refusal, and whether the policy stayed as it was."""

    def work():
        os.environ["TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"] = "1"
        with policy(model_dir) as run:
            before = everything(run)["tensors"]
            with pytest.raises(CheckpointError) as caught:
                checkpointer(run, folder.parent).load(folder)
            after = everything(run)["tensors"]
            return str(caught.value), all(torch.equal(before[name], after[name]) for name in before)

    return run_on_ranks(work, 1)[0]


@pytest.mark.parametrize("place", PLACES)
def test_a_hostile_pickle_is_refused_by_file_and_name_and_never_runs(
    place, model_dir, saved, tmp_path
):
    evidence = tmp_path / "evidence"
    folder = tmp_path / "step_00000001"
    file = _doctored(saved, folder, lambda target: place(target, evidence))
    message, _ = _load(model_dir, folder)
    assert not evidence.exists()
    assert f"{folder / file} is refused" in message
    assert "posix.mkdir" in message and "weights_only" not in message


def test_the_hostile_pickle_of_these_tests_does_run_where_nothing_refuses_it(tmp_path):
    pickle.loads(pickle.dumps(Hostile(tmp_path / "evidence")))
    assert (tmp_path / "evidence").exists()


def test_pickled_objects_are_refused_before_torch_reads_them(model_dir, saved, tmp_path):
    """torch's planner would read them without any restriction."""

    def change(folder: Path) -> None:
        index = pickle.loads((folder / ".metadata").read_bytes())
        index.state_dict_metadata["a/shard_0_1"] = BytesStorageMetadata()
        (folder / ".metadata").write_bytes(pickle.dumps(index))

    folder = tmp_path / "step_00000001"
    _doctored(saved, folder, change)
    message, untouched = _load(model_dir, folder)
    assert "it lists pickled objects: a/shard_0_1" in message
    assert untouched


def test_an_index_that_points_outside_the_checkpoint_is_refused(model_dir, saved, tmp_path):
    def change(folder: Path) -> None:
        index = pickle.loads((folder / ".metadata").read_bytes())
        place = next(iter(index.storage_data))
        index.storage_data[place] = replace(
            index.storage_data[place], relative_path="../../secret.distcp"
        )
        (folder / ".metadata").write_bytes(pickle.dumps(index))

    folder = tmp_path / "step_00000001"
    _doctored(saved, folder, change)
    message, untouched = _load(model_dir, folder)
    assert "files outside the checkpoint: ['../../secret.distcp']" in message
    assert untouched


@pytest.mark.parametrize("marker_fits", [False, True], ids=["bit flip", "damaged when saved"])
def test_a_damaged_tensor_is_noticed_and_its_file_named(marker_fits, model_dir, saved, tmp_path):
    folder = tmp_path / "step_00000001"
    shutil.copytree(saved, folder)
    index = pickle.loads((folder / ".metadata").read_bytes())
    (info,) = [
        value
        for entry, value in index.storage_data.items()
        if entry.fqn == "embedding.word_embeddings.weight"
    ]
    content = bytearray((folder / info.relative_path).read_bytes())
    if marker_fits:  # its archive has no directory any more
        content[info.offset + info.length - 60 : info.offset + info.length] = bytes(60)
    else:  # in the middle of the numbers: torch would load it without a word
        content[info.offset + info.length // 2] ^= 1
    (folder / info.relative_path).write_bytes(content)
    if marker_fits:
        write_manifest(folder, replace(read_manifest(saved), files=_records(folder)))
    message, _ = _load(model_dir, folder)
    file = folder / "__0_0.distcp"
    if marker_fits:
        assert f"{file} cannot be read (tensor embedding.word_embeddings.weight" in message
    else:
        assert f"{file} has the right size but another SHA-256" in message
    assert f"delete {folder} to start anew" in message
