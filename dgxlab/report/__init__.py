"""From results.db to tables: `collect` reads, `render` writes markdown, `model.to_json` gives the JSON twin.

`page` gives the tables of one form, `overview` the newest of everything. No host is asked.

A table shows the newest valid run of each cell, or all runs of an arm in a chain, from one build on one host. A number
has its spread and how many values it is of, unless it is a single one. `shown` decides what a reader sees of a table:
the columns that decide, or with `wide` all. Session, pin, series, tree, build and host are listed once a document.
Cells that were asked for and have no number are listed too. Published figures have rows and columns of their own,
imported files have tables of their own. Builds are compared only in the report of a session of two arms, which shows
its verdicts, and nothing of its chains before its end.
"""

from dgxlab.report.ask import KEYS, Query, query
from dgxlab.report.collect import collect, collect_experiment, collect_session, overview
from dgxlab.report.forms import page
from dgxlab.report.markdown import render, render_overview, render_page, render_table
from dgxlab.report.records import (
    ArmsTable,
    Number,
    Page,
    Provenance,
    Report,
    SessionReport,
    SessionTable,
    Table,
)

__all__ = [
    "KEYS",
    "ArmsTable",
    "Number",
    "Page",
    "Provenance",
    "Query",
    "Report",
    "SessionReport",
    "SessionTable",
    "Table",
    "collect",
    "collect_experiment",
    "collect_session",
    "overview",
    "page",
    "query",
    "render",
    "render_overview",
    "render_page",
    "render_table",
]
