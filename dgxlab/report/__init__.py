"""From results.db to tables: `collect` reads, `render` writes markdown, `model.to_json` gives the JSON twin.

`page` gives the tables of one form, `overview` the latest of everything.

It talks to no host. A table shows the newest valid run of each cell, or all runs of an arm in a chain, from one build
on one host. Each number has its spread and how many values stand behind it; session, pin, series, tree, build and
host are beneath. What was asked for and is not there is listed. Published figures stand beside measured ones, in rows
and columns of their own, and imported files in tables of their own. Builds are compared nowhere but in the report of
a session of two arms, which shows its verdicts, and nothing of its chains before its end.
"""

from dgxlab.report.collect import collect, collect_experiment, collect_session
from dgxlab.report.forms import page
from dgxlab.report.markdown import render, render_overview, render_page, render_table
from dgxlab.report.numbers import Mean, Printed, Quantity
from dgxlab.report.overview import overview
from dgxlab.report.query import KEYS, Query, query
from dgxlab.report.records import (
    ArmsTable,
    Because,
    Column,
    Discard,
    Failure,
    Glance,
    Missing,
    Origin,
    Overview,
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
    "Because",
    "Column",
    "Discard",
    "Failure",
    "Glance",
    "Mean",
    "Missing",
    "Origin",
    "Overview",
    "Page",
    "Printed",
    "Provenance",
    "Quantity",
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
