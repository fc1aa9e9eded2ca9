"""Sentences for what pydantic finds wrong in a configuration.

Each names the key, the value as the user gave it, where they gave it, what is wanted, and the way
out.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import yaml
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from dynamo_megatron.config_keys import ConfigKey, config_keys, nearest_keys

Loc = tuple[str | int, ...]
"""A place in the configuration: names of keys and indices of lists."""


def line_numbers(root: yaml.Node | None) -> dict[str, int]:
    """The line, from 1, of each dotted path of a composed YAML document."""
    return {_dotted(loc): line for loc, line in _node_lines(root, ())}


def explain(
    error: ValidationError,
    data: Mapping[str, Any],
    lines: Mapping[str, int],
    overrides: Sequence[str],
) -> list[str]:
    """One text for each problem that pydantic found.

    Args:
        error: what ``Config.model_validate(data)`` raised.
        data: the merged and resolved configuration.
        lines: the file's line for each dotted path it sets.
        overrides: the ``key=value`` texts that were merged over the file.
    """
    details = error.errors(include_url=False)
    places = [_place(detail["loc"], data) for detail in details]
    explainer = _Explainer(lines, overrides)
    problems: list[str] = []
    for (loc, variant), detail in zip(places, details, strict=True):
        inner = any(other[: len(loc)] == loc and other != loc for other, _ in places)
        # pydantic counts invalid items of a list as absent: only their own problems are real.
        if detail["type"] != "too_short" or not inner:
            problems += explainer.explain(loc, variant, detail)
    return problems


def _node_lines(node: yaml.Node | None, loc: Loc) -> Iterator[tuple[Loc, int]]:
    children: list[tuple[str | int, yaml.Node, yaml.Node]] = []
    if isinstance(node, yaml.MappingNode):
        children = [(str(key.value), key, value) for key, value in node.value]
    elif isinstance(node, yaml.SequenceNode):
        children = [(index, value, value) for index, value in enumerate(node.value)]
    for name, place, value in children:
        yield (*loc, name), place.start_mark.line + 1
        yield from _node_lines(value, (*loc, name))


def _place(loc: Loc, data: Any) -> tuple[Loc, str]:
    """A pydantic location without the names of union branches, and the branch it went through."""
    place: list[str | int] = []
    variant, previous, current = "", None, data
    for item in loc:
        in_list = isinstance(previous, int) and isinstance(current, Mapping)
        previous = item
        if in_list and current.get("kind") == item:
            variant = str(item)
            continue
        place.append(item)
        current = _child(current, item)
    return tuple(place), variant


def _child(parent: Any, item: str | int) -> Any:
    if isinstance(parent, Mapping):
        return parent.get(item)
    if isinstance(parent, Sequence) and isinstance(item, int) and item < len(parent):
        return parent[item]
    return None


def _dotted(loc: Loc) -> str:
    return ".".join(str(item) for item in loc)


def _starred(loc: Loc) -> str:
    return ".".join("*" if isinstance(item, int) else str(item) for item in loc)


class _Explainer:
    """Knows the keys that exist and where the user set each value."""

    def __init__(self, lines: Mapping[str, int], overrides: Sequence[str]) -> None:
        self._lines = lines
        self._overrides = [(o.partition("=")[0].strip(), o) for o in overrides]
        self._keys = config_keys()

    def explain(self, loc: Loc, variant: str, detail: ErrorDetails) -> list[str]:
        """Texts for one of pydantic's errors; several when a whole section is wrong."""
        kind, value = detail["type"], detail["input"]
        if kind in ("extra_forbidden", "invalid_key"):
            return self._unknown(loc, variant, value)
        if kind == "missing":
            return self._missing(loc, variant)
        if kind == "union_tag_not_found":
            return self._missing((*loc, "kind"), "")
        if kind == "union_tag_invalid":
            loc, value = (*loc, "kind"), value["kind"]
        if kind == "value_error":
            message = detail["msg"].removeprefix("Value error, ")
            prefix = _dotted(loc)
            # The validators of the schema name their keys themselves.
            return [message if prefix.split(".")[0] in message else f"{prefix}: {message}"]
        return [self._ill_typed(loc, value, self._wanted(loc, variant, detail))]

    def _wanted(self, loc: Loc, variant: str, detail: ErrorDetails) -> str:
        if detail["type"] in ("model_type", "model_attributes_type"):
            return "a section"
        key = self._key(loc, variant)
        words = key.type if key is not None else detail["msg"]
        return f"finite {words}" if detail["type"] == "finite_number" else words

    def _key(self, loc: Loc, variant: str) -> ConfigKey | None:
        """The schema's key; where it differs between kinds, that of ``variant``, or all in one."""
        path = _starred(loc)
        found = [key for key in self._keys if key.path == path]
        found = [key for key in found if variant in key.variant.split(" | ")] or found
        if not found:
            return None
        types = " | ".join(dict.fromkeys(key.type for key in found))
        return dataclasses.replace(found[0], type=types)

    def _where(self, loc: Loc) -> str:
        """Where the user gave it: the last override that touches it, else the file's line."""
        path = _dotted(loc)
        for key, override in reversed(self._overrides):
            if path == key or path.startswith(f"{key}.") or key.startswith(f"{path}."):
                return f" (override {override})"
        return f" (line {self._lines[path]})" if path in self._lines else ""

    def _unknown(self, loc: Loc, variant: str, value: Any) -> list[str]:
        path = f"{_dotted(loc)}{self._where(loc)}"
        if elsewhere := [key.variant for key in self._keys if key.path == _starred(loc)]:
            return [
                f"{path}: this key exists for kind {' | '.join(elsewhere)}, not for kind "
                f"{variant}. Remove it or change kind."
            ]
        near = nearest_keys(_starred(loc), self._keys)
        if near:
            parents = _starred(loc[:-1]), _dotted(loc[:-1])
            names = " or ".join(name.replace(*parents) if loc[:-1] else name for name in near)
            return [f"{path}: unknown key, did you mean {names}?"]
        if isinstance(value, Mapping) and value:
            # An unknown section: its keys tell more than its name.
            items = value.items()
            return [p for name, inner in items for p in self._unknown((*loc, name), "", inner)]
        section = _starred(loc[:-1])
        names = self._names_in(section)
        hint = f"{section or 'the top level'} has {', '.join(names)}" if names else "remove it"
        return [f"{path}: unknown key; {hint}."]

    def _names_in(self, section: str) -> list[str]:
        parents = ((key.path.rpartition("."), key) for key in self._keys)
        return list(dict.fromkeys(leaf for (parent, _, leaf), _ in parents if parent == section))

    def _missing(self, loc: Loc, variant: str) -> list[str]:
        path = _starred(loc)
        key = self._key(loc, variant)
        if key is not None and key.is_section and "list" not in key.type:
            below = [k for k in self._keys if k.path.startswith(f"{path}.") and "*" not in k.path]
            required = [k for k in below if k.default is None]
        else:
            required = [key] if key is not None else []
        problems = []
        for one in required:
            place = _dotted(loc) if one is key else one.path
            doc = f" {one.doc}" if one.doc and not one.is_section else ""
            problems.append(
                f"{place}: required, but missing. Add it to the file or give "
                f"{place}=... ({one.type}).{doc}"
            )
        return problems

    def _ill_typed(self, loc: Loc, value: Any, wanted: str) -> str:
        place = f"{_dotted(loc)}{self._where(loc)}"
        if value is None and wanted == "a section":
            return f"{place}: the section is empty. Give it keys, or remove its line."
        return f"{place}: got {_show(value)}, wanted: {wanted}.{_remedy(value, wanted)}"


def _show(value: Any) -> str:
    kinds = {
        bool: "true or false",
        int: "an integer",
        float: "a number",
        str: "text",
        dict: "a section",
        list: "a list",
    }
    if value is None:
        return "nothing (null)"
    shown = str(value).lower() if isinstance(value, bool) else repr(value)
    shown = shown if len(shown) <= 60 else f"{shown[:57]}..."
    return f"{shown} ({kinds.get(type(value), type(value).__name__)})"


def _remedy(value: Any, wanted: str) -> str:
    if isinstance(value, str) and " | " in wanted:
        near = difflib.get_close_matches(value, wanted.split(" | "), n=1)
        return f" Did you mean {near[0]}?" if near else ""
    if isinstance(value, str) and wanted.startswith(("integer", "number")):
        try:
            float(value)
        except ValueError:
            return ""
        return " Remove the quotes."
    if isinstance(value, str) and wanted.startswith("true or false"):
        return " Write true or false, without quotes."
    if isinstance(value, bool | int | float) and wanted.startswith("text"):
        return " Put it in quotes."
    if isinstance(value, float) and wanted.startswith("integer") and value.is_integer():
        return f" Write {int(value)}."
    return ""
