"""The strict YAML loader: plain values with file and line; values that YAML 1.1 would convert are refused.

Events are counted and their nesting is limited while they are read, so that a hostile file is refused before it costs
time, memory or the interpreter's recursion limit.
"""

from __future__ import annotations

import difflib
import math
import re
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import yaml
from pydantic import TypeAdapter, ValidationError

from dgxlab.errors import SpecError, edit
from dgxlab.spec.nodes import SET, Loc, Mark, Node, Problem, Scalar, explain, fail, plain, printable, refuse

T = TypeVar("T")

MAX_BYTES = 1_000_000
MAX_DEPTH = 32
_TOO_DEEP = f"is nested more than {MAX_DEPTH} deep"
_MAX_VALUES = 50_000
_MAX_INT = 2**63 - 1

_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""Only its parser is used. libyaml reads 10,000 values in 45 ms, the Python parser in 190 ms."""

_UNREADABLE = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff\ufffe\uffff]")
"""Control characters, and line breaks that YAML counts but editors do not."""
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")
"""Forbidden in strings after decoding escapes: an argument with a NUL cannot be passed to a program."""
_INT = re.compile(r"[-+]?(0|[1-9][0-9]*)")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_TOO_LARGE = "is too large for a number: quote it if text is meant"
_SURPRISES = [
    (re.compile(pattern), why)
    for pattern, why in {
        r"(?i:on|off|yes|no|y|n)": "is a boolean to YAML 1.1: write true or false, or quote it",
        r"(?!true|false)(?i:true|false)": "must be written true or false, in lower case, or quoted",
        r"(?!null)(?i:null)": "must be written null, in lower case, or quoted",
        r"[-+]?0([xX][0-9a-fA-F_]+|[oO][0-7_]+|[bB][01_]+)": "is a number in another base: quote it",
        r"[-+]?0[0-9_]+": "is an octal number to YAML 1.1: drop the leading zero, or quote it",
        r"[-+]?[0-9]+(:[0-5]?[0-9])+(\.[0-9_]*)?": "is a base-60 number to YAML 1.1: quote it",
        r"[-+]?\.?[0-9](?=[0-9.]*_)[0-9_.]*([eE][-+]?[0-9]+)?": "has underscores: drop them, or quote it",
        r"[0-9]{4}-[0-9]{1,2}-[0-9]{1,2}([Tt \t].*)?": "is a timestamp to YAML 1.1: quote it",
        r"[-+]?\.(?i:inf|nan)": "is not a finite number: quote it if text is meant",
        r"=": "is a special value to YAML 1.1: quote it",
    }.items()
]


def read_file(path: Path, label: str, *, named_at: Mark | None = None) -> Node:
    """Read one YAML file: a regular file of at most 1 MB of UTF-8.

    Its name in errors is `label`; errors of opening it are reported at the `extends` that names it, `named_at`. Raises
    SpecError if it cannot be read, is not YAML, or has values that this loader refuses.
    """
    return _parse(_text(path, label, named_at), Mark(label, 1), ())


def read_settings(path: Path, kind: TypeAdapter[T]) -> tuple[T, Node]:
    """Read a user's file of settings, whose text may be comments alone; SpecError with the command that opens it."""
    start = Mark(str(path), 1)
    try:
        text = _text(path, str(path), None)
        is_empty = all(line.lstrip()[:1] in ("", "#") for line in text.splitlines())
        tree = Node({}, start) if is_empty else _parse(text, start, ())
        try:
            return kind.validate_python(plain(tree)), tree
        except ValidationError as error:
            refuse(explain(error, tree, kind.json_schema()))
    except SpecError as error:
        error.next = edit(path)
        raise


def read_value(text: str, loc: Loc) -> Node:
    """Read the value of a `--set` by the rules of `read_file`; "" is null. Errors name `loc`, its place in the tree."""
    if len(text) > MAX_BYTES:
        fail(SET, loc, "is larger than 1 MB")
    return _parse(text, SET, loc) if text.strip() else Node(None, SET)


def _text(path: Path, label: str, named_at: Mark | None) -> str:
    def unread(why: str) -> NoReturn:
        if named_at is None:
            fail(Mark(label), (), why)
        fail(named_at, ("extends",), f"{why}: {label}")

    try:
        # Looked at before it is opened: opening a named pipe would wait for a writer.
        if not stat.S_ISREG(path.stat().st_mode):
            unread("is not a regular file")
        with open(path, "rb") as file:
            content = file.read(MAX_BYTES + 1)
    except FileNotFoundError:
        names = [] if named_at else [other.name for other in path.parent.glob("*")]
        close = difflib.get_close_matches(path.name, names, n=1)
        unread(f"no such file; did you mean {close[0]}?" if close else "no such file")
    except (OSError, ValueError) as error:
        unread(f"cannot be read: {getattr(error, 'strerror', None) or error}")
    if len(content) > MAX_BYTES:
        unread("is larger than 1 MB")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        fail(Mark(label, line), (), f"is not valid UTF-8 (byte {error.start})")


def _parse(text: str, start: Mark, loc: Loc) -> Node:
    if bad := _UNREADABLE.search(text):
        line = text.count("\n", 0, bad.start())
        fail(_at(start, line), loc, f"holds a character that is not allowed, U+{ord(bad[0]):04X}")
    reader = _Reader(text, start, loc)
    try:
        tree = reader.document()
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line if error.problem_mark else 0
        # libyaml looks ahead, and may meet its own limit before _Reader meets MAX_DEPTH
        deep = "nesting depth" in str(error.problem)
        fail(_at(start, line), loc, _TOO_DEEP if deep else f"is not YAML: {error.problem}")
    except (yaml.YAMLError, ValueError, OverflowError) as error:
        # The Python parser lets chr() fail on an escape beyond Unicode.
        fail(start, loc, f"is not YAML: {printable(str(error), 200)}")
    if reader.problems:
        refuse(reader.problems)
    return tree


def _at(start: Mark, line: int) -> Mark:
    """Return the mark of a line counted from 0; --set has no lines."""
    return start if start.line is None else Mark(start.source, line + 1)


class _Reader:
    """Makes nodes from events; raises fatal problems at once, and collects the others."""

    def __init__(self, text: str, start: Mark, top: Loc) -> None:
        self.start, self.top = start, top
        self.events: Iterator[Any] = yaml.parse(text, Loader=_LOADER)
        self.values = 0
        self.problems: list[Problem] = []

    def document(self) -> Node:
        next(self.events)  # the stream's start
        event = next(self.events)
        if isinstance(event, yaml.StreamEndEvent):
            fail(self.start, self.top, "is empty")
        if event.version or event.tags:
            fail(self._mark(event), self.top, "%YAML and %TAG directives are refused: leave them out")
        tree = self._node(next(self.events), self.top, 0)
        next(self.events)  # the document's end
        event = next(self.events)
        if isinstance(event, yaml.DocumentStartEvent):
            fail(self._mark(event), self.top, "a second document starts here: one file holds one")
        return tree

    def _node(self, event: Any, loc: Loc, depth: int) -> Node:
        mark = self._checked_mark(event, loc)
        if isinstance(event, yaml.ScalarEvent):
            try:
                return Node(_scalar(event), mark)
            except _Surprise as surprise:
                self.problems.append(Problem(mark, loc, str(surprise)))
                return Node(None, mark)
        if depth == MAX_DEPTH:
            fail(mark, self.top, _TOO_DEEP)
        if isinstance(event, yaml.SequenceStartEvent):
            items: list[Node] = []
            while not isinstance(item := next(self.events), yaml.SequenceEndEvent):
                items.append(self._node(item, (*loc, len(items)), depth + 1))
            return Node(items, mark)
        entries: dict[str, Node] = {}
        while not isinstance(name := next(self.events), yaml.MappingEndEvent):
            key, problem = self._key(name, loc, entries)
            value = self._node(next(self.events), (*loc, key), depth + 1).value
            if problem:
                self.problems.append(Problem(self._mark(name), (*loc, key), problem))
            else:
                entries[key] = Node(value, self._mark(name))
        return Node(entries, mark)

    def _key(self, event: Any, loc: Loc, entries: Mapping[str, Node]) -> tuple[str, str]:
        mark = self._checked_mark(event, loc)
        if not isinstance(event, yaml.ScalarEvent):
            fail(mark, loc, "a list or map is a key here: keys must be text")
        key = event.value
        if key in entries:
            return key, f"duplicate key; it is already at line {entries[key].mark.line}"
        if key == "<<":
            return key, "merge keys are refused: use extends, or write the entries out"
        # `n` is a column of MUL_MAT, and no parser in use turns that key into a boolean.
        if key in ("n", "y", "N", "Y"):
            return key, ""
        try:
            return key, "" if isinstance(_scalar(event), str) else f'keys must be text: quote it: "{printable(key)}"'
        except _Surprise as surprise:
            return key, f"as a key, {surprise}"

    def _checked_mark(self, event: Any, loc: Loc) -> Mark:
        mark = self._mark(event)
        if event.anchor is not None:
            anchor = printable(str(event.anchor))
            if isinstance(event, yaml.AliasEvent):
                fail(mark, loc, f"alias *{anchor}: write the value out; aliases are refused")
            fail(mark, loc, f"anchor &{anchor}: leave it out; anchors are refused")
        if event.tag is not None:
            fail(mark, loc, f"tag {printable(str(event.tag))}: leave it out, or quote text; tags are refused")
        self.values += 1
        if self.values > _MAX_VALUES:
            fail(mark, self.top, f"holds more than {_MAX_VALUES:,} keys and values")
        return mark

    def _mark(self, event: Any) -> Mark:
        return _at(self.start, event.start_mark.line)


class _Surprise(Exception):
    """A scalar that is refused; the sentence says how to write it."""


def _scalar(event: Any) -> Scalar:
    """Return a scalar's value; an unquoted one that YAML 1.1 and people may read differently is refused."""
    text: str = event.value
    if event.implicit[0]:  # without quotes
        if text in ("", "~", "null"):
            return None
        if text in ("true", "false"):
            return text == "true"
        for pattern, why in _SURPRISES:
            if pattern.fullmatch(text):
                raise _Surprise(f"{printable(text)} {why}")
        if _INT.fullmatch(text):
            # Longer than 64 bits is an id that lost its quotes; int() itself refuses 4,300 digits.
            if len(text) > 20 or abs(int(text)) > _MAX_INT:
                raise _Surprise(f"{printable(text)} {_TOO_LARGE}")
            return int(text)
        if _FLOAT.fullmatch(text):
            if math.isinf(float(text)):
                raise _Surprise(f"{printable(text)} {_TOO_LARGE}")
            return float(text)
    if bad := _CONTROL.search(text):
        raise _Surprise(f"holds a control character, U+{ord(bad[0]):04X}")
    return text
