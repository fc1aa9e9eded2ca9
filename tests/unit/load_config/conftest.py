"""A good configuration file, and what is said about a bad one."""

from pathlib import Path

import pytest

from dynamo_megatron.load_config import ConfigError, load_config

GOOD = """\
run:
  dir: runs/a
  num_steps: 3
model:
  path: builtin:tiny
data:
  train:
    - {kind: arithmetic, num_problems: 5, split: train}
    - {kind: jsonl, path: problems.jsonl}
"""


@pytest.fixture
def good(tmp_path: Path) -> Path:
    path = tmp_path / "good.yaml"
    path.write_text(GOOD)
    return path


def error_of(path: Path, *overrides: str, text: str | None = None) -> str:
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides)
    return str(caught.value)


def problems_of(path: Path, *overrides: str, text: str | None = None) -> list[str]:
    lines = error_of(path, *overrides, text=text).splitlines()
    return [line.removeprefix("  - ") for line in lines if line.startswith("  - ")]
