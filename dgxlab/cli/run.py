"""dgxlab run, gate, plan."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dgxlab.cli._lab import database, lab
from dgxlab.cli._lab import experiment as read_spec
from dgxlab.cli._options import DbOption, Format, FormatOption, HostOption, QuietOption, SetOption, SpecArgument
from dgxlab.cli._out import Out, plural

if TYPE_CHECKING:
    from dgxlab.lab import Outcome
    from dgxlab.lab.base import Watch
    from dgxlab.model import Experiment

AgainOption = Annotated[bool, typer.Option("--again", help="Measure everything, up to date or not.")]
WaitOption = Annotated[
    int,
    typer.Option("--wait", metavar="MINUTES", min=0, help="Wait so long for a device that others use; 0: not at all."),
]
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
    wait: WaitOption = 60,
    db: DbOption = None,
    format: FormatOption = Format.human,
    quiet: QuietOption = False,
) -> None:
    """Build, gate and measure what is not up to date, and report.

    Example: dgxlab run experiments/quickstart.yaml
    """
    _carry_out(read_spec(spec, set_ or [], host), Out(format, quiet), db, again=again, tree=tree, wait_s=60 * wait)


def gate(
    spec: SpecArgument,
    host: HostOption = None,
    set_: SetOption = None,
    tree: TreeOption = None,
    wait: WaitOption = 60,
    db: DbOption = None,
    format: FormatOption = Format.human,
    quiet: QuietOption = False,
) -> None:
    """Build and run the parity gates alone.

    Example: dgxlab gate experiments/quickstart.yaml
    """
    _carry_out(
        read_spec(spec, set_ or [], host), Out(format, quiet), db, again=True, tree=tree, wait_s=60 * wait, bench=False
    )


def plan(
    spec: SpecArgument,
    host: HostOption = None,
    set_: SetOption = None,
    tree: TreeOption = None,
    format: FormatOption = Format.human,
    quiet: QuietOption = False,
) -> None:
    """Print the exact commands of a run from nothing; no host is asked.

    Example: dgxlab plan experiments/h200.yaml
    """
    from dgxlab import plan as planning
    from dgxlab.cli._display import display
    from dgxlab.cli._lab import connect
    from dgxlab.cli._plan import describe
    from dgxlab.lab import Lab, resolve
    from dgxlab.source import PinCache, default_path

    experiment, out = read_spec(spec, set_ or [], host), Out(format, quiet)
    bare = Lab(None, PinCache(default_path()), connect)  # type: ignore[arg-type]  # nothing is looked up or recorded
    with display(out) as watch:
        source = resolve(bare, experiment, tree, watch)
    made = planning.make(experiment, source, job_id=experiment.name)
    out.result(made, lambda: describe(made))


def _carry_out(experiment: Experiment, out: Out, db: Path | None, *, bench: bool = True, **options: Any) -> None:
    """Run, print the report whatever came of it, and leave with the job's own error."""
    from dgxlab import lab as use_cases
    from dgxlab.cli._display import display

    with lab(db, create=True) as opened:
        gates: list[str] = []
        with display(out) as watch:
            outcome = use_cases.run(opened, experiment, watch=_noting(gates, watch), bench=bench, **options)
        from dgxlab import report  # only now: until here it would delay the measuring

        if bench:
            made = report.collect_experiment(opened.store, experiment, outcome.source, outcome.host_id)
        else:
            made = report.collect(opened.store, job_id=outcome.job_id)
        out.result(made, lambda: report.render(made))
    out.note(f"{_cells(outcome) if bench else _gates(gates)}; recorded in {database(db)}")
    if outcome.error:
        raise outcome.error


def _noting(gates: list[str], watch: Watch) -> Watch:
    """Return a watch that also notes how every gate ended."""

    def see(event: Mapping[str, Any]) -> None:
        if event["event"] == "gate":
            gates.append(event["status"])
        watch(event)

    return see


def _gates(ended: Sequence[str]) -> str:
    return ", ".join([plural(len(ended), "gate"), *(f"{number} {how}" for how, number in Counter(ended).items())])


def _cells(outcome: Outcome) -> str:
    counts = f"{plural(outcome.planned, 'cell')}, {outcome.measured} measured now, {outcome.reused} up to date"
    missing = outcome.planned - outcome.measured - outcome.reused
    return counts + (f", {missing} not measured" if missing else "")
