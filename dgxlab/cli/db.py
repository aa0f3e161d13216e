"""dgxlab db: the record's own health, and merging two of them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dgxlab.cli._lab import store
from dgxlab.cli._options import DbOption, Format, FormatOption, QuietOption
from dgxlab.cli._out import Out, plural
from dgxlab.errors import CheckFailed

app = typer.Typer(help="Check and merge the record.", no_args_is_help=True, rich_markup_mode=None)


@app.command("check")
def check(
    path: Annotated[Path | None, typer.Argument(help="The database; --db by default.", show_default=False)] = None,
    db: DbOption = None,
    format: FormatOption = Format.human,
    quiet: QuietOption = False,
) -> None:
    """Check the record: integrity, evidence, digests and verdicts.

    Example: dgxlab db check
    """
    from dgxlab import judgement
    from dgxlab import store as stores

    with store(path or db) as opened:
        problems = stores.check(opened) or judgement.check(opened)  # unsound evidence says nothing of verdicts
    Out(format, quiet).result({"problems": problems}, "\n".join(problems) or "ok")
    if problems:
        raise CheckFailed(f"{opened.path} has {plural(len(problems), 'problem')}", next=f"ls {opened.path}.backups")


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
    from dgxlab import store as stores

    with store(current) as opened:
        counts = stores.merge(opened, other)
    added = sum(counts.values())
    Out(format, quiet).result(counts, f"{added} rows added" + "".join(f", {n} {t}" for t, n in counts.items() if n))
