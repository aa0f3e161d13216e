"""The figure of how large a record is: all of its file, indices included, by what was measured."""

from __future__ import annotations

import tempfile
from pathlib import Path

from bench.figure import Figure, figure
from bench.importing import CASES, write_log
from bench.reporting import SAMPLES, SESSIONS, write_record
from dgxlab.imported import open_file, record
from dgxlab.store import Store

SHARE = 10
"""The part of the reports' record that is made here: sessions and samples grow alike."""


def size(quick: bool) -> Figure:
    """Measure a record of sessions and one of an imported log; the figure is the larger of both."""
    share = 200 if quick else SHARE
    with tempfile.TemporaryDirectory(prefix="dgxlab-bench-") as name:
        folder = Path(name)
        write_record(folder / "sessions.db", SAMPLES // share, SESSIONS // min(share, 40))
        with Store.open(folder / "imported.db") as store:
            found = open_file(write_log(folder, CASES // (share // SHARE)))
            record(store, found)
        values = sum(len(each.values) for row in found.reading.rows for each in row.values)
        with Store.open(folder / "sessions.db") as store:
            (row,) = store.rows("SELECT count(*) AS n FROM samples")
        measured = [
            (folder / name).stat().st_size / count
            for name, count in (("sessions.db", row["n"]), ("imported.db", values))
        ]
    counts = dict(zip(("bytes a sample of sessions", "bytes a value of an import"), map(round, measured), strict=True))
    worst = figure("size", "size of the record by sample", [max(measured)], "B", 150.0)
    return Figure(**{**vars(worst), "counts": counts})
