"""The strict YAML loader: plain values, each with its file and line, and none that YAML 1.1 turns into another.

Events are folded with an explicit stack and counted as they come, so that a hostile file is refused before it costs
time, memory or the interpreter's recursion limit.
"""

from __future__ import annotations

import difflib
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import yaml

from dgxlab.spec.nodes import SET, Loc, Mark, Node, Problem, Scalar, fail, printable, refuse
from dgxlab.spec.scalars import SurpriseError, bad_key, checked, scalar

MAX_BYTES = 1_000_000
MAX_DEPTH = 32
MAX_VALUES = 50_000

_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""Only its parser is used. libyaml reads 10,000 values in 45 ms, the Python parser in 190 ms."""

_UNREADABLE = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff\ufffe\uffff]")
"""Control characters, and the line breaks that YAML counts and editors do not."""


def read_file(path: Path, label: str, *, may_be_empty: bool = False, named_at: Mark | None = None) -> Node:
    """Read one YAML file.

    Args:
        path: The file; a regular file of at most 1 MB of UTF-8.
        label: What errors call it.
        may_be_empty: One that holds nothing, or only comments, is an empty map.
        named_at: The line that says `extends`, which is to blame for a file that is no file to read.

    Raises:
        SpecError: if it cannot be read, is not YAML, or holds what this loader refuses.
    """
    text = _text(path, label, named_at)
    if may_be_empty and all(line.lstrip()[:1] in ("", "#") for line in text.splitlines()):
        return Node({}, Mark(label, 1))
    return _parse(text, Mark(label, 1), ())


def read_value(text: str, loc: Loc) -> Node:
    """Read the value of a `--set` by the same rules; nothing at all is null.

    Args:
        text: What stands behind the `=`.
        loc: Where the value goes, for errors.

    Raises:
        SpecError: as read_file.
    """
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
        unread("no such file" if named_at else f"no such file{_sibling(path)}")
    except (OSError, ValueError) as error:
        unread(f"cannot be read: {getattr(error, 'strerror', None) or error}")
    if len(content) > MAX_BYTES:
        unread("is larger than 1 MB")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        fail(Mark(label, line), (), f"is not valid UTF-8 (byte {error.start})")


def _sibling(path: Path) -> str:
    try:
        stems = [entry.stem for entry in path.parent.iterdir() if entry.suffix == path.suffix]
    except OSError:
        return ""
    close = difflib.get_close_matches(path.stem, stems, n=1)
    return f"; did you mean {close[0]}{path.suffix}?" if close else ""


def _parse(text: str, start: Mark, loc: Loc) -> Node:
    if bad := _UNREADABLE.search(text):
        line = text.count("\n", 0, bad.start()) + 1
        fail(_at(start, line - 1), loc, f"holds a character that is not allowed, U+{ord(bad[0]):04X}")
    tree = _Tree(start, loc)
    try:
        for event in _events(text):
            tree.add(event)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line if error.problem_mark else 0
        fail(_at(start, line), loc, f"is not YAML: {error.problem}")
    except (yaml.YAMLError, ValueError, OverflowError) as error:
        # The Python parser lets chr() fail on an escape beyond Unicode.
        fail(start, loc, f"is not YAML: {printable(str(error), 200)}")
    return tree.finish()


def _events(text: str) -> Iterator[Any]:
    return yaml.parse(text, Loader=_LOADER)


def _at(start: Mark, line: int) -> Mark:
    """Return the mark of a line counted from 0; --set has no lines."""
    return start if start.line is None else Mark(start.source, line + 1)


@dataclass
class _Frame:
    """A collection whose end has not come yet."""

    value: dict[str, Node] | list[Node]
    mark: Mark
    key: tuple[str, Mark] | None = None
    """The key that waits for its value."""
    skip: bool = False
    """Its value is read and dropped: the key was refused."""


class _Tree:
    """Folds events into a Node; refuses at once what cannot be read on, and collects the rest."""

    def __init__(self, start: Mark, loc: Loc) -> None:
        self.start = start
        self.top = loc
        self.stack: list[_Frame] = []
        self.root: Node | None = None
        self.documents = 0
        self.values = 0
        self.problems: list[Problem] = []

    def add(self, event: Any) -> None:
        """Take the next event of the parser."""
        mark = _at(self.start, event.start_mark.line)
        if isinstance(event, yaml.DocumentStartEvent):
            self._document(event, mark)
        elif isinstance(event, yaml.AliasEvent):
            fail(mark, self._loc(), f"alias *{printable(str(event.anchor))}: write the value out; aliases are refused")
        elif isinstance(event, yaml.NodeEvent):
            self._refuse_marked_up(event, mark)
            self.values += 1
            if self.values > MAX_VALUES:
                fail(mark, self.top, f"holds more than {MAX_VALUES:,} keys and values")
            self._node(event, mark)
        elif isinstance(event, yaml.CollectionEndEvent):
            frame = self.stack.pop()
            self._put(Node(frame.value, frame.mark))

    def finish(self) -> Node:
        """Return the whole tree.

        Raises:
            SpecError: if there is none, or something in it was refused.
        """
        if self.problems:
            refuse(self.problems)
        if self.root is None:
            fail(self.start, self.top, "is empty")
        return self.root

    def _document(self, event: Any, mark: Mark) -> None:
        self.documents += 1
        if self.documents > 1:
            fail(mark, self.top, "a second document starts here: one file holds one")
        if event.version or event.tags:
            fail(mark, self.top, "%YAML and %TAG directives are refused: leave them out")

    def _refuse_marked_up(self, event: Any, mark: Mark) -> None:
        if event.anchor is not None:
            fail(mark, self._loc(), f"anchor &{printable(str(event.anchor))}: leave it out; anchors are refused")
        if event.tag is not None:
            fail(mark, self._loc(), f"tag {printable(str(event.tag))}: leave it out, or quote text; tags are refused")

    def _node(self, event: Any, mark: Mark) -> None:
        top = self.stack[-1] if self.stack else None
        if top is not None and isinstance(top.value, dict) and top.key is None:
            self._key(event, mark, top, top.value)
        elif isinstance(event, yaml.ScalarEvent):
            self._put(Node(self._scalar(event, mark), mark))
        elif len(self.stack) >= MAX_DEPTH:
            fail(mark, self.top, f"is nested more than {MAX_DEPTH} deep")
        else:
            self.stack.append(_Frame({} if isinstance(event, yaml.MappingStartEvent) else [], mark))

    def _put(self, node: Node) -> None:
        if not self.stack:
            self.root = node
            return
        top = self.stack[-1]
        if isinstance(top.value, list):
            top.value.append(node)
        elif top.key is not None:
            key, mark = top.key
            if not top.skip:
                top.value[key] = Node(node.value, mark)
            top.key = None

    def _key(self, event: Any, mark: Mark, top: _Frame, entries: dict[str, Node]) -> None:
        if not isinstance(event, yaml.ScalarEvent):
            fail(mark, self._loc(), "a list or map stands as a key: keys must be text")
        key: str = event.value
        text = bad_key(key, event.implicit[0])
        if key in entries:
            text = f"duplicate key; it is already at line {entries[key].mark.line}"
        if text:
            self.problems.append(Problem(mark, (*self._loc(), key), text))
        top.key, top.skip = (key, mark), bool(text)

    def _scalar(self, event: Any, mark: Mark) -> Scalar:
        try:
            return scalar(event.value) if event.implicit[0] else checked(event.value)
        except SurpriseError as surprise:
            self.problems.append(Problem(mark, self._loc(), str(surprise)))
            return None

    def _loc(self) -> Loc:
        loc = self.top
        for frame in self.stack:
            if isinstance(frame.value, list):
                loc = (*loc, len(frame.value))
            elif frame.key is not None:
                loc = (*loc, frame.key[0])
        return loc
