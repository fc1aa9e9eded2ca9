import ast
from pathlib import Path

import pytest

import dynamo_megatron.algo

FILES = sorted(Path(dynamo_megatron.algo.__file__).parent.glob("*.py"))
ALLOWED_OWN = ("dynamo_megatron.algo", "dynamo_megatron.types")


def imported_names(tree):
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_the_mathematics_imports_no_collectives_no_megatron_and_no_configuration(path):
    names = list(imported_names(ast.parse(path.read_text())))
    assert not [n for n in names if n.startswith(("torch.distributed", "megatron"))]
    own = [n for n in names if n.startswith("dynamo_megatron")]
    assert not [n for n in own if not n.startswith(ALLOWED_OWN)]
