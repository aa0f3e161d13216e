"""Which pictures there are of a report and of a session, and under which names they are written."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from dgxlab.plots import chains, curves, paper
from dgxlab.plots.trace import trace
from dgxlab.report import Report

if TYPE_CHECKING:
    from dgxlab.store import Store


def draw(made: Report, folder: Path, stem: str) -> list[Path]:
    """Write the pictures of a report's tables: STEM-concurrency.png, STEM-ops.png, a second of a kind STEM-ops-2.png.

    Concurrency needs two widths and operations two n; what has fewer, and single stream, has no picture.

    Raises:
        UsageError: if there is no matplotlib, or the files cannot be written.
    """
    charts = curves.charts(made)
    if charts:
        paper.need()
    written: list[Path] = []
    counts: dict[str, int] = {}
    for chart in charts:
        number = counts[chart.form] = counts.get(chart.form, 0) + 1
        name = f"{stem}-{chart.form}" + (f"-{number}" if number > 1 else "")
        written.append(paper.write(curves.figure(chart), folder / f"{name}.png"))
    return written


def chain(store: Store, job_id: str, path: Path) -> Path:
    """Write the picture of a session of two arms: the value of every run of its chains over time.

    Raises:
        UsageError: if there is no such session, it has no chains or has not ended, there is no matplotlib, or the file
            cannot be written.
    """
    shown = trace(store, job_id)
    paper.need()
    return paper.write(chains.figure(shown), path)
