"""dgxlab run, gate, plan."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dgxlab.cli._lab import database, lab
from dgxlab.cli._options import DbOption, Format, FormatOption, HostOption, QuietOption, SetOption, SpecArgument
from dgxlab.cli._out import Out

if TYPE_CHECKING:
    from dgxlab.lab import Outcome
    from dgxlab.model import Experiment

AgainOption = Annotated[bool, typer.Option("--again", help="Measure everything, up to date or not.")]
TreeOption = Annotated[
    Path | None,
    typer.Option("--tree", help="Build this llama.cpp checkout, dirty or not, instead of the spec's series."),
]


def run(
    spec: SpecArgument,
    host: HostOption = None,
    set_: SetOption = None,
    again: AgainOption = False,
    tree: TreeOption = None,
    db: DbOption = None,
    format: FormatOption = Format.human,
    quiet: QuietOption = False,
) -> None:
    """Build, gate and measure what is not up to date, record it, and print the report.

    Example: dgxlab run experiments/quickstart.yaml
    """
    from dgxlab.spec import load

    experiment = load(spec, set_ or [], host)
    out = Out(format, quiet)
    outcome = _carry_out(experiment, out, db, again=again, tree=tree, bench=True)
    _finish(outcome, out)


def gate(
    spec: SpecArgument,
    host: HostOption = None,
    set_: SetOption = None,
    tree: TreeOption = None,
    db: DbOption = None,
    format: FormatOption = Format.human,
    quiet: QuietOption = False,
) -> None:
    """Build and run the parity gates alone.

    Example: dgxlab gate experiments/quickstart.yaml
    """
    from dgxlab.spec import load

    experiment = load(spec, set_ or [], host)
    out = Out(format, quiet)
    outcome = _carry_out(experiment, out, db, again=True, tree=tree, bench=False)
    _finish(outcome, out)


def plan(
    spec: SpecArgument,
    host: HostOption = None,
    set_: SetOption = None,
    tree: TreeOption = None,
    format: FormatOption = Format.human,
    quiet: QuietOption = False,
) -> None:
    """Print the exact commands that a run from nothing would carry out, without asking the host.

    Example: dgxlab plan experiments/h200.yaml
    """
    from dgxlab import plan as planning
    from dgxlab.cli._lab import connect
    from dgxlab.cli._plan import describe
    from dgxlab.lab import Lab, resolve
    from dgxlab.model import to_json
    from dgxlab.source import PinCache, default_path
    from dgxlab.spec import load

    experiment = load(spec, set_ or [], host)
    out = Out(format, quiet)
    bare = Lab(None, PinCache(default_path()), connect)  # type: ignore[arg-type]  # nothing is looked up or recorded
    source = resolve(bare, experiment, tree, lambda event: out.note(event["note"]))
    made = planning.make(experiment, source, job_id=experiment.name)
    out.result(lambda: to_json(made), lambda: describe(made))


def _carry_out(experiment: Experiment, out: Out, db: Path | None, **options: Any) -> Outcome:
    from dgxlab import lab as use_cases
    from dgxlab.cli._display import display
    from dgxlab.model import to_json

    with lab(db) as opened:
        with display(out) as watch:
            outcome = use_cases.run(opened, experiment, watch=watch, **options)
        from dgxlab import report  # only now: until here it would delay the measuring

        made = report.collect_experiment(opened.store, experiment, outcome.source, experiment.host)
        out.result(lambda: to_json(made), lambda: report.render(made))
    measured = outcome.planned - outcome.reused
    out.note(f"{outcome.planned} cells, {measured} measured now, {outcome.reused} up to date; {database(db)}")
    return outcome


def _finish(outcome: Outcome, out: Out) -> None:
    """Leave with the job's own exit code, after the report."""
    if outcome.error:
        raise outcome.error
