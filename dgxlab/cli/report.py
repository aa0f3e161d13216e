"""dgxlab report."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated
from urllib.parse import quote

import typer

from dgxlab.cli._lab import naming_a_host, store, where
from dgxlab.cli._options import DbOption, Format, FormatOption, QuietOption
from dgxlab.cli._out import Out
from dgxlab.cli._tables import show
from dgxlab.errors import UsageError

if TYPE_CHECKING:
    from dgxlab.report import Report
    from dgxlab.store import Store


class Form(StrEnum):
    """What one table may be about."""

    steps = "steps"
    single_stream = "single-stream"
    concurrency = "concurrency"
    ops = "ops"
    gates = "gates"
    verdicts = "verdicts"
    levers = "levers"
    provenance = "provenance"
    published = "published"
    imported = "imported"


TOOLS = {Form.ops: "backend-ops", Form.single_stream: "llama-bench", Form.concurrency: "batched-bench"}
"""Whose numbers a form shows, where it is one tool's."""


def report(  # noqa: PLR0913, PLR0917 - each is an option
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="NAME",
            help="An experiment's name or a session's id, or enough of it; documents with --update and --check.",
            show_default=False,
        ),
    ] = None,
    form: Annotated[Form | None, typer.Option(help="Only tables of this form; several names side by side.")] = None,
    baseline: Annotated[str | None, typer.Option(help="What steps and verdicts are set against.")] = None,
    host: Annotated[str | None, typer.Option(help="Only what was measured there, of a form.")] = None,
    model: Annotated[str | None, typer.Option(help="Only cells of this model, of a form.")] = None,
    cells: Annotated[
        str | None, typer.Option(help="Only cells with these words, of a form: 'q4_K n=512,pp512'.")
    ] = None,
    published: Annotated[
        str | None,
        typer.Option(help="Published figures with these words, beside a form or alone: 'seed000 MMQ,seed004 vLLM'."),
    ] = None,
    plots: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Draw it too: PNG files in this folder, linked below it.")
    ] = None,
    update: Annotated[bool, typer.Option("--update", help="Fill the marked blocks of documents.")] = False,
    check: Annotated[bool, typer.Option("--check", help="Exit with 11 where a block of documents is stale.")] = False,
    db: DbOption = None,
    format: FormatOption = Format.human,
    quiet: QuietOption = False,
) -> None:
    """Print tables of what the record holds; keep those in documents.

    Without a name the latest of everything, in one screen.

    Example: dgxlab report quickstart
    """
    out, named = Out(format, quiet), names or []
    words = {"baseline": baseline, "host": host, "model": model, "cells": cells}
    words["source" if form is Form.published else "published"] = published
    given = {key: value for key, value in words.items() if value is not None}
    out.note(where(db))
    with store(db) as opened:
        if update or check:
            alone = not (form or given or plots or (update and check))
            _documents(opened, named, out, update=update, alone=alone)
        elif plots and (form or not named):
            raise UsageError("--plots draws the whole report of an experiment or a session", next="dgxlab jobs")
        elif form:
            _form(opened, form, named, given, out)
        elif given:
            raise UsageError(f"--{next(iter(given))} narrows a form", next="dgxlab report --form ops")
        else:
            _whole(opened, named, out, plots)


def _documents(opened: Store, named: Sequence[str], out: Out, *, update: bool, alone: bool) -> None:
    from dgxlab.cli import _living

    word = "--update" if update else "--check"
    if not alone:
        documents = shlex.join(["dgxlab", "report", word, *(named or ["plans/w4a16.md"])])
        raise UsageError(f"{word} takes documents and nothing else; what they show is in them", next=documents)
    if not named:
        raise UsageError(f"{word} needs a document", next=f"dgxlab report {word} plans/w4a16.md")
    (_living.update if update else _living.check)(opened, [Path(name) for name in named], out)


def _form(opened: Store, form: Form, named: Sequence[str], given: Mapping[str, str], out: Out) -> None:
    from dgxlab import report as reports

    words = {"form": form.value, **_subject(opened, form, named, given), **given}
    try:
        wanted = reports.query(words)
    except UsageError as error:
        error.next = error.next or "dgxlab report --help"
        raise
    with naming_a_host(instead="dgxlab jobs"):
        made = reports.page(opened, wanted)
    show(out, made, lambda: reports.render_page(made))


def _published_tables(named: Sequence[str], given: Mapping[str, str]) -> dict[str, str]:
    """Return which tables are meant: all of them, unless some or other figures are named."""
    from dgxlab.report import published

    every = () if "source" in given else (make.__name__ for make in published.TABLES)
    tables = ",".join(named or every)
    return {"table": tables} if tables else {}


def _subject(opened: Store, form: Form, named: Sequence[str], given: Mapping[str, str]) -> dict[str, str]:
    """Return what names on the command line are to a form; without any, what ran last."""
    if form is Form.published:
        return _published_tables(named, given)
    if form is Form.imported:
        return {"file": ",".join(named)} if named else {}
    if not named and form is Form.verdicts:
        return {"session": _newest_verdict(opened)}
    if not named and form is not Form.levers:
        named = _newest(opened, TOOLS.get(form))
    sessions = [_session(opened, name) for name in named]
    pairs = {
        "session": ",".join(session for session in sessions if session),
        "experiment": ",".join(name for name, session in zip(named, sessions, strict=True) if not session),
    }
    return {key: value for key, value in pairs.items() if value}


def _whole(opened: Store, named: Sequence[str], out: Out, plots: Path | None) -> None:
    from dgxlab import report as reports

    if not named:
        latest = reports.overview(opened)
        show(out, latest, lambda: reports.render_overview(latest))
        return
    if len(named) > 1:
        raise UsageError("several names are side by side in a form", next="dgxlab report --form single-stream")
    name = named[0]
    if session := _session(opened, name):
        made = reports.collect(opened, job_id=session)
    else:
        with naming_a_host(instead="dgxlab jobs"):
            made = reports.collect(opened, name)
    links = "".join(
        f"\n![{path.stem}]({quote(str(path))})\n" for path in _pictures(opened, made, session or name, plots)
    )
    show(out, made, lambda: reports.render(made) + links)


def _pictures(opened: Store, made: Report, stem: str, folder: Path | None) -> list[Path]:
    """Draw what a report has pictures of, none without a folder to put them in."""
    if folder is None:
        return []
    from dgxlab import plots
    from dgxlab.report import SessionReport

    drawn = plots.draw(made, folder, stem)
    if isinstance(made, SessionReport) and made.ended:
        drawn.append(plots.chain(opened, made.session, folder / f"{stem}.png"))
    return drawn


def _session(opened: Store, name: str) -> str | None:
    """Return the session that is meant, None when it is an experiment or nothing that is recorded."""
    from dgxlab.store import the_one

    if opened.find_job(name):
        return name
    found = opened.job_ids(name)
    if not name or not found or opened.rows("SELECT 1 FROM jobs WHERE name = ?", (name,)):
        return None
    return the_one(found, name)


def _newest(opened: Store, tool: str | None) -> list[str]:
    """Return the names of the experiments that ran last, those with numbers of the tool first: one, or both arms."""
    measured = opened.rows(
        """SELECT job_id FROM jobs WHERE job_id IN (SELECT job_id FROM runs WHERE tool = ? AND status = 'valid')
           AND job_id NOT IN (SELECT job_id FROM rejections) ORDER BY intent_at DESC, job_id DESC LIMIT 1""",
        (tool,),
    )
    job = opened.job(measured[0]["job_id"]) if measured else opened.latest_job()
    if job is None:
        raise UsageError("nothing is recorded yet", next="dgxlab run experiments/cpu/quickstart.yaml")
    arms = opened.rows("SELECT arm FROM arms WHERE job_id = ? ORDER BY rowid", (job.job_id,))
    return [str(row["arm"]) for row in arms]


def _newest_verdict(opened: Store) -> str:
    """Return the newest session that has verdicts."""
    found = opened.rows(
        "SELECT job_id FROM verdicts JOIN jobs USING (job_id) ORDER BY intent_at DESC, job_id DESC LIMIT 1"
    )
    if not found:
        raise UsageError("no session has a verdict yet", next="dgxlab ab --help")
    return str(found[0]["job_id"])
