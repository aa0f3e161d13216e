"""What of a host's words reaches a terminal."""

from __future__ import annotations

import pytest

from dgxlab.cli._out import clean


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        ("a\x1b[31mred\x1b[0m", "ared"),
        ("a\x9b31mred\x9b0m", "ared"),
        ("\x1b]0;title\x07a", "]0;titlea"),
        ("".join(map(chr, (*range(0x20), *range(0x7F, 0xA0)))), "\t\n"),
        ("gpj.\u202egnp.sh\u202c", "gpj.gnp.sh"),
        ("\u2066a\u2067b\u2068c\u2069\u200e\u200f\u061c", "abc"),
        ("größe ≥ 5 µs, 2\u202f%, 日本\n\tx", "größe ≥ 5 µs, 2\u202f%, 日本\n\tx"),
    ],
)
def test_text_cannot_steer_a_terminal(said: str, shown: str) -> None:
    """Neither by control sequences, in seven bits or eight, nor by turning the direction of what is read."""
    assert clean(said) == shown
