"""dgxlab db: the record's own health, merging two of them, and making one again."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Annotated

import typer

from dgxlab.cli._lab import connect, database, lab, store
from dgxlab.cli._options import DbOption, Format, FormatOption, QuietOption
from dgxlab.cli._out import Out, plural
from dgxlab.errors import CheckFailed, command

app = typer.Typer(help="Check, merge and rebuild the record.", no_args_is_help=True, rich_markup_mode=None)


@app.command("check")
def check(
    path: Annotated[Path | None, typer.Argument(help="The database; --db by default.", show_default=False)] = None,
    db: DbOption = None,
    format: FormatOption = Format.human,
    quiet: QuietOption = False,
) -> None:
    """Check the record: integrity, seals, evidence, plans and verdicts.

    Example: dgxlab db check
    """
    gc.disable()  # it would walk 100,000 rows again and again for cycles, and there are none

    from dgxlab import audit, ingest

    with store(path or db) as opened:
        problems = audit.check(opened)
        beyond = [] if problems else list(ingest.beyond(opened))  # sound evidence of what cannot be: no damage
    said = [*(problems or ["ok"]), *(f"note: {each}" for each in beyond)]
    Out(format, quiet).result({"problems": problems, "beyond": beyond}, "\n".join(said))
    if problems:
        again = command("dgxlab", "db", "rebuild", opened.path)
        raise CheckFailed(f"{opened.path} has {plural(len(problems), 'problem')}", next=again)


@app.command("text")
def text(
    path: Annotated[Path, typer.Argument(help="The database.", show_default=False)],
    format: FormatOption = Format.human,
    quiet: QuietOption = False,
) -> None:
    """Print every row as a line, for git diff.

    Example: dgxlab db text results.db
    """
    from dgxlab import store as stores

    found = list(stores.text(path))
    Out(format, quiet).lines(found, lambda: "\n".join(found))


@app.command("merge")
def merge(
    current: Annotated[Path, typer.Argument(help="The database that receives.", show_default=False)],
    other: Annotated[Path, typer.Argument(help="The one whose rows are added.", show_default=False)],
    format: FormatOption = Format.human,
    quiet: QuietOption = False,
) -> None:
    """Add what OTHER has and CURRENT lacks; git's merge driver too.

    Example: dgxlab db merge results.db ../laptop/results.db
    """
    from dgxlab import audit

    with store(current) as opened:
        counts = audit.merge(opened, other)
    added = sum(counts.values())
    Out(format, quiet).result(counts, f"{added} rows added" + "".join(f", {n} {t}" for t, n in counts.items() if n))


@app.command("rebuild")
def rebuild(
    path: Annotated[Path | None, typer.Argument(help="The database; --db by default.", show_default=False)] = None,
    host: Annotated[
        list[str] | None, typer.Option("--host", help="A host with jobs of the record; may be given again.")
    ] = None,
    db: DbOption = None,
    format: FormatOption = Format.human,
    quiet: QuietOption = False,
) -> None:
    """Record anew what jobs left on hosts, and here.

    Their folders there and their raw files here hold all of it. A sound database keeps what it has. One that is damaged
    or gone is set aside first, and its newest sound copy is where this begins: what was imported is in that alone.

    Example: dgxlab db rebuild new.db --host local
    """
    from dgxlab.lab.rebuild import mend
    from dgxlab.lab.rebuild import rebuild as use_case

    out = Out(format, quiet)
    mend(database(path or db), out.note)
    with lab(path or db, create=True) as opened:
        done = use_case(opened, [connect(name) for name in host or ()], lambda event: out.note(event.get("note", "")))
    reasons = [f"{job_id} is left out: {reason}" for job_id, reason in done.left]
    out.result(done, "\n".join([*reasons, f"{plural(len(done.added), 'job')} recorded"]))
    if done.left:
        raise CheckFailed(
            f"{plural(len(done.left), 'job')} could not be recorded", next=command("ls", "-l", opened.raw)
        )
