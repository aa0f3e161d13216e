"""Records as JSON, and their digests."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import json
import math
import re
import reprlib
import types
import typing
from collections.abc import Callable, Mapping, Set
from typing import Any, NoReturn, TypeVar, Union

T = TypeVar("T")
Read = Callable[[Any], Any]  # makes a value from JSON, or raises ValueError

LATER: Mapping[str, Any] = types.MappingProxyType({"later": True})
"""Metadata of a field that was added later. It is written only if not at its default: older digests stay valid."""

LONGEST = 1 << 20  # characters of the longest text that is accepted
LARGEST = 1e30  # the largest number that is accepted: results computed from such numbers are finite
_DEEPEST = 20  # max nesting of JSON without a declared type


class Lenient:
    """Base of records that ignore unknown fields, which a newer agent may write. Other records refuse them."""


class JsonHooks:
    """Base of records whose JSON has other fields than the record, or had them in an older version."""

    kinds: tuple[str, ...] = ()
    """In a union, the values of `kind` in JSON that mean this record; () for its default alone."""

    @staticmethod
    def post_dump(fields: dict[str, Any]) -> dict[str, Any]:
        """Return the fields of the JSON, given those of the record."""
        return fields

    @staticmethod
    def pre_load(value: Any) -> Any:
        """Return the fields of the record, given its JSON, which is not trusted and may be anything."""
        return value


def canonical(value: Any) -> str:
    """Return a value as JSON text with sorted keys and no spaces, from which `digest` is computed."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, default=_open)


def digest(value: Any, length: int = 64) -> str:
    """Return the first `length` hex digits of the sha256 of a value's canonical JSON."""
    return hashlib.sha256(canonical(value).encode()).hexdigest()[:length]


def to_json(value: Any) -> Any:
    """Return a value with each record in it as a dict by field name, and each tuple as a list."""
    if value is None or isinstance(value, (str, int, float)):  # first, because nearly every value is one of these
        return value
    if isinstance(value, (list, tuple)):
        return [to_json(v) for v in value]
    if isinstance(value, Mapping) or dataclasses.is_dataclass(value):
        return {str(k): to_json(v) for k, v in _open(value).items()}
    return value


def _open(value: Any) -> dict[str, Any]:
    """Return a mapping, or a record's fields for its JSON."""
    if isinstance(value, Mapping):
        return dict(value)
    fields = ((f, getattr(value, f.name)) for f in dataclasses.fields(value))
    kept = {f.name: content for f, content in fields if not (f.metadata.get("later") and content == _default(f))}
    return value.post_dump(kept) if isinstance(value, JsonHooks) else kept


def _default(field: dataclasses.Field[Any]) -> Any:
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


@dataclasses.dataclass(frozen=True)
class Within:
    """Limits for an Annotated type, both included: of a number, or of the length of a text or list.

    A spec is checked with pydantic, which takes the rule from here too.
    """

    least: float = -math.inf
    most: float = math.inf

    def __call__(self, value: Any) -> None:
        """Raise ValueError for a value outside the range."""
        measure, what = (value, "") if isinstance(value, (int, float)) else (len(value), " items or characters")
        if not self.least <= measure <= self.most:
            raise ValueError(f"{measure:g}{what} is not within {self.least:g} and {self.most:g}")

    def __get_pydantic_core_schema__(self, source: Any, inner: Callable[[Any], Mapping[str, Any]]) -> dict[str, Any]:
        return {**inner(source), "ge": self.least, "le": self.most}


@dataclasses.dataclass(frozen=True)
class Text:
    """Rule for an Annotated str: the whole text must match `pattern`; errors say `must be <wanted>`."""

    pattern: str
    wanted: str = ""

    def __call__(self, value: str) -> str:
        """Return the text; raise ValueError if it does not match."""
        if not re.fullmatch(self.pattern, value):
            raise ValueError(f"must be {self.wanted or f'of the form {self.pattern}'}")
        return value

    def __get_pydantic_core_schema__(self, source: Any, inner: Callable[[Any], Mapping[str, Any]]) -> dict[str, Any]:
        return {"type": "function-after", "function": {"type": "no-info", "function": self}, "schema": inner(source)}

    def __get_pydantic_json_schema__(self, schema: Any, inner: Callable[[Any], dict[str, Any]]) -> dict[str, Any]:
        return {**inner(schema), "pattern": f"^({self.pattern})$"}


def from_json(kind: type[T], value: Any) -> T:
    """Return a value of type `kind` from JSON that `to_json` gave; raises ValueError if it does not fit.

    Of a union of records, the one is chosen whose `kind` has the JSON's value as its default, else the one with exactly
    these fields. A TypedDict stays a dict, and may have further keys.
    """
    result: T = decoder(typing.cast("Any", kind))(value)
    return result


def _open_json(value: Any, depth: int = 0) -> Any:
    """Return any JSON whose numbers and texts can be stored and printed, or raise ValueError."""
    if depth > _DEEPEST:
        raise ValueError(f"it is nested more than {_DEEPEST} deep")
    if isinstance(value, (list, tuple)):
        return [_open_json(item, depth + 1) for item in value]
    if isinstance(value, dict):
        return {_text(name): _open_json(item, depth + 1) for name, item in value.items()}
    return _SCALARS[type(value)](value) if type(value) in _SCALARS else _wrong(value, "JSON")


def _text(value: Any) -> str:
    """Return a text; unpaired surrogates, from bytes that were not UTF-8, are replaced."""
    if type(value) is not str or len(value) > LONGEST:
        _wrong(value, f"text of at most {LONGEST} characters")
    return value if value.isascii() else value.encode("utf-8", "replace").decode()


def _wrong(value: Any, wanted: str) -> NoReturn:
    raise ValueError(f"{reprlib.repr(value)} is not {wanted}")


def _scalar(accepted: Callable[[Any], bool], wanted: str) -> Read:
    return lambda value: value if accepted(value) else _wrong(value, wanted)


_SCALARS: Mapping[Any, Read] = {
    str: _text,
    int: _scalar(lambda value: type(value) is int and -(1 << 63) <= value < 1 << 63, "integer of 64 bits"),
    float: _scalar(lambda value: type(value) in (int, float) and abs(value) <= LARGEST, "number"),
    bool: _scalar(lambda value: type(value) is bool, "true or false"),
    types.NoneType: _scalar(lambda value: value is None, "null"),
}


@functools.cache
def decoder(kind: Any) -> Read:
    """Return a function that decodes a value of this type from JSON or raises ValueError."""
    if kind is Any or kind in _SCALARS:
        return _open_json if kind is Any else _SCALARS[kind]
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Annotated:
        return functools.partial(_ruled, decoder(args[0]), args[1:])
    if origin is typing.Literal:
        wanted = f"one of {', '.join(map(str, args))}"
        known = {(type(arg), arg) for arg in args}  # True is no 1
        return _scalar(lambda value: type(value) in (str, int) and (type(value), value) in known, wanted)
    if origin is Union or origin is types.UnionType:
        records = [option for option in args if dataclasses.is_dataclass(option)]
        others = [decoder(option) for option in args if option not in records and option is not types.NoneType]
        return functools.partial(_united, types.NoneType in args, records, others)
    if origin is tuple and args[-1] is not Ellipsis:
        return functools.partial(_row, [decoder(item) for item in args])
    if origin in (tuple, list):
        item = decoder(args[0])
        return lambda value: origin(map(item, value)) if isinstance(value, (list, tuple)) else _wrong(value, "a list")
    if origin is not None and issubclass(origin, Mapping):
        return functools.partial(_mapped, decoder(args[0]), decoder(args[1]))
    if "declared" in vars(kind):  # the base of records that other packages declare
        return functools.partial(_united, False, [kind], [])
    hints = typing.get_type_hints(kind, include_extras=True)
    if typing.is_typeddict(kind):
        return functools.partial(_fields, {name: decoder(hint) for name, hint in hints.items()}, kind.__required_keys__)
    fields = dataclasses.fields(kind)
    needed = {f.name for f in fields if f.default is f.default_factory is dataclasses.MISSING}
    return functools.partial(_record, kind, {f.name: decoder(hints[f.name]) for f in fields}, needed)


def _ruled(base: Read, rules: tuple[Callable[[Any], None], ...], value: Any) -> Any:
    decoded = base(value)
    for rule in rules:
        rule(decoded)
    return decoded


def _row(items: list[Read], value: Any) -> tuple[Any, ...]:
    if not isinstance(value, (list, tuple)) or len(value) != len(items):
        _wrong(value, f"a list of {len(items)}")
    return tuple(item(each) for item, each in zip(items, value, strict=True))


def _mapped(name: Read, item: Read, value: Any) -> dict[Any, Any]:
    if not isinstance(value, Mapping):
        _wrong(value, "an object")
    return {name(key): item(each) for key, each in value.items()}


def _fields(known: Mapping[str, Read], needed: Set[str], value: Any) -> dict[str, Any]:
    """Return the fields of an object; unknown fields may have any JSON."""
    if not isinstance(value, dict):
        _wrong(value, "an object")
    if missing := sorted(needed - value.keys()):
        raise ValueError(f"it lacks {missing[0]!r}")
    fields = {}
    for name, content in value.items():
        key = _text(name)
        try:
            fields[key] = known.get(name, _open_json)(content)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from error
    return fields


def _record(kind: Any, known: Mapping[str, Read], needed: Set[str], value: Any) -> Any:
    if issubclass(kind, JsonHooks):
        value = kind.pre_load(value)
    if not isinstance(value, dict):
        raise ValueError(f"{kind.__name__} expects an object, not {type(value).__name__}")
    if issubclass(kind, Lenient):
        value = {name: content for name, content in value.items() if name in known}
    elif extra := sorted(value.keys() - known.keys()):
        raise ValueError(f"{kind.__name__} has no field {extra[0]!r}")
    return kind(**_fields(known, needed, value))


def _united(nullable: bool, records: list[Any], others: list[Read], value: Any) -> Any:
    if value is None and nullable:
        return None
    if records and (isinstance(value, dict) or not others):
        return decoder(_meant(records, value))(value) if isinstance(value, dict) else _wrong(value, "an object")
    for option in others[:-1]:
        with contextlib.suppress(ValueError):
            return option(value)
    return others[-1](value)


def _meant(records: list[Any], value: dict[str, Any]) -> Any:
    options = [kind for record in records for kind in vars(record).get("declared", [record])]
    for option in options:
        kinds = getattr(option, "kinds", ()) or [f.default for f in dataclasses.fields(option) if f.name == "kind"]
        if "kind" in value and value["kind"] in kinds:
            return option
    for option in options:
        fields = dataclasses.fields(option)
        if {f.name for f in fields if not f.metadata.get("later")} <= set(value) <= {f.name for f in fields}:
            return option
    raise ValueError(f"none of {[option.__name__ for option in options]} has the fields {sorted(value)}")
