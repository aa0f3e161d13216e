"""From results.db to tables: `collect` reads, `render` writes markdown, `model.to_json` gives the JSON twin.

It talks to no host. A table shows the newest valid run of each cell, from one build on one host, with the session, pin,
series, tree, build and host beneath it. What was asked for and is not there is listed. Builds are compared nowhere but
in the report of a session of two arms, which shows its verdicts, and nothing of its chains before its end.
"""

from dgxlab.report.collect import collect, collect_experiment, collect_session
from dgxlab.report.markdown import render, render_table
from dgxlab.report.records import (
    Because,
    Column,
    Discard,
    Failure,
    Mean,
    Missing,
    Provenance,
    Quantity,
    Report,
    SessionReport,
    SessionTable,
    Table,
)

__all__ = [
    "Because",
    "Column",
    "Discard",
    "Failure",
    "Mean",
    "Missing",
    "Provenance",
    "Quantity",
    "Report",
    "SessionReport",
    "SessionTable",
    "Table",
    "collect",
    "collect_experiment",
    "collect_session",
    "render",
    "render_table",
]
