"""llama-completion's text and counts, from real output."""

from __future__ import annotations

import hashlib

from dgxlab.agent.parse.completion import read_greedy
from tests.agent.parse.captures import GOLDEN, capture

OUT, ERR = (GOLDEN / "cpu/completion.out").read_bytes(), capture("cpu/completion.err")


def test_the_text_is_digested_and_the_tokens_counted() -> None:
    """61 tokens of prompt, and 16 generated, of which the last was not computed with."""
    md5 = hashlib.md5(OUT, usedforsecurity=False).hexdigest()
    assert read_greedy(OUT, ERR) == {"md5": md5, "bytes": len(OUT.strip()), "n_prompt": 61, "n_gen": 16}


def test_what_is_not_said_is_unknown() -> None:
    """Without the counters, or with two of them, nothing is guessed; no text has no bytes."""
    assert read_greedy(b"\n\n", "")["bytes"] == 0
    for err in ("", ERR + ERR, ERR.replace("tokens", "words").replace("runs", "steps")):
        found = read_greedy(OUT, err)
        assert (found["n_prompt"], found["n_gen"]) == (None, None)
        assert found.get("cut", False) == (err != ERR + ERR)  # two of them are none that was lost
