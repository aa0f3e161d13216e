"""dgxlab sessions, session: what the record has of whole sessions, and what the user says about them."""

from __future__ import annotations

import re
import time
from datetime import UTC, datetime
from enum import StrEnum

from typer import Argument, Option

from dgxlab.cli import _complete
from dgxlab.cli._app import App, JobArgument, Workspace
from dgxlab.cli._out import Format, Out, table, write_bytes
from dgxlab.errors import UsageError

app = App("Annotate and reject sessions, and show their changes.")
Kind = StrEnum("Kind", ["run", "gate", "ab", "noise", "screen"])
_AGES_S = {"h": 3600.0, "d": 86400.0, "w": 7 * 86400.0}


def sessions(
    host: str | None = Option(None, help="Only those on this host.", autocompletion=_complete.hosts),
    experiment: str | None = Option(
        None, help="Only those that measured it, alone or as an arm.", autocompletion=_complete.experiments
    ),
    since: str | None = Option(None, metavar="WHEN", help="Only those begun since: 2026-11-20, or 12h, 3d, 2w ago."),
    kind: Kind | None = Option(None, help="Only those of this kind."),
    *,
    workspace: Workspace,
    out: Out,
) -> None:
    """List the sessions of the record, the newest last.

    Every command that takes a session takes the six characters of the first column. No host is contacted.

    Example: dgxlab sessions --kind ab --since 7d
    """
    from dgxlab import report

    with workspace.store() as store:
        rows = report.sessions(store, host=host, experiment=experiment, kind=kind, since=_begin(since))[::-1]
    texts = [
        {
            "session": row["alias"],
            "begun (UTC)": datetime.fromtimestamp(row["at"], UTC).strftime("%Y-%m-%d %H:%M"),
            **{name: str(row[name] or "") for name in ("kind", "name", "host", "runs")},
            "outcome": "; ".join(filter(None, (state, row["verdict"], *row["notes"]))),
        }
        for row in rows
        for state in ["" if row["state"] == "done" and row["verdict"] else row["state"]]
    ]
    out.result(rows, lambda: table(texts, cut=True) if texts else "no sessions", outcomes=True)


def _begin(since: str | None) -> float:
    """Return the time that --since names, in unix seconds; 0 for none."""
    if since is None:
        return 0.0
    if age := re.fullmatch(r"(\d{1,6})([hdw])", since):
        return time.time() - int(age[1]) * _AGES_S[age[2]]
    try:
        when = datetime.fromisoformat(since)
    except ValueError:
        raise UsageError(f"{since!r} is no time: 2026-11-20, or 12h, 3d, 2w", next="dgxlab sessions --help") from None
    return when.replace(tzinfo=when.tzinfo or UTC).timestamp()


@app.add
def reject(
    session: JobArgument,
    because: str = Option(..., help="Why, in words; every report of it says so."),
    *,
    workspace: Workspace,
    out: Out,
) -> None:
    """Reject a session for good: none of its results count.

    It stays in the record.

    Example: dgxlab session reject 20261120-120301-toy-3f2a9c --because hot
    """
    from dgxlab import judgement

    if not because.strip():
        raise UsageError("--because says nothing", next="dgxlab session reject --help")
    with workspace.store() as store:
        job_id = store.named(session)
        judgement.reject(store, job_id, because)
    out.result({"session": job_id, "rejected": because}, f"session {job_id} is rejected: {because}")


@app.add
def note(
    session: JobArgument,
    text: str = Argument(help="What to remember, in words; the session's report and `sessions` show it."),
    *,
    workspace: Workspace,
    out: Out,
) -> None:
    """Add a note to a session, for good.

    Example: dgxlab session note 3f2a9c "after the fan was replaced"
    """
    if not text.strip():
        raise UsageError("the note says nothing", next="dgxlab session note --help")
    with workspace.store() as store:
        job_id = store.named(session)
        store.put("notes", {"job_id": job_id, "at": time.time(), "note": text})
    out.result({"session": job_id, "note": text}, f"session {job_id} is noted: {text}")


@app.add
def diff(session: JobArgument, *, workspace: Workspace, out: Out) -> None:
    """Print the changes of the checkouts that a session built.

    `git apply` makes the checkout again, on the pin that the report names.

    Example: dgxlab session diff 20261120-120301-stock-vs-stock-tree-1a2b3c4d-3f2a9c
    """
    with workspace.store() as store:
        job = store.job(store.named(session))
    if not (diffs := job.plan.diffs):
        raise UsageError(f"session {job.job_id} built no changed checkout", next=f"dgxlab report {job.job_id}")
    if out.format is Format.human:
        write_bytes("".join(diffs.values()).encode())
    else:
        out.result(diffs, "")
