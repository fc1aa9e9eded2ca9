"""The architecture's boundaries, as tests."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "dynamo_megatron"
COLLECTIVES = {
    "all_reduce",
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_single",
    "all_gather_object",
    "all_to_all",
    "barrier",
    "broadcast",
    "broadcast_object_list",
    "gather",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "scatter",
    "send",
    "recv",
}
# Who may import what, inside the package. ``types`` is open to all.
LAYERS = {
    "algo": set(),
    "batching": set(),
    "hf": set(),
    "parallel": set(),
    "kernels": {"parallel"},
    "data": {"config"},
    "reward": set(),
    "observe": {"protocols", "load_config", "config"},
    "rollout": {"protocols"},
    "actor": {"algo", "batching", "hf", "kernels", "parallel"},
    "checkpoint": {"hf", "parallel"},
    "convert": {"actor", "assets", "checkpoint", "hf"},
    "evaluate": {
        "algo",
        "assets",
        "config",
        "data",
        "observe",
        "protocols",
        "reward",
        "rollout",
    },
    "stages": {"algo", "batching", "config", "evaluate", "parallel", "protocols", "rollout"},
}


def modules(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.py"))


def imported(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
    return names


@pytest.mark.parametrize("path", modules(PACKAGE / "algo"), ids=lambda p: p.name)
def test_mathematics_knows_nothing_of_ranks_and_configuration(path):
    forbidden = ("torch.distributed", "megatron", "dynamo_megatron.config", "omegaconf", "pydantic")
    assert [name for name in imported(path) if name.startswith(forbidden)] == []


@pytest.mark.parametrize("path", modules(PACKAGE / "kernels"), ids=lambda p: p.name)
def test_kernels_do_not_know_megatron(path):
    assert [name for name in imported(path) if name.startswith("megatron")] == []


@pytest.mark.parametrize("layer", LAYERS)
def test_imports_run_one_way(layer):
    allowed = LAYERS[layer] | {layer, "types"}
    strangers = {}
    for path in modules(PACKAGE / layer):
        inner = {
            name.split(".")[1] for name in imported(path) if name.startswith("dynamo_megatron.")
        }
        if inner - allowed:
            strangers[path.name] = sorted(inner - allowed)
    assert strangers == {}


def test_collectives_live_in_parallel_and_kernels():
    found = {}
    for path in modules(PACKAGE):
        if path.parent.name in ("parallel", "kernels"):
            continue
        calls = [
            node.func.attr
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
            if isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr in COLLECTIVES
            and isinstance(node.func.value, ast.Name)
            and node.func.value.id in ("dist", "distributed")
        ]
        if calls:
            found[str(path.relative_to(PACKAGE))] = calls
    assert found == {}


def test_only_build_names_concrete_parts():
    concrete = {"HfEngine", "RewardPool", "MegatronCheckpointer", "ShuffledPrompts"}
    homes = {"build.py", "hf_engine.py", "pool.py", "megatron.py", "shuffle.py"}
    users = {
        path.name
        for path in modules(PACKAGE)
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Name) and node.id in concrete
    }
    assert users <= homes


def test_no_pickle_and_no_evaluation_of_text():
    """Checkpoints are read by an allow-list; nothing else unpickles or evaluates."""
    pattern = re.compile(r"\bpickle\.loads?\(|\beval\(|(?<![\w.])exec\(|allow_pickle=True")
    users = [
        path.name
        for path in modules(PACKAGE)
        if pattern.search(path.read_text(encoding="utf-8").replace(".eval()", ""))
    ]
    assert users == []


@pytest.mark.parametrize("path", modules(PACKAGE), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_files_stay_readable(path):
    assert len(path.read_text(encoding="utf-8").splitlines()) <= 430


def test_functions_stay_readable():
    long = {}
    for path in modules(PACKAGE):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef):
                first = node.body[0]
                has_doc = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
                begin = (node.body[1] if has_doc and len(node.body) > 1 else first).lineno
                if node.end_lineno - begin > 75:
                    long[f"{path.name}:{node.name}"] = node.end_lineno - begin
    assert long == {}
