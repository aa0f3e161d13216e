"""What a host answers is bounded, and of the shape that is read."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from dgxlab.errors import RemoteError
from dgxlab.transport import reply


def for_ever(piece: bytes) -> Iterator[bytes]:
    """Say the same again and again."""
    while True:
        yield piece


def test_reply_is_read_to_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that has no end would fill the memory."""
    monkeypatch.setattr(reply, "MOST_BYTES", 1 << 20)
    assert reply.whole([b"x" * (1 << 19)] * 2, "box", "jobs") == b"x" * (1 << 20)
    with pytest.raises(RemoteError, match="host box answered jobs with more than 1 MiB, and was left"):
        reply.whole(for_ever(b"x" * 1000), "box", "jobs")


def test_line_is_read_to_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any number of lines, but none that has no end."""
    monkeypatch.setattr(reply, "MOST_BYTES", 1 << 20)
    assert sum(map(len, reply.whole_lines([b"y\nx" * 10_000] * 100, "box", "follow"))) == 3 * 10_000 * 100 - 1
    with pytest.raises(RemoteError, match="answered follow with more than 1 MiB in one line"):
        list(reply.whole_lines(for_ever(b"x" * 1000), "box", "follow"))


def test_lines_are_passed_on_whole() -> None:
    """However they were cut on the way; a torn one at the end is not."""
    assert list(reply.whole_lines([b"a", b"b\nc\nd", b"", b"\ne"], "box", "follow")) == [b"ab\nc\n", b"d\n"]


@pytest.mark.parametrize("text", [b"", b"hello", b"[1", b"\xff", b"[]", b'{"a": []}', b"3", b"null", b"[" * 100_000])
def test_what_cannot_be_read_is_an_error_of_the_host(text: bytes) -> None:
    """Whatever comes, and whatever reading it raises."""
    with pytest.raises(RemoteError, match="host box answered status with something else") as caught:
        reply.understood("box", "status", text, lambda value: reply.need(value["a"], str))
    assert len(caught.value.message) < 1000
    assert caught.value.details


def test_what_can_be_read_is_returned() -> None:
    """As `read` makes it."""
    assert reply.understood("box", "status", b'{"a": "b"}', lambda value: reply.need(value["a"], str)) == "b"


@dataclass(frozen=True)
class Thing:
    """A record of plain values."""

    name: str
    size: int
    used: float


def test_plain_values_are_of_their_own_kind() -> None:
    """A whole number is a number of seconds too; True is none."""
    assert plain_of("a", 1, 2) == Thing("a", 1, 2)
    for wrong in ((1, 1, 2), ("a", 1.5, 2), ("a", True, 2), ("a", 1, "2"), (None, 1, 2), ("a", [], 2)):
        with pytest.raises(TypeError, match="is no"):
            plain_of(*wrong)


def plain_of(*values: Any) -> Thing:
    """Make a thing and look at it."""
    return reply.plain(Thing(*values))
