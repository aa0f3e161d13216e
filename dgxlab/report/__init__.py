"""From results.db to tables: `collect` reads, `render` writes markdown, `model.to_json` gives the JSON twin.

It talks to no host and compares nothing: a table shows the newest valid run of each cell, from one build on one host,
with the session, pin, series, tree, build and host beneath it. What was asked for and is not there is listed.
"""

from dgxlab.report.collect import collect, collect_experiment
from dgxlab.report.markdown import render, render_table
from dgxlab.report.records import Column, Failure, Missing, Provenance, Quantity, Report, Table

__all__ = [
    "Column",
    "Failure",
    "Missing",
    "Provenance",
    "Quantity",
    "Report",
    "Table",
    "collect",
    "collect_experiment",
    "render",
    "render_table",
]
