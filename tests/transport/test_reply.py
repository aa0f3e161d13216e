"""What a host answers is bounded, and of the shape that is read."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

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


@dataclass(frozen=True)
class Thing:
    """A record of plain values."""

    name: str
    size: int = 1
    used: float = 2.5


@pytest.mark.parametrize(
    "text",
    [
        *(b"", b"hello", b"[1", b"\xff", b"[]", b'{"a": []}', b"3", b"null", b"[" * 100_000, b'{"name": "b"}'),
        *(b'{"name": "a", "size": 1.5}', b'{"name": "a", "size": true}', b'{"name": "a", "used": "2"}'),
        *(
            b'{"name": "a", "used": NaN}',
            b'{"name": "a", "size": 1%s}' % (b"0" * 30),
            b'{"name": 1}',
            b'{"name": null}',
        ),
    ],
)
def test_what_is_no_such_record_is_an_error_of_the_host(text: bytes) -> None:
    """Of another shape, another type, too large a number, or no answer to what was asked."""
    with pytest.raises(RemoteError, match="host box answered status with something else") as caught:
        reply.understood("box", "status", text, Thing, lambda found: "" if found.name == "a" else "it is another")
    assert len(caught.value.message) < 1000
    assert caught.value.details


def test_what_can_be_read_is_returned() -> None:
    """A whole number is a number of seconds too; half a surrogate pair could not be printed."""
    text = b'{"name": "a\\udc80", "size": 3, "used": 4}'
    assert reply.understood("box", "status", text, Thing) == Thing("a?", 3, 4)
