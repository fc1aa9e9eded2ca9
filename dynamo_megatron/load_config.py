"""From a YAML file and ``a.b=value`` overrides to a checked ``Config``, and back.

OmegaConf reads, merges and resolves; pydantic checks. Everything a user can get wrong becomes one
``ConfigError`` that lists every problem with its place, its reason and its remedy.
"""

from __future__ import annotations

import difflib
import os
import re
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException
from pydantic import ValidationError

from dynamo_megatron.config import Config
from dynamo_megatron.config_errors import explain, line_numbers
from dynamo_megatron.config_keys import ConfigError, describe_config

__all__ = [
    "RESOLVED_NAME",
    "ConfigError",
    "describe_config",
    "load_config",
    "to_yaml",
    "write_resolved",
]

RESOLVED_NAME = "config.yaml"
"""File in the run's folder that holds the resolved configuration."""


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Read, merge, resolve and check the configuration of a run.

    Args:
        path: a YAML file with the sections of ``Config``.
        overrides: ``a.b=value`` or ``a.0.b=value``, applied in order; values are YAML.

    Raises:
        ConfigError: the file, an override or a value cannot be used.
    """
    path = Path(path)
    text = _read_text(path)
    merged, root = _parse(path, text)
    problems = [problem for override in overrides if (problem := _apply(merged, override))]
    if problems:
        raise ConfigError(_report(path, problems))
    data = _resolve(path, merged)
    try:
        return Config.model_validate(data)
    except ValidationError as error:
        problems = explain(error, data, line_numbers(root), overrides)
        raise ConfigError(_report(path, problems)) from None


def to_yaml(config: Config) -> str:
    """The configuration with every default, as YAML that ``load_config`` reads back unchanged."""
    escaped = _map_strings(config.model_dump(mode="json"), _escape_interpolation)
    return OmegaConf.to_yaml(OmegaConf.create(escaped))


def write_resolved(config: Config, run_dir: str | Path) -> Path:
    """Write ``config.yaml`` into the run's folder: whole, or not at all.

    Returns:
        The file written.
    """
    target = Path(run_dir) / RESOLVED_NAME
    target.parent.mkdir(parents=True, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{RESOLVED_NAME}.")
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(to_yaml(config))
            file.flush()
            os.fsync(file.fileno())
        # mkstemp makes a private file; the run's folder is read by colleagues and tools.
        Path(temporary).chmod(0o644)
        Path(temporary).replace(target)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    return target


def changed_keys(saved: Path, config: Config) -> list[str]:
    """What a resolved configuration on disk said otherwise, as ``key: old -> new``.

    Length, folder and resume mode of the run may differ; an unreadable file compares as equal.
    """
    try:
        before = _flat(OmegaConf.to_container(OmegaConf.load(saved)))
    except (OSError, yaml.YAMLError, OmegaConfBaseException):
        return []
    after = _flat(config.model_dump(mode="json"))
    free = ("run.num_steps", "run.dir", "run.resume", "observe.")
    return [
        f"{key}: {before.get(key)} -> {after.get(key)}"
        for key in sorted(before.keys() | after.keys())
        if before.get(key) != after.get(key) and not key.startswith(free)
    ]


def _flat(value: Any, prefix: str = "") -> dict[str, Any]:
    pairs = value.items() if isinstance(value, Mapping) else enumerate(value)
    leaves: dict[str, Any] = {}
    for key, inner in pairs:
        if isinstance(inner, Mapping | list) and inner:
            leaves |= _flat(inner, f"{prefix}{key}.")
        else:
            leaves[f"{prefix}{key}"] = inner
    return leaves


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        near = difflib.get_close_matches(path.name, _yaml_names(path.parent), n=1)
        hint = f"Did you mean {path.parent / near[0]}?" if near else "Give the path of a YAML file."
        raise ConfigError(f"there is no configuration file {path}. {hint}") from None
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else f"it is not UTF-8 text ({error})"
        raise ConfigError(
            f"the configuration {path} cannot be read: {reason}. Give the path of a readable "
            "YAML file."
        ) from None


def _yaml_names(folder: Path) -> list[str]:
    return [p.name for p in folder.glob("*.y*ml")] if folder.is_dir() else []


def _parse(path: Path, text: str) -> tuple[DictConfig, yaml.Node | None]:
    """The configuration, and the YAML nodes that know its line numbers."""
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        if not isinstance(root, yaml.MappingNode | None):
            raise ConfigError(
                f"{path} is not a mapping of sections. A configuration starts with sections such "
                "as 'run:', 'model:' and 'data:'."
            )
        # A mapping or nothing makes a DictConfig; no annotation of OmegaConf says so.
        return cast(DictConfig, OmegaConf.create(text)), root
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f", line {mark.line + 1}" if mark else ""
        raise ConfigError(f"{path}{place} is not valid YAML: {_yaml_reason(error)}") from None
    except (yaml.YAMLError, OmegaConfBaseException) as error:
        raise ConfigError(f"{path} is not valid YAML: {_first_line(error)}.") from None


def _yaml_reason(error: yaml.MarkedYAMLError) -> str:
    problem = str(error.problem or error.context)
    if duplicate := re.match(r"found duplicate key (.*)", problem):
        return f"the key {duplicate[1]} stands twice in one section. Remove one of the two."
    return f"{problem}. Check the indentation, quotes and brackets there."


def _apply(merged: DictConfig, override: str) -> str | None:
    """Merge one override in place; returns the problem with it, or None."""
    key, equals, value = override.partition("=")
    if not equals or not key.strip():
        return (
            f"override {override!r}: not of the form key=value. Write for example "
            "optimizer.lr=1e-6, without spaces around '='."
        )
    try:
        merged.merge_with_dotlist([override])
    except yaml.YAMLError:
        return (
            f"override {override!r}: the value {value} is not valid YAML. Close its brackets and "
            "quotes, and quote the whole override for the shell."
        )
    except (OmegaConfBaseException, ValueError, LookupError, TypeError) as error:
        return (
            f"override {override!r}: {_first_line(error)}. The path must lead through sections "
            "that exist, and through places that exist in lists (data.train.0.name)."
        )
    return None


def _resolve(path: Path, merged: DictConfig) -> dict[str, Any]:
    try:
        data = OmegaConf.to_container(merged, resolve=True, throw_on_missing=True)
        return cast(dict[str, Any], data)
    except MissingMandatoryValue as error:
        problem = f"{error.full_key}: stands as ???, a value to be given. Set {error.full_key}=..."
        raise ConfigError(_report(path, [problem])) from None
    except OmegaConfBaseException as error:
        problem = (
            f"{error.full_key}: {_first_line(error)}. Interpolations name another key by its full "
            "path, ${run.dir}, or the environment, ${oc.env:NAME}."
        )
        raise ConfigError(_report(path, [problem])) from None


def _report(path: Path, problems: Sequence[str]) -> str:
    count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
    lines = [f"{path}: {count} in the configuration", *(f"  - {problem}" for problem in problems)]
    return "\n".join([*lines, "All keys with their meaning: dynamo-megatron config"])


def _map_strings(value: Any, change: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {key: _map_strings(inner, change) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_map_strings(inner, change) for inner in value]
    return value


def _escape_interpolation(text: str) -> str:
    # OmegaConf reads \\${ as a literal ${, and a backslash before that as one of a pair.
    return re.sub(r"(\\*)\$\{", r"\1\1\\${", text)


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")
