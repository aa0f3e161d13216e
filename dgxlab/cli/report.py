"""dgxlab report: tables from the record, on the terminal and in documents."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from typer import Argument, Option

from dgxlab.cli import _complete
from dgxlab.cli._app import JOB, WideOption, Workspace
from dgxlab.cli._out import Out, plural
from dgxlab.errors import AGAIN, CheckFailed, SpecError, UsageError, access, command, edit
from dgxlab.project import first_command

if TYPE_CHECKING:
    from dgxlab.document import Block, Document
    from dgxlab.report import Query
    from dgxlab.store import Store

Form = StrEnum(
    "Form",
    "steps single-stream concurrency serving ops profile history gates verdicts fleet levers tries"
    " provenance published imported",
)
"""Forms of tables."""


def report(  # noqa: PLR0913, PLR0917 - each is an option
    names: list[str] | None = Argument(
        None,
        metavar="NAME",
        help=f"An experiment's name, or a session: {JOB}; documents with --update and --check.",
        autocompletion=_complete.subjects,
    ),
    form: Form | None = Option(None, help="Only tables of this form; several names side by side."),
    baseline: str | None = Option(None, help="What steps and verdicts are set against."),
    host: str | None = Option(None, help="Only what was measured there, of a form.", autocompletion=_complete.hosts),
    model: str | None = Option(None, help="Only cells of this model, of a form."),
    cells: str | None = Option(None, help="Only cells with these words, of a form: 'q4_K n=512,pp512'."),
    history: str | None = Option(
        None, metavar="CELL", help="Cells with these words over all sessions: --form history --cells CELL."
    ),
    published: str | None = Option(
        None, help="Published figures with these words, beside a form or alone: 'seed000 MMQ,seed004 vLLM'."
    ),
    plots: Path | None = Option(None, metavar="DIR", help="Draw it too: PNG files in this folder, linked below it."),
    html: Path | None = Option(
        None, metavar="FILE", help="Write one page for a browser instead: tables that sort, pictures in it, no network."
    ),
    sessions: Path | None = Option(
        None,
        metavar="DIR",
        help="Write a page ALIAS.md, as --wide prints, of each session named, or of every A/B, noise and screen.",
    ),
    update: bool = Option(False, "--update", help="Fill the marked blocks of documents, write the pages they link to."),
    check: bool = Option(False, "--check", help="Exit with 11 where a block or a page of documents is stale."),
    wide: WideOption = False,
    *,
    workspace: Workspace,
    out: Out,
) -> None:
    """Print tables from the record, or update those in documents.

    Without a name, an overview of the latest results.

    Example: dgxlab report quickstart
    """
    named = names or []
    if history is not None:
        if form not in (None, Form.history) or cells is not None:
            other = "--cells" if form in (None, Form.history) else "--form"
            raise UsageError("--history is a form, with its cells", next=f"{AGAIN} without {other}")
        form, cells = Form.history, history
    words = {"baseline": baseline, "host": host, "model": model, "cells": cells}
    words["source" if form == "published" else "published"] = published
    given = {key: value for key, value in words.items() if value is not None}
    out.note(workspace.where)
    with workspace.store() as opened:
        if update or check:
            beside = bool(form or given or plots or html or sessions or wide or (update and check))
            _documents(opened, named, out, update=update, beside=beside)
        elif sessions and (form or given or plots or html):
            raise UsageError("--sessions writes whole sessions", next="dgxlab report --sessions sessions")
        elif sessions:
            _pages(opened, named, sessions, out)
        elif plots and html:
            raise UsageError("--html writes a page with the pictures in it", next=f"{AGAIN} without --plots")
        elif plots and (form not in (None, Form.serving, Form.history, Form.tries) or not (named or form)):
            whole = command("dgxlab", "report", named[0], "--plots", plots) if named else "dgxlab sessions"
            raise UsageError("--plots draws a whole report, or --form serving, history or tries", next=whole)
        elif given and not form:
            raise UsageError(f"--{next(iter(given))} narrows a form", next="dgxlab report --form ops")
        else:
            try:
                shown = _form(opened, form.value, named, given, wide) if form else _whole(opened, named, wide)
            except UsageError as error:
                error.message = error.message.replace("form=", "--form ")  # as documents have it
                error.next = error.next or "dgxlab report --help"
                raise
            shown.give(out, plots, html)


@dataclass(frozen=True)
class _Shown:
    """A report to print, to draw, or to write as a page."""

    value: Any
    markdown: Callable[[], str]
    figures: Callable[[], Iterable[tuple[str, Any]]]  # matplotlib's, by name; raises UsageError where that is missing

    def give(self, out: Out, plots: Path | None, html: Path | None) -> None:
        """Print it, with links to its pictures in the folder `plots`, or write it as the page `html`."""
        if html:
            self._page(out, html)
            return
        pictures = []
        if plots:
            from dgxlab import plots as drawing

            pictures = [drawing.write(figure, plots / f"{name}.png") for name, figure in self.figures()]
            if not pictures:
                out.note("nothing to draw: pictures are of chains that have ended, and of tables with several sizes")
        links = "".join(f"\n![{path.stem}]({quote(str(path))})\n" for path in pictures)
        out.report(self.value, lambda: self.markdown() + links)

    def _page(self, out: Out, path: Path) -> None:
        from dgxlab import plots as drawing
        from dgxlab.report import html

        pictures = {}
        try:
            pictures = {name: drawing.svg(figure) for name, figure in self.figures()}
        except UsageError as error:  # the tables are worth having without them
            out.note(f"note: the page has no pictures: {error.message}; next: {error.next}")
        _write(path, html.document(self.markdown(), path.stem, pictures).encode())
        out.result({"page": str(path), "pictures": list(pictures)}, f"{path}: written")


def _form(opened: Store, form: str, named: Sequence[str], given: Mapping[str, str], wide: bool) -> _Shown:
    from dgxlab import report as reports

    words = {"form": form, **_subject(opened, form, named, given), **given}
    if form == "history" and not {"cells", "session"} & words.keys():
        _, label = _newest(opened, named)
        raise UsageError("--form history needs --cells", next=f"{AGAIN} with {command('--cells', label)}")
    page = reports.page(opened, reports.query(words))

    def figures() -> Iterator[tuple[str, Any]]:
        from dgxlab.plots import history, serving, tries

        if draw := {"serving": serving.figure, "history": history.figure, "tries": tries.figure}.get(form):
            yield "-".join([*named, form]), draw(page.tables)

    return _Shown(page, lambda: reports.render_page(page, wide=wide), figures)


def _subject(opened: Store, form: str, named: Sequence[str], given: Mapping[str, str]) -> dict[str, str]:
    """Return the query keys for the names on the command line; without names, for the newest session that fits."""
    from dgxlab.report.ask import KEYS, WITHOUT_NAMES

    words: dict[str, Iterable[str]]
    if form == "published":
        from dgxlab.report import published

        words = {"table": named or ([] if "source" in given else published.TABLES)}
    elif form == "imported":
        words = {"file": named}
    elif not named and form == "verdicts":
        sql = "SELECT job_id FROM verdict_list ORDER BY verdict = 'invalid', intent_at DESC, job_id DESC LIMIT 1"
        words = {"session": [row["job_id"] for row in opened.rows(sql)]}
        if not words["session"]:
            raise UsageError("no session has a verdict yet", next="dgxlab ab --help")
    else:
        if not named and form not in WITHOUT_NAMES:
            from dgxlab import report

            named = report.newest_arms(opened, form, given.get("host"))
        sessions = {name: _session(opened, name) for name in dict.fromkeys(named)}
        if "session" not in KEYS[form] and (session := next(filter(None, sessions.values()), None)):
            message = f"--form {form} takes experiments, and {session} is a session"
            raise UsageError(message, next=command("dgxlab", "report", session))
        words = {
            "session": [session for name in named if (session := sessions[name])],
            "experiment": [name for name in named if not sessions[name]],
        }
    return {key: text for key, values in words.items() if (text := ",".join(values))}


def _whole(opened: Store, named: Sequence[str], wide: bool) -> _Shown:
    from dgxlab import report as reports
    from dgxlab.report.ask import job_of_arm

    if not named:
        latest = reports.overview(opened)
        return _Shown(latest, lambda: reports.render_overview(latest), lambda: ())
    if len(named) > 1:
        for name in named:
            if not _session(opened, name):
                job_of_arm(opened, name)
        form, _ = _newest(opened, named)
        message = f"a whole report is of one name: with --form, tables set {' and '.join(named)} side by side"
        raise UsageError(message, next=f"{AGAIN} with --form {form}")
    session = _session(opened, named[0])
    page = reports.collect_job(opened, session) if session else reports.collect(opened, named[0])

    def figures() -> Iterator[tuple[str, Any]]:
        from dgxlab import plots as drawing
        from dgxlab.plots import chains

        yield from drawing.figures(page, session or named[0])
        if isinstance(page, reports.SessionReport) and page.ended:
            yield session or page.session, chains.figure(opened, page.session)

    return _Shown(page, lambda: reports.render(page, wide=wide), figures)


def _session(opened: Store, name: str) -> str | None:
    """Return the session of that name, None for an experiment's name or an unknown one."""
    known = opened.rows("SELECT job_id FROM jobs WHERE ? IN (job_id, name)", (name,))
    if known or not name:
        return name if {"job_id": name} in known else None
    return opened.named(name) if opened.job_ids(name) else None


def _newest(opened: Store, named: Sequence[str]) -> tuple[str, str]:
    """Return the form and the name of the cell that was measured last, of these experiments and sessions or any."""
    from dgxlab.tools import BY_FORM

    rows = opened.rows(
        """SELECT tool, label FROM measurements WHERE status = 'valid'
           AND (:names = '[]' OR EXISTS (SELECT 1 FROM json_each(:names) WHERE value IN (arm, job_id)))
           ORDER BY at DESC LIMIT 1""",
        {"names": json.dumps(named)},
    )
    forms = {tool: form for form, tool in BY_FORM.items()}
    return (forms[rows[0]["tool"]], rows[0]["label"]) if rows else ("single-stream", "pp512")


# -- pages of sessions -------------------------------------------------------------------------------------------------


def _pages(store: Store, names: Sequence[str], folder: Path, out: Out) -> None:
    """Write the pages of these sessions; without any, of all of two arms that have ended and were not rejected."""
    from dgxlab.model import SESSIONS

    ended = [job.job_id for job in store.jobs() if job.kind in SESSIONS and job.ended and not job.rejected]
    pages = {folder / f"{alias}.md": page for alias, page in (_page(store, name) for name in names or ended)}
    lines = [f"{path}: {'written' if _write(path, page) else 'current'}" for path, page in pages.items()]
    out.result({"pages": [str(path) for path in pages]}, "\n".join(lines) or "no A/B session has ended")


def _page(store: Store, name: str) -> tuple[str, bytes]:
    """Return the alias of a session, and its page; UsageError if there is no such session, or it was rejected."""
    from dgxlab import report as reports
    from dgxlab.store import alias

    job = store.job(store.named(name))
    if job.rejected:
        raise UsageError(f"session {job.job_id} was rejected: {job.rejected}", next="dgxlab sessions")
    short = alias(job.job_id)
    head = f"Generated by `dgxlab report --sessions DIR {short}`; changes by hand are lost.\n\n"
    return short, (head + reports.render(reports.collect_job(store, job.job_id), wide=True)).encode()


def _write(path: Path, page: bytes) -> bool:
    with access(path, "written", SpecError):
        if path.is_file() and path.read_bytes() == page:
            return False
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(page)
    return True


# -- tables in documents -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _BlockState:
    """Whether a block of a document, or a session's page that the document links to, agrees with the record."""

    file: str
    line: int
    form: str  # the block's; "" for a page
    state: str  # current, stale, or missing if it names data that does not exist
    reason: str = ""
    page: str = ""
    next: str = ""  # the command that measures what is missing, if that is known

    def __str__(self) -> str:
        why = f": {self.reason}" if self.reason else ""
        return f"{self.file}:{self.line}: {self.page or f'form={self.form}'} is {self.state}{why}"


def _documents(store: Store, names: Sequence[str], out: Out, *, update: bool, beside: bool) -> None:
    """Update all blocks and linked pages of all documents, or none; with `update` off, show what is not current.

    Raises:
        UsageError: if other options are given, or no document.
        SpecError: if a marker is malformed, or a block to update names data that does not exist.
        CheckFailed: if a checked block is not current.
    """
    from dgxlab.document import Document

    word = "--update" if update else "--check"
    if beside or not names:
        mend = f"dgxlab report {word} {shlex.join(names) or 'plans/*.md'}"
        what = "takes documents and nothing else; what they show is in them" if beside else "needs a document"
        raise UsageError(f"{word} {what}", next=mend)
    once = {Path(name).resolve(): Path(name) for name in reversed(names)}  # by the first of its names
    # read all documents before querying the record, and run equal queries only once
    queries = {doc: [_query(doc, block) for block in doc.blocks] for doc in map(Document, reversed(once.values()))}
    text_of = cache(lambda query: _text(store, query))
    states, lines = [], []
    pages: dict[Path, bytes] = {}
    for document, asked in queries.items():
        own = []
        for block, text in zip(document.blocks, map(text_of, asked), strict=True):
            where = (str(document.path), block.line, block.words["form"])
            if isinstance(text, UsageError):
                measures = text.next if text.next.startswith(("dgxlab ab ", "dgxlab attach ")) else ""
                own.append(_BlockState(*where, "missing", text.message, next=measures))
            else:
                own.append(_BlockState(*where, "stale" if document.is_stale(block, text) else "current"))
        stale = sum(state.state == "stale" for state in own)
        lines.append(f"{document.path}: {plural(len(own), 'block')}, {stale or 'none'} filled anew")
        states += own
        for state, page in _linked(store, document):
            states.append(state)
            pages[Path(state.page)] = page
    if not update:
        _check(store, states, out)
        return
    if missing := [state for state in states if state.state == "missing"]:
        first, *others = missing
        message = f"{first.file}:{first.line}: {first.reason}; nothing was written"
        raise SpecError(message, next=_mend(store, first), details="\n".join(map(str, others)))
    for document, asked in queries.items():
        document.write(document.with_texts([str(text_of(query)) for query in asked]))
    lines += [f"{path}: written" for path, page in pages.items() if _write(path, page)]
    out.result({"blocks": states}, "\n".join(lines))


def _mend(store: Store, missing: _BlockState) -> str:
    """Return the command that mends a block without data: it measures, or else opens the document."""
    if not store.rows("SELECT 1 FROM jobs LIMIT 1"):
        return first_command()
    return missing.next or edit(missing.file)


def _linked(store: Store, document: Document) -> Iterator[tuple[_BlockState, bytes]]:
    """Yield each page of a session that a document links to: its state, and what it is to hold."""
    for line, path, alias in document.session_pages():
        where = (str(document.path), line, "")
        try:
            _, page = _page(store, alias)
        except UsageError as error:
            yield _BlockState(*where, "missing", error.message, str(path)), b""
            continue
        with access(path, "read", SpecError):
            reason = "" if path.is_file() else "there is no such file"
            state = "stale" if reason or path.read_bytes() != page else "current"
        yield _BlockState(*where, state, reason, str(path)), page


def _check(store: Store, states: Sequence[_BlockState], out: Out) -> None:
    wrong = [state for state in states if state.state != "current"]
    pages = sum(bool(state.page) for state in states)
    blocks = plural(len(states) - pages, "block") + (f" and {plural(pages, 'page')}" if pages else "")
    out.result({"blocks": states}, "\n".join(map(str, wrong)) or f"{blocks}: current")
    if wrong:
        missing = [_mend(store, state) for state in wrong if state.state == "missing"]
        again = shlex.join(["dgxlab", "report", "--update", *dict.fromkeys(state.file for state in wrong)])
        are = "is" if len(wrong) == 1 else "are"
        raise CheckFailed(f"{len(wrong)} of {blocks} {are} not current", next=[*missing, again][0])


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
