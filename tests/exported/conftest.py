"""A record of two builds, both with what the tools printed on an H200."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from dgxlab.model import CellResult, RunStep
from dgxlab.store import Store
from tests.journals import source
from tests.report.worlds import Session, capture, h200


def faster(step: RunStep) -> tuple[CellResult, ...]:
    return tuple(
        replace(
            each, measurements=tuple(replace(m, samples=tuple(v * 1.5 for v in m.samples)) for m in each.measurements)
        )
        for each in capture(step)
    )


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store.open(tmp_path / "results.db") as opened:
        Session(opened, h200(), "20261120-100000-h200-a").build().gates().runs().end()
        patched = h200(name="w4a16", series=("w4a16",))
        tree = source(["w4a16"])
        Session(opened, patched, "20261120-110000-w4a16-b", tree=tree).build().gates().runs(faster).end()
        yield opened
