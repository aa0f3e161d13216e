"""The command line: the only part that prints or exits."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from dgxlab.cli import host, jobs, patch, record, report, run, verdict
from dgxlab.cli._app import App, DbOption, FormatOption, QuietOption
from dgxlab.cli._out import Format, Out, show_error
from dgxlab.errors import AGAIN, DgxlabError, Interrupted, UsageError, command


def schema(
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Write here instead of stdout.")] = None,
) -> None:
    """Write the JSON Schema of experiment files, for editors.

    Example: dgxlab schema --output schema/experiment.schema.json
    """
    import json

    from dgxlab.spec import json_schema

    text = json.dumps(json_schema(), indent=2) + "\n"
    if output is None:
        Out().result(None, text)
        return
    try:
        output.write_text(text)
    except OSError as error:
        mend = command("ls", "-ld", output.parent)
        raise UsageError(f"{output} cannot be written: {error.strerror}", next=mend) from error


app = App(
    "Patch, build, gate and benchmark llama.cpp, with numbers that can be traced.",
    name="dgxlab",
    pretty_exceptions_enable=False,
    add_completion=False,
)
app.add("run")(run.run)
app.add("ab")(run.ab)
app.add("noise")(run.noise)
app.add("gate")(run.gate)
app.add("plan")(run.plan)
app.add("report")(report.report)
app.add("jobs")(jobs.jobs)
app.add("attach")(jobs.attach)
app.add("cancel")(jobs.cancel)
app.add("logs")(jobs.logs)
app.add_typer(jobs.app, name="session")
app.add_typer(patch.app, name="patch")
app.add_typer(host.app, name="host")
app.add("import")(record.import_)
app.add("export")(record.export)
app.add_typer(record.app, name="db")
app.add("verdict")(verdict.verdict)
app.add("doctor")(host.doctor)
app.add("schema")(schema)


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
    version: bool = typer.Option(False, "--version", callback=_version, is_eager=True, help="Print it."),
) -> None:
    pass  # each command reads the three from its context: App.add


def main() -> None:
    """Run the program; every error on purpose becomes one sentence and its exit code."""
    try:
        app(prog_name="dgxlab")
    except DgxlabError as error:
        show_error(error)
        sys.exit(error.exit_code)
    except SystemExit as ended:
        if ended.code == Interrupted.exit_code:  # typer's word for Ctrl-C, where no job is being followed
            show_error(Interrupted("stopped", next=AGAIN))
        raise
