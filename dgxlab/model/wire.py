"""Records over the wire, and digests of what they say."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import sys
import types
import typing
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar, Union

T = TypeVar("T")

LATER: Mapping[str, Any] = types.MappingProxyType({"later": True})
"""Metadata of a field that came later: it is written only where it differs from its default, so that what was recorded
before keeps its digest."""


def canonical(value: Any) -> str:
    """Return JSON with sorted keys and no spaces: the text that digests are made from."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, default=_open)


def _open(value: Any) -> dict[str, Any]:
    """Return what json has no word for as an object."""
    if isinstance(value, Mapping):
        return dict(value)
    return dict(_written(value))


def _written(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the fields of a record that stand in its JSON."""
    for f in dataclasses.fields(value):
        said = getattr(value, f.name)
        if not (f.metadata and said == f.default):
            yield f.name, said


def digest(value: Any, length: int = 64) -> str:
    """Return the first `length` hex digits of the sha256 of a value's canonical JSON."""
    return hashlib.sha256(canonical(value).encode()).hexdigest()[:length]


def to_json(value: Any) -> Any:
    """Turn records into plain JSON values; tuples become lists, fields keep their names."""
    if value is None or isinstance(value, (str, int, float)):  # first, because nearly every value is one of these
        return value
    if isinstance(value, (list, tuple)):
        return [to_json(v) for v in value]
    if isinstance(value, Mapping):
        return {str(k): to_json(v) for k, v in value.items()}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {name: to_json(said) for name, said in _written(value)}
    return value


def from_json(kind: type[T], value: Any) -> T:
    """Rebuild a record from `to_json`'s output.

    A union of records is told apart by its `kind` field's default, else by which record has exactly the keys.

    Raises:
        ValueError: if the value does not fit.
    """
    result: T = _decode(kind, value)
    return result


def _decode(kind: Any, value: Any) -> Any:
    origin = typing.get_origin(kind)
    if dataclasses.is_dataclass(kind):
        return _decode_record(kind, value)
    if origin is tuple:
        (item, *_) = typing.get_args(kind)
        return tuple(_decode(item, v) for v in value)
    if origin is not None and isinstance(origin, type) and issubclass(origin, Mapping):
        (_, item) = typing.get_args(kind)
        return {k: _decode(item, v) for k, v in value.items()}
    if origin is Union or origin is types.UnionType:
        return _decode_union(typing.get_args(kind), value)
    return value


def _decode_record(kind: Any, value: Any) -> Any:
    if not isinstance(value, dict):
        raise ValueError(f"{kind.__name__} expects an object, not {type(value).__name__}")
    hints = _hints(kind)
    if extra := sorted(set(value) - set(hints)):
        raise ValueError(f"{kind.__name__} has no field {extra[0]!r}")
    try:
        return kind(**{name: _decode(hints[name], v) for name, v in value.items()})
    except TypeError as error:
        raise ValueError(f"{kind.__name__}: {error}") from error


def _decode_union(options: tuple[Any, ...], value: Any) -> Any:
    records: list[Any] = [option for option in options if dataclasses.is_dataclass(option)]
    if not isinstance(value, dict) or not records:
        return value
    for option in records:
        names = {f.name: f.default for f in dataclasses.fields(option)}
        if "kind" in value and names.get("kind") == value["kind"]:
            return _decode_record(option, value)
    for option in records:
        fields = dataclasses.fields(option)
        if {f.name for f in fields if not f.metadata} <= set(value) <= {f.name for f in fields}:
            return _decode_record(option, value)
    raise ValueError(f"none of {[record.__name__ for record in records]} has the fields {sorted(value)}")


_hint_cache: dict[Any, dict[str, Any]] = {}


def _hints(kind: Any) -> dict[str, Any]:
    if kind not in _hint_cache:
        _hint_cache[kind] = typing.get_type_hints(kind, vars(sys.modules[kind.__module__]))
    return _hint_cache[kind]
