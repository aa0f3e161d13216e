"""What a host answers: it is trusted neither for its size nor for its shape, and what is wrong is a RemoteError."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from dgxlab.errors import RemoteError
from dgxlab.model import from_json

T = TypeVar("T")

MOST_BYTES = 64 << 20
"""How long a reply, or a line of a journal, may be: the largest that a job writes are a hundredth of it."""
WRONG = (ValueError, LookupError, TypeError, AttributeError, RecursionError)
"""What reading a value of another shape raises."""


def whole(pieces: Iterable[bytes], host: str, verb: str) -> bytes:
    """Return a reply in one piece.

    Raises:
        RemoteError: if it does not end in time.
    """
    reply = bytearray()
    for piece in pieces:
        reply += piece
        if len(reply) > MOST_BYTES:
            raise _endless(host, verb, "")
    return bytes(reply)


def whole_lines(pieces: Iterable[bytes], host: str, verb: str) -> Iterator[bytes]:
    """Yield pieces that each end with a whole line; what follows the last line is dropped.

    Raises:
        RemoteError: if a line does not end in time.
    """
    rest = b""
    for piece in pieces:
        rest += piece
        cut = rest.rfind(b"\n") + 1
        if cut:
            yield rest[:cut]
            rest = rest[cut:]
        if len(rest) > MOST_BYTES:
            raise _endless(host, verb, " in one line")


def first_line(pieces: Iterator[bytes], most: int = 1000) -> tuple[bytes, bytes]:
    """Return the first line and what came after it in the same piece."""
    head = b""
    for piece in pieces:
        head += piece
        if b"\n" in head or len(head) > most:
            break
    line, _, rest = head.partition(b"\n")
    return line, rest


def understood(host: str, verb: str, reply: bytes, kind: type[T], agree: Callable[[T], str] = lambda _: "") -> T:
    """Return the record that the JSON in a reply is; `agree` says what of it is no answer to what was asked.

    Raises:
        RemoteError: if it is no JSON, no such record, or no answer.
    """
    try:
        found = from_json(kind, json.loads(reply))
        if wrong := agree(found):
            raise ValueError(wrong)
    except (ValueError, RecursionError) as error:
        raise RemoteError(
            f"host {host} answered {verb} with something else than dgxlab's agent does: "
            f"{reply[:200].decode(errors='replace')!r}",
            details=f"{type(error).__name__}: {error}"[:1000],
        ) from error
    return found


def _endless(host: str, verb: str, where: str) -> RemoteError:
    return RemoteError(f"host {host} answered {verb} with more than {MOST_BYTES >> 20} MiB{where}, and was left")
