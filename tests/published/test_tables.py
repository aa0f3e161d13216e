"""Tables of published figures: a golden file, what they refuse, and their JSON."""

import json
from pathlib import Path

import pytest

from dgxlab.errors import UsageError
from dgxlab.model import to_json
from dgxlab.report import Page, render_page
from dgxlab.report.published import series
from tests.report.worlds import agrees

GOLDEN = Path(__file__).resolve().parent / "golden"


def test_golden() -> None:
    tables = tuple(map(series, ("seed004 Q8_0 B=8", "seed001 H100", "W4A16 tests_passed", "seed004 vLLM S_PP")))
    assert agrees(render_page(Page("published", tables)), GOLDEN / "figures.md")


def test_words_that_no_figure_has() -> None:
    with pytest.raises(UsageError, match="no published figure has all of 'seed000 nosuch'; there are 0017"):
        series("seed000 nosuch")


def test_the_twin_has_the_figures_as_they_were_published() -> None:
    twin = json.loads(json.dumps(to_json(series("seed000 MMQ"))))
    figure = twin["rows"][0]["value"]
    assert (figure["value"], figure["unit"], figure["host"]) == (817.0, "GFLOPS", "dgx.casa GB10 sm_121")
    assert 2 in twin["published"][0]["lines"]
