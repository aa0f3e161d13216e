"""The command line: the only part that prints or exits."""

from __future__ import annotations

import difflib
import json
import re
import sys
from itertools import takewhile
from pathlib import Path

import typer
from typer import Option
from typer.exceptions import TyperException

from dgxlab.cli import (
    host,
    jobs,
    loop,
    mcp,
    new,
    patch,
    pin,
    record,
    report,
    run,
    search,
    session,
    traffic,
    verdict,
    watch,
)
from dgxlab.cli._app import App, DbOption
from dgxlab.cli._out import Format, FormatOption, Out, QuietOption, show_error
from dgxlab.errors import AGAIN, DgxlabError, Interrupted, UsageError, access, command


def schema(output: Path | None = Option(None, "--output", "-o", help="Write here instead of stdout.")) -> None:
    """Write the JSON Schema of experiment files, for editors.

    Example: dgxlab schema --output schema/experiment.schema.json
    """
    from dgxlab.spec import json_schema

    text = json.dumps(json_schema(), indent=2) + "\n"
    if output is None:
        Out().result(None, text)
        return
    with access(output, "written", UsageError):
        output.write_text(text)


app = App(
    "Patch, build, gate and benchmark llama.cpp, with numbers that can be traced.",
    name="dgxlab",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["--help", "-h"]},
)
for _command in (
    new.init,
    *(run.run, run.ab, loop.try_, watch.watch, run.noise, run.gate, run.plan, search.bisect, search.ablate),
    report.report,
    *(session.sessions, jobs.jobs, jobs.attach, jobs.cancel, jobs.logs),
    *(record.import_, record.export, record.serve_record),
    *(verdict.verdict, traffic.bytes_, host.doctor, mcp.mcp, schema),
):
    app.add(_command)
for _name, _group in {
    "tries": loop.app,
    "session": session.app,
    "new": new.app,
    "patch": patch.app,
    "pin": pin.app,
    "host": host.app,
    "db": record.app,
}.items():
    app.add_typer(_group, name=_name)


def _as_ours(refused: TyperException) -> UsageError:
    """Return an error of typer's about the command line in our own form."""
    text = refused.format_message()
    if text.startswith("Usage: "):  # a group without a command: its help
        typer.echo(text, err=True)
        sys.exit(refused.exit_code)
    text = f"{text[0].lower()}{text[1:]}".rstrip(".").replace(" Value error, ", " ")  # pydantic's words
    for detail in getattr(refused.__cause__, "errors", list)()[:1]:  # what pydantic says of a number
        from dgxlab.spec.nodes import wanted

        text = f"{text.partition(': ')[0]}: {must}" if (must := wanted(detail)) else text
    said, is_none, known = text.partition(" is not one of ")
    if near := difflib.get_close_matches(said.rpartition(": ")[2].strip("'"), re.findall("'([^']*)'", known), n=1):
        text = f"{said}{is_none}its values; did you mean {near[0]}?"
    if context := getattr(refused, "ctx", None):
        return UsageError(text, next=f"{context.command_path} --help")
    words = takewhile(lambda word: not word.startswith("-"), sys.argv[1:])
    return UsageError(text, next=command("dgxlab", *words, "--help"))


def _version(value: bool) -> None:
    if value:
        from dgxlab import __version__

        typer.echo(f"dgxlab {__version__}")
        raise typer.Exit


@app.callback()
def _top(
    db: DbOption = None,
    format: FormatOption = Format.human,
    quiet: QuietOption = False,
    version: bool = Option(False, "--version", "-V", callback=_version, is_eager=True, help="Print it."),
) -> None:
    pass  # each command reads the three from its context: App.add


def main() -> None:
    """Run the program; a DgxlabError, and one of typer's, becomes one sentence and its exit code."""
    try:
        try:
            sys.exit(app(prog_name="dgxlab", standalone_mode=False))
        except TyperException as refused:
            raise _as_ours(refused) from refused
    except DgxlabError as error:
        show_error(error)
        sys.exit(error.exit_code)
    except SystemExit as ended:
        if ended.code == Interrupted.exit_code:  # typer's word for Ctrl-C, where no job is being followed
            show_error(Interrupted("stopped", next=AGAIN))
        raise
