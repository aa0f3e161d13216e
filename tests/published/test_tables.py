"""The tables of the documents: golden files, and the numbers as the documents print them.

`python -m tests.published.test_tables` writes the golden files anew.
"""

from pathlib import Path

import pytest

from dgxlab.report import render_table
from dgxlab.report.published import TABLES

GOLDEN = Path(__file__).resolve().parent / "golden"
MADE = {make.__name__: make for make in TABLES}


@pytest.mark.parametrize("name", MADE)
def test_each_table_is_its_golden_file(name: str) -> None:
    """Whole, with its sources beneath."""
    assert render_table(MADE[name]()) == (GOLDEN / f"{name}.md").read_text(encoding="utf-8")


if __name__ == "__main__":
    for name, make in MADE.items():
        (GOLDEN / f"{name}.md").write_text(render_table(make()), encoding="utf-8")
