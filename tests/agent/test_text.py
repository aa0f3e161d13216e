"""The text of gates on a model."""

from __future__ import annotations

import hashlib

from dgxlab.agent.text import text


def test_the_words_are_the_seeds_for_ever() -> None:
    """A recorded md5 of greedy text belongs to these very words."""
    assert text(3, 0) == "food look near"
    wanted = "97bbbf17f647b5d871138d453a8f7fadd3b5af8c54f1374c6a96fe508b65b091"
    assert hashlib.sha256(text(1000, 7).encode()).hexdigest() == wanted


def test_a_longer_text_begins_with_the_shorter_one() -> None:
    """And another seed is another text."""
    assert text(50, 1).startswith(text(20, 1) + " ")
    assert text(20, 2).split() != text(20, 1).split()
    assert len(text(50, 1).split()) == 50
