"""``apply()``: when it acts, when it does nothing, when it refuses."""

import hashlib
import importlib.util
import shutil
import sys
from importlib import metadata
from pathlib import Path

import pytest
import torch

import megatron_patches
from megatron_patches import _guard
from megatron_patches._guard import checked_function, require_supported_version
from megatron_patches._import_hook import MegatronImportHook
from tests.ranks import run_on_ranks

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="patches are for CPU-only hosts")

ALL = (
    "import_warnings",
    "torch_view",
    "rng",
    "tensor_type_names",
    "cuda_methods",
    "sequence_parallel_norm",
    "distributed_optimizer_adamw",
    "no_jit_fusion",
)


def changed_by_apply():
    """What the package may change, as it stands now."""
    hooks = [finder for finder in sys.meta_path if isinstance(finder, MegatronImportHook)]
    return [len(hooks), type(torch.Tensor.cuda).__name__, "megatron.core" in sys.modules]


UNTOUCHED = [0, "method_descriptor", False]


def before_and_after_apply():
    before = changed_by_apply()
    names = [megatron_patches.apply(), megatron_patches.apply()]
    return [before, names, changed_by_apply()]


def test_importing_the_package_changes_nothing_and_apply_acts_once(fresh):
    before, (first, second), after = fresh.call(before_and_after_apply).value
    assert before == UNTOUCHED
    assert tuple(first) == tuple(second) == ALL
    assert after == [1, "function", False]


def apply_to_an_unpatched_megatron():
    sys.meta_path[:] = [f for f in sys.meta_path if not isinstance(f, MegatronImportHook)]
    with pytest.raises(
        megatron_patches.PatchError,
        match=r"megatron\.core is already imported.*before the first import of megatron\.core",
    ):
        megatron_patches.apply()


def test_apply_is_refused_after_megatron_was_imported(megatron_imported):
    run_on_ranks(apply_to_an_unpatched_megatron, 1)


def apply_where_cuda_is_available():
    torch.cuda.is_available = lambda: True
    names = megatron_patches.apply()
    refusals = {}
    for patch in megatron_patches._PATCHES:
        try:
            patch.apply(MegatronImportHook())
        except megatron_patches.PatchError as error:
            refusals[patch.NAME] = str(error)
    return [names, changed_by_apply(), refusals]


def test_apply_does_nothing_and_every_single_patch_is_refused_where_cuda_is_available(fresh):
    names, state, refusals = fresh.call(apply_where_cuda_is_available).value
    assert names == []
    assert state == UNTOUCHED
    assert tuple(refusals) == ALL
    for patch, message in refusals.items():
        assert message.startswith(f"the patch {patch!r} ")
        assert "training would silently leave the GPU" in message


def import_a_megatron_with_another_source(folder):
    """A tree of links to the installed megatron.core, with one function changed."""
    installed = Path(importlib.util.find_spec("megatron").submodule_search_locations[0]) / "core"
    copy = Path(folder) / "megatron" / "core"
    shutil.copytree(installed, copy, copy_function=lambda src, dst: Path(dst).symlink_to(src))
    changed = copy / "transformer" / "torch_norm.py"
    source = changed.read_text()
    changed.unlink()
    changed.write_text(source.replace("return norm_cls(", "return  norm_cls("))
    sys.path.insert(0, folder)
    megatron_patches.apply()
    import megatron.core.transformer.torch_norm  # noqa: F401


def test_importing_a_megatron_whose_patched_function_changed_is_refused(fresh, tmp_path):
    error = fresh.call(import_a_megatron_with_another_source, str(tmp_path)).error
    assert error.startswith("PatchError: WrappedTorchNorm.__new__ changed upstream")
    assert "delete the patch if upstream fixed it" in error


def load_module(path: Path, source: str):
    path.write_text(source)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_function_is_patched_only_if_its_source_has_the_recorded_hash(tmp_path):
    source = "def double(x):\n    return 2 * x\n"
    sha = hashlib.sha256(source.encode()).hexdigest()[:12]
    module = load_module(tmp_path / "first.py", source)
    assert checked_function(module, "double", sha=sha) is module.double

    changed = load_module(tmp_path / "second.py", source.replace("2", "3"))
    found = hashlib.sha256(source.replace("2", "3").encode()).hexdigest()[:12]
    with pytest.raises(
        megatron_patches.PatchError, match=rf"second\.double changed.*{sha}.*{found}"
    ):
        checked_function(changed, "double", sha=sha)
    with pytest.raises(megatron_patches.PatchError, match=r"second\.triple no longer exists"):
        checked_function(changed, "triple", sha=sha)


def test_another_release_of_megatron_is_refused(monkeypatch):
    monkeypatch.setattr(_guard.metadata, "version", lambda package: "0.17.0")
    with pytest.raises(megatron_patches.PatchError, match=r"0\.16\.1, installed is 0\.17\.0"):
        require_supported_version()


def test_a_missing_megatron_is_refused(monkeypatch):
    def missing(package):
        raise metadata.PackageNotFoundError(package)

    monkeypatch.setattr(_guard.metadata, "version", missing)
    with pytest.raises(megatron_patches.PatchError, match="installed is none"):
        require_supported_version()
