"""llama-perplexity's two ways of being called, from real output: what counts, and what exits 0 all the same."""

from __future__ import annotations

from typing import Any

import pytest

from dgxlab.agent.parse.perplexity import read_divergence, read_reference
from tests.agent.parse.captures import capture

OUT, ERR = capture("cpu/perplexity-reference.out"), capture("cpu/perplexity-reference.err")
COMPARED = capture("cpu/perplexity-compared.out")


def test_the_reference_has_a_perplexity() -> None:
    """Its chunks are on stdout, the estimate on stderr behind a line without an end."""
    assert read_reference(OUT, ERR, 4) == {"ppl": 36861.5399, "ppl_error": 784.80721}


def test_a_comparison_has_its_means() -> None:
    """Mean KLD, ratio of perplexities, and share of the same most likely token."""
    assert read_divergence(COMPARED, 4) == {
        "kld": 0.000016,
        "kld_error": 0.0,
        "ppl_ratio": 1.000083,
        "ppl_ratio_error": 0.000239,
        "same_top_p": 96.26,
    }


@pytest.mark.parametrize(
    ("text", "problem", "cut"),
    [
        (capture("cpu/perplexity-nothing.out"), "it computed none of 4 chunks", True),
        (capture("cpu/perplexity-cut.out"), "it computed 3 of 4 chunks", True),
        (capture("cpu/perplexity-nan.out"), "chunk 1 has no finite number: nan", False),
        (COMPARED.replace("\n   2 ", "\n   3 "), "it computed 4 of 4 chunks, not each once", False),
        (COMPARED.replace("KLD:   0.000016", "KLD:        inf"), "kld is no finite number: inf", False),
        (COMPARED.partition("Mean    KLD")[0], "kld was printed 0 times, not once", True),
        (COMPARED.partition("Same top p:")[0], "same_top_p was printed 0 times, not once", True),
        (COMPARED + COMPARED.partition("======")[2], "kld was printed 2 times, not once", False),
        ("", "it computed none of 4 chunks", True),
    ],
)
def test_what_is_not_whole_does_not_count(text: str, problem: str, cut: bool) -> None:
    """All of these came with exit status 0, or would; where something is missing another launch may show it."""
    assert read_divergence(text, 4) == {"problem": problem, **({"cut": True} if cut else {})}


@pytest.mark.parametrize(
    ("out", "err", "chunks", "problem", "cut"),
    [
        (OUT, ERR, 5, "it computed 4 of 5 chunks", True),
        (OUT, ERR.partition("Final")[0], 4, "ppl was printed 0 times, not once", True),
        (OUT, ERR.replace("PPL = 36861.5399", "PPL = nan"), 4, "ppl is no finite number: nan", False),
        (OUT.replace("36799.8231", "nan"), ERR, 4, "chunk 3 has no finite number: nan", False),
        ("", ERR, 4, "it computed none of 4 chunks", True),
    ],
)
def test_a_reference_that_is_not_whole_is_none(out: str, err: str, chunks: int, problem: str, cut: bool) -> None:
    """Whatever the estimate says: it is of the chunks that were computed."""
    assert read_reference(out, err, chunks) == {"problem": problem, **({"cut": True} if cut else {})}


@pytest.mark.parametrize("length", range(0, len(COMPARED), 97))
def test_no_beginning_of_the_output_counts(length: int) -> None:
    """A program that was cut off never has a value."""
    found: dict[str, Any] = read_divergence(COMPARED[:length], 4)
    assert list(found) == ["problem", "cut"]
