"""From results.db to tables: `collect` reads, `render` writes markdown, `html` makes pages of it, `to_json` a twin.

`page` returns the tables of one form, `overview` the newest results. No host is contacted.

A table shows the newest valid run of each cell, or all runs of an arm in a chain, from one build on one host. Builds
are compared only in the report of a session of two arms, which shows nothing of its chains before its end. Published
figures and imported files are never mixed with measured numbers.
"""

from dgxlab.report.ask import KEYS, Query, query
from dgxlab.report.collect import collect, collect_experiment, collect_job, overview, sessions
from dgxlab.report.fleet import collect_fleet, collect_fleet_sessions, collect_sweep, collect_sweep_sessions
from dgxlab.report.forms import newest_arms, page
from dgxlab.report.markdown import render, render_overview, render_page
from dgxlab.report.records import Number, Page, Provenance, Report, SessionReport, Table
from dgxlab.report.verdicts import collect_session
