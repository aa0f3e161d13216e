"""The tables of the documents: golden files, and the numbers as the documents print them."""

from pathlib import Path

import pytest

from dgxlab.published import figures
from dgxlab.report import Page, render_page
from dgxlab.report.published import TABLES
from tests.report.worlds import agrees

GOLDEN = Path(__file__).resolve().parent / "golden"


@pytest.mark.parametrize("name", TABLES)
def test_each_table_is_its_golden_file(name: str) -> None:
    assert agrees(render_page(Page(name, (TABLES[name](),))), GOLDEN / f"{name}.md")


def test_what_is_computed_follows_from_the_figures() -> None:
    def share(part: object, whole: object) -> float:
        return float(part.value / whole.value)  # type: ignore[attr-defined]

    value = {figure.line: figure for figure in figures()}
    rows = TABLES["steps"]().rows
    assert rows[0]["ratio"] == round(share(rows[0]["q4_K"], value[7]), 2)
    for later, earlier, key in ((2, 1, "q4_K"), (2, 1, "q4_0"), (3, 2, "q4_K"), (3, 2, "pp512"), (3, 1, "pp512")):
        gain = 100 * (share(rows[later][key], rows[earlier][key]) - 1)
        assert f"{gain:+.0f} % {key}" in str(rows[later]["notes"])
    kernel = TABLES["kernel_bytes"]().rows[1]
    assert kernel["pct of peak BW"] == round(100 * share(kernel["effective BW"], value[111]))
