"""The command line: the only part that prints or exits."""

from __future__ import annotations

import sys

import typer

from dgxlab.cli import ab, db, doctor, exchange, host, jobs, logs, patch, report, run, schema, verdict
from dgxlab.cli._out import show_error
from dgxlab.errors import AGAIN, DgxlabError, Interrupted

app = typer.Typer(
    name="dgxlab",
    help="Patch, build, gate and benchmark llama.cpp, with numbers that can be traced.",
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    no_args_is_help=True,
    add_completion=False,
)
app.command("run")(run.run)
app.command("ab")(ab.ab)
app.command("noise")(ab.noise)
app.command("gate")(run.gate)
app.command("plan")(run.plan)
app.command("report")(report.report)
app.command("jobs")(jobs.jobs)
app.command("attach")(jobs.attach)
app.command("cancel")(jobs.cancel)
app.command("logs")(logs.logs)
app.add_typer(jobs.app, name="session")
app.add_typer(patch.app, name="patch")
app.add_typer(host.app, name="host")
app.command("import")(exchange.import_)
app.command("export")(exchange.export)
app.add_typer(db.app, name="db")
app.command("verdict")(verdict.verdict)
app.command("doctor")(doctor.doctor)
app.command("schema")(schema.schema)


def _version(value: bool) -> None:
    if value:
        from dgxlab import __version__

        typer.echo(f"dgxlab {__version__}")
        raise typer.Exit


@app.callback()
def _top(version: bool = typer.Option(False, "--version", callback=_version, is_eager=True, help="Print it.")) -> None:
    pass


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
