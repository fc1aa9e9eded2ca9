"""The keys of the configuration as a flat list: for documentation and for error messages.

A key's path is dotted, with ``*`` for a place in a list: ``data.train.*.num_problems``.
"""

from __future__ import annotations

import difflib
import re
import types
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import annotated_types
import yaml
from pydantic.fields import FieldInfo

from dynamo_megatron.config import Config, Section


class ConfigError(ValueError):
    """The configuration cannot be used. The message says where, why, and what to change."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigKey:
    """One key of the configuration.

    Attributes:
        path: dotted path, ``*`` for a place in a list.
        variant: the ``kind`` for which the key exists, "" where it always does.
        type: the values it takes, in words.
        default: its default as YAML, or None where it is required.
        doc: its meaning, from the schema.
        is_section: it holds further keys.
    """

    path: str
    variant: str
    type: str
    default: str | None
    doc: str
    is_section: bool


def config_keys() -> tuple[ConfigKey, ...]:
    """Every key of the configuration, in the schema's order, a section before its keys."""
    return tuple(_section_keys(Config, "", ""))


def nearest_keys(path: str, keys: Sequence[ConfigKey]) -> list[str]:
    """Known keys that an unknown one may have meant, best first, at most three.

    A misspelt name in its own section comes first, then the same name in another section, then
    whatever path reads alike.

    Args:
        path: the unknown key's dotted path, ``*`` for a place in a list.
        keys: the known keys.
    """
    parent, _, leaf = path.rpartition(".")
    known = list(dict.fromkeys(key.path for key in keys))
    siblings = {key.rpartition(".")[2]: key for key in known if key.rpartition(".")[0] == parent}
    found = [siblings[name] for name in difflib.get_close_matches(leaf, siblings, n=1, cutoff=0.7)]
    # Same words in another order: tensor_parallel means parallel.tensor.
    words = sorted(re.split(r"[._]", path))
    namesakes = [
        key
        for key in known
        if key.rpartition(".")[2] == leaf or sorted(re.split(r"[._]", key)) == words
    ]
    # The path decides between namesakes: cilp.low means algorithm.clip.low.
    found += sorted(namesakes, key=lambda key: -difflib.SequenceMatcher(None, path, key).ratio())
    if not found and parent not in known:
        # Below a known section, every path reads alike.
        found += difflib.get_close_matches(path, known, n=1, cutoff=0.75)
    if not found:
        leaves = {key.rpartition(".")[2]: key for key in known}
        found += [leaves[n] for n in difflib.get_close_matches(leaf, leaves, n=1, cutoff=0.8)]
    return list(dict.fromkeys(found))[:3]


def describe_config(prefix: str = "") -> str:
    """The schema for people: every key with its type, default and meaning.

    Args:
        prefix: only keys at or below this one, for example ``algorithm.modulation``.

    Raises:
        ConfigError: there is no such key.
    """
    keys = config_keys()
    prefix = prefix.strip(".")
    wanted = [k for k in keys if not prefix or f"{k.path}.".startswith(f"{prefix}.")]
    if not wanted:
        near = nearest_keys(prefix, keys)
        hint = f"Did you mean {' or '.join(near)}?" if near else "Leave it out to see all keys."
        raise ConfigError(f"there is no configuration key {prefix}. {hint}")
    return "\n".join(line for key in wanted for line in _describe(key)) + "\n"


def _describe(key: ConfigKey) -> Iterator[str]:
    if key.is_section:
        yield ""
        yield f"# {key.path}" + (f": {key.type}" if key.type != "section" else "")
    else:
        default = "required" if key.default is None else f"default {key.default}"
        only = f"; for kind {key.variant}" if key.variant else ""
        yield f"{key.path}    ({key.type}; {default}{only})"
    for line in key.doc.splitlines():
        yield f"    {line}" if not key.is_section else f"# {line}"


def _section_keys(section: type[Section], prefix: str, variant: str) -> Iterator[ConfigKey]:
    for name, field in section.model_fields.items():
        path = f"{prefix}{name}"
        children = list(_child_sections(field.annotation))
        is_list = get_origin(field.annotation) is tuple
        yield ConfigKey(
            path=path,
            variant=variant,
            type=_field_type(field),
            default=_default(field),
            doc=_doc(field, children),
            is_section=bool(children),
        )
        for child in children:
            kind = child.model_fields.get("kind") if is_list else None
            child_variant = " | ".join(get_args(kind.annotation)) if kind is not None else ""
            yield from _section_keys(child, f"{path}.*." if is_list else f"{path}.", child_variant)


def _child_sections(annotation: Any) -> Iterator[type[Section]]:
    if isinstance(annotation, type) and issubclass(annotation, Section):
        yield annotation
    for argument in get_args(annotation):
        yield from _child_sections(argument)


def _doc(field: FieldInfo, children: Sequence[type[Section]]) -> str:
    if field.description:
        return " ".join(field.description.split())
    if len(children) == 1 and children[0].__doc__:
        return " ".join(children[0].__doc__.split())
    return ""


def _default(field: FieldInfo) -> str | None:
    if field.is_required():
        return None
    if isinstance(field.default, Section):
        return "{}"
    text = yaml.safe_dump(field.default, default_flow_style=True, width=1000)
    return text.removesuffix("\n").removesuffix("...").strip()


def _field_type(field: FieldInfo) -> str:
    return _with_bounds(_type_words(field.annotation), field.metadata)


def _type_words(annotation: Any) -> str:
    words = {int: "integer", float: "number", bool: "true or false", str: "text"}
    if annotation in words:
        return words[annotation]
    if annotation is type(None):
        return "null"
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return "section"
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return " | ".join(str(value) for value in arguments)
    if origin is Annotated:
        return _with_bounds(_type_words(arguments[0]), arguments[1:])
    if origin in (Union, types.UnionType):
        return " or ".join(dict.fromkeys(_type_words(argument) for argument in arguments))
    if origin is tuple:
        return f"list of {_type_words(arguments[0])}s"
    raise TypeError(
        f"the configuration's type {annotation!r} has no name for people: add it to "
        "config_keys._type_words."
    )


def _with_bounds(words: str, metadata: Sequence[Any]) -> str:
    bounds = []
    for item in metadata:
        for symbol, kind, name in (
            (">=", annotated_types.Ge, "ge"),
            (">", annotated_types.Gt, "gt"),
            ("<=", annotated_types.Le, "le"),
            ("<", annotated_types.Lt, "lt"),
        ):
            constraints = [item] if isinstance(item, kind) else _field_constraints(item, kind)
            bounds += [f"{symbol} {getattr(c, name):g}" for c in constraints]
        lengths = [item] if isinstance(item, annotated_types.MinLen) else []
        lengths += _field_constraints(item, annotated_types.MinLen)
        bounds += [f"at least {c.min_length} long" for c in lengths]
    return f"{words} {' and '.join(bounds)}" if bounds else words


def _field_constraints(item: Any, kind: type) -> list[Any]:
    # Nested in a union, Annotated[int, Field(ge=1)] keeps its FieldInfo unexpanded.
    return [c for c in item.metadata if isinstance(c, kind)] if isinstance(item, FieldInfo) else []
