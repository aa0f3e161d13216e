"""From a file's bytes to its lines: unpacked, decoded, without colours and carriage returns."""

from __future__ import annotations

import zlib

from dgxlab.agent.parse.lines import plain
from dgxlab.imported.reading import Refused

GZIP = b"\x1f\x8b"
LARGEST = 64 << 20
"""Bytes of output that one file may hold: a log of a million cases is smaller."""


def unpacked(raw: bytes) -> bytes:
    """Return a file's content, unpacked where it is gzip.

    Raises:
        Refused: if there is nothing in it, too much, or half of an archive.
    """
    content = _gunzip(raw) if raw.startswith(GZIP) else raw
    if len(content) > LARGEST:
        raise Refused(f"it holds more than {LARGEST >> 20} MiB, which no benchmark prints")
    if not content.strip():
        raise Refused("it is empty")
    return content


def decoded(content: bytes) -> str:
    r"""Return the text, its lines ended by \n.

    Raises:
        Refused: if it is not UTF-8 text.
    """
    if content.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise Refused("it is UTF-16, as PowerShell writes it: `iconv -f UTF-16 -t UTF-8` makes it readable", 1)
    if content.startswith(b"SQLite format 3\0"):
        raise Refused("it is an SQLite database, not the output of a tool")
    if (at := content.find(b"\0")) >= 0:
        raise Refused("it is binary", content.count(b"\n", 0, at) + 1)
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise Refused("it is not UTF-8 text", content.count(b"\n", 0, error.start) + 1) from error
    return plain(text).replace("\r\n", "\n")


def _gunzip(raw: bytes) -> bytes:
    """Unpack no more than one byte too much."""
    unpacker = zlib.decompressobj(wbits=zlib.MAX_WBITS | 16)
    made, rest = b"", raw
    try:
        while rest:
            made += unpacker.decompress(rest, LARGEST + 1 - len(made))
            if len(made) > LARGEST:
                return made
            if not unpacker.eof:
                raise Refused("it is a gzip archive that was cut short")
            rest = unpacker.unused_data.lstrip(b"\0")
            unpacker = zlib.decompressobj(wbits=zlib.MAX_WBITS | 16)
    except zlib.error as error:
        raise Refused(f"it is a damaged gzip archive: {error}") from error
    return made


def packed(content: bytes) -> bytes:
    """Return what the record keeps of a file: all of it, deflated."""
    return zlib.compress(content, 9)
