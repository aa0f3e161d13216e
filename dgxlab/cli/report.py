"""dgxlab report: tables of what the record holds, on the terminal and in living documents."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated
from urllib.parse import quote

import typer

from dgxlab.cli._app import JOB, Desk, WideOption, naming_a_host
from dgxlab.cli._out import Out, plural
from dgxlab.errors import CheckFailed, SpecError, UsageError, edit

if TYPE_CHECKING:
    from dgxlab.document import Block, Document
    from dgxlab.report import Query, Report
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
            help=f"An experiment's name, or a session: {JOB}; documents with --update and --check.",
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
    wide: WideOption = False,
    *,
    desk: Desk,
    out: Out,
) -> None:
    """Print tables of what the record holds; keep those in documents.

    Without a name the latest of everything, in one screen.

    Example: dgxlab report quickstart
    """
    named = names or []
    words = {"baseline": baseline, "host": host, "model": model, "cells": cells}
    words["source" if form is Form.published else "published"] = published
    given = {key: value for key, value in words.items() if value is not None}
    out.note(desk.where)
    with desk.store() as opened:
        if update or check:
            word = "--update" if update else "--check"
            if form or given or plots or wide or (update and check):
                documents = shlex.join(["dgxlab", "report", word, *(named or ["plans/w4a16.md"])])
                raise UsageError(f"{word} takes documents and nothing else; what they show is in them", next=documents)
            if not named:
                raise UsageError(f"{word} needs a document", next=f"dgxlab report {word} plans/w4a16.md")
            _documents(opened, [Path(name) for name in named], out, update=update)
        elif plots and (form or not named):
            raise UsageError("--plots draws the whole report of an experiment or a session", next="dgxlab jobs")
        elif form:
            _form(opened, form, named, given, out, wide=wide)
        elif given:
            raise UsageError(f"--{next(iter(given))} narrows a form", next="dgxlab report --form ops")
        else:
            _whole(opened, named, out, plots, wide=wide)


def _form(opened: Store, form: Form, named: Sequence[str], given: Mapping[str, str], out: Out, *, wide: bool) -> None:
    from dgxlab import report as reports

    words = {"form": form.value, **_subject(opened, form, named, given), **given}
    try:
        wanted = reports.query(words)
    except UsageError as error:
        error.next = error.next or "dgxlab report --help"
        raise
    with naming_a_host(instead="dgxlab jobs"):
        page = reports.page(opened, wanted)
    out.report(page, lambda: reports.render_page(page, wide=wide))


def _subject(opened: Store, form: Form, named: Sequence[str], given: Mapping[str, str]) -> dict[str, str]:
    """Return what names on the command line are to a form; without any, what ran last."""
    words: dict[str, Iterable[str]]
    if form is Form.published:
        from dgxlab.report import published

        every = () if "source" in given else (make.__name__ for make in published.TABLES)
        words = {"table": named or every}
    elif form is Form.imported:
        words = {"file": named}
    elif not named and form is Form.verdicts:
        words = {"session": [_newest_verdict(opened)]}
    else:
        if not named and form is not Form.levers:
            named = _newest(opened, TOOLS.get(form))
        sessions = [(name, _session(opened, name)) for name in named]
        words = {
            "session": [session for _, session in sessions if session],
            "experiment": [name for name, session in sessions if not session],
        }
    joined = {key: ",".join(values) for key, values in words.items()}
    return {key: text for key, text in joined.items() if text}


def _whole(opened: Store, named: Sequence[str], out: Out, plots: Path | None, *, wide: bool) -> None:
    from dgxlab import report as reports

    if not named:
        latest = reports.overview(opened)
        out.report(latest, lambda: reports.render_overview(latest))
        return
    if len(named) > 1:
        raise UsageError("several names are side by side in a form", next="dgxlab report --form single-stream")
    name = named[0]
    if session := _session(opened, name):
        page = reports.collect(opened, job_id=session)
    else:
        with naming_a_host(instead="dgxlab jobs"):
            page = reports.collect(opened, name)
    pictures = _pictures(opened, page, session or name, plots) if plots else []
    links = "".join(f"\n![{path.stem}]({quote(str(path))})\n" for path in pictures)
    out.report(page, lambda: reports.render(page, wide=wide) + links)


def _pictures(opened: Store, page: Report, stem: str, folder: Path) -> list[Path]:
    from dgxlab import plots
    from dgxlab.report import SessionReport

    drawn = plots.draw(page, folder, stem)
    if isinstance(page, SessionReport) and page.ended:
        drawn.append(plots.chain(opened, page.session, folder / f"{stem}.png"))
    return drawn


def _session(opened: Store, name: str) -> str | None:
    """Return the session that is meant, None when it is an experiment or nothing that is recorded."""
    from dgxlab.store import the_one

    job_ids = opened.job_ids(name)
    if job_ids == [name]:
        return name
    if not name or not job_ids or opened.rows("SELECT 1 FROM jobs WHERE name = ?", (name,)):
        return None
    return the_one(job_ids, name)


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
    rows = opened.rows(
        "SELECT job_id FROM verdicts JOIN jobs USING (job_id) ORDER BY intent_at DESC, job_id DESC LIMIT 1"
    )
    if not rows:
        raise UsageError("no session has a verdict yet", next="dgxlab ab --help")
    return str(rows[0]["job_id"])


# -- living documents --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class BlockState:
    """One block of a document as the record sees it.

    Attributes:
        file: The document.
        line: Of the block's marker.
        form: What it shows.
        state: current, stale, or missing where it names data that does not exist.
        reason: What is missing.
    """

    file: str
    line: int
    form: str
    state: str
    reason: str = ""

    def __str__(self) -> str:
        why = f": {self.reason}" if self.reason else ""
        return f"{self.file}:{self.line}: form={self.form} is {self.state}{why}"


def _documents(store: Store, paths: Sequence[Path], out: Out, *, update: bool) -> None:
    """Fill every block of every document, or none of any; or say of each block that is not current what is wrong.

    All documents are read before the record is asked, and it is asked the same only once.

    Raises:
        SpecError: if a marker is not as it must be, or a block that is to be filled names data that does not exist.
        CheckFailed: if a block that is only checked is not current.
    """
    from dgxlab.document import Document

    once = {path.resolve(): path for path in reversed(paths)}  # under the first of its names
    documents = [Document(path) for path in reversed(once.values())]
    queries = {document.path: [_query(document, block) for block in document.blocks] for document in documents}
    texts = {query: _text(store, query) for query in dict.fromkeys(chain.from_iterable(queries.values()))}
    states: dict[Path, list[BlockState]] = {}
    for document in documents:
        pairs = zip(document.blocks, queries[document.path], strict=True)
        states[document.path] = [_state(document, block, texts[query]) for block, query in pairs]
    every = [*chain.from_iterable(states.values())]
    if not update:
        _check(every, out)
        return
    if missing := [state for state in every if state.state == "missing"]:
        first, *others = missing
        message = f"{first.file}:{first.line}: {first.reason}; nothing was written"
        raise SpecError(message, next=edit(first.file), details="\n".join(map(str, others)))
    lines = []
    for document in documents:
        document.write(document.with_texts([str(texts[query]) for query in queries[document.path]]))
        stale = sum(state.state == "stale" for state in states[document.path])
        lines.append(f"{document.path}: {plural(len(document.blocks), 'block')}, {stale or 'none'} filled anew")
    out.result({"blocks": every}, "\n".join(lines))


def _check(states: Sequence[BlockState], out: Out) -> None:
    wrong = [state for state in states if state.state != "current"]
    out.result({"blocks": states}, "\n".join(map(str, wrong)) or f"{plural(len(states), 'block')}: current")
    if not wrong:
        return
    missing = next((state.file for state in wrong if state.state == "missing"), None)
    again = shlex.join(["dgxlab", "report", "--update", *dict.fromkeys(state.file for state in wrong)])
    raise CheckFailed(
        f"{len(wrong)} of {plural(len(states), 'block')} {'is' if len(wrong) == 1 else 'are'} not current",
        next=edit(missing) if missing else again,
    )


def _query(document: Document, block: Block) -> Query:
    from dgxlab.report import query

    try:
        return query(block.words)
    except UsageError as error:
        raise SpecError(f"{document.path}:{block.line}: {error.message}", next=edit(document.path)) from error


def _text(store: Store, query: Query) -> str | UsageError:
    from dgxlab import report as reports

    try:
        return reports.render_page(reports.page(store, query), wide=query.wide, columns=query.columns)
    except UsageError as error:
        return error


def _state(document: Document, block: Block, text: str | UsageError) -> BlockState:
    where = (str(document.path), block.line, block.words["form"])
    if isinstance(text, UsageError):
        return BlockState(*where, "missing", text.message)
    return BlockState(*where, "stale" if document.is_stale(block, text) else "current")
