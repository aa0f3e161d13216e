"""Text for gates on a model: words that a seed chooses, the same everywhere and for ever."""

from __future__ import annotations

import hashlib

LIST = """
about after all also any back because before between both call change city come could day down each early end even
every far few find first food four from game get give good great group hand hard have help here high home house idea
into keep kind know large last late learn leave left letter life light line list little live long look made make many
mean might more most move much must name near need never new next night number often old once one only open other our
out over own page part people place plant point public read right river run same say school sea second see set she
should show side small some soon sound spell state still stop story study such sun take talk tell than that them then
there these they thing think this three time together took tree try turn under until use very walk want watch water
way well went were what when where which while white who why will with word work world would write year you young
"""

WORDS = LIST.split()
"""Common enough to be one token each in most vocabularies."""


def text(words: int, seed: int) -> str:
    """Return so many words in one line."""
    # a digest for each place, because a random generator's choice may be another one in another Python
    draws = (hashlib.sha256(f"{seed}/{place}".encode()).digest() for place in range(words))
    return " ".join(WORDS[int.from_bytes(draw[:4], "big") % len(WORDS)] for draw in draws)
