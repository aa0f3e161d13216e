"""dgxlab run, gate, plan."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dgxlab.cli._lab import database, lab, store, where
from dgxlab.cli._lab import experiment as read_spec
from dgxlab.cli._options import (
    AllowOption,
    DbOption,
    Format,
    FormatOption,
    HostOption,
    MaxMinutesOption,
    QuietOption,
    SetOption,
    SpecArgument,
    TrustSourceOption,
    WaitOption,
    seconds,
)
from dgxlab.cli._out import Out, plural
from dgxlab.cli._tables import show
from dgxlab.errors import SpecError, UsageError, command
from dgxlab.units import share

if TYPE_CHECKING:
    from dgxlab.lab import Outcome
    from dgxlab.lab.base import Watch
    from dgxlab.model import Experiment, Plan, Source

AgainOption = Annotated[bool, typer.Option("--again", help="Measure everything, up to date or not.")]
TreeOption = Annotated[
    Path | None,
    typer.Option("--tree", help="Build this llama.cpp checkout, dirty or not, instead of the spec's series."),
]


CandidateArgument = Annotated[str | None, typer.Argument(help="What would be compared with it, as a file or a name.")]
EffectOption = Annotated[
    str | None,
    typer.Option("--effect", metavar="SHARE", help="Say instead what an A/B session would see; 2% or 0.02."),
]


def run(  # noqa: PLR0913, PLR0917 - each is an option
    spec: SpecArgument,
    host: HostOption = None,
    set_: SetOption = None,
    again: AgainOption = False,
    tree: TreeOption = None,
    wait: WaitOption = 60,
    trust_source: TrustSourceOption = False,
    db: DbOption = None,
    format: FormatOption = Format.human,
    quiet: QuietOption = False,
) -> None:
    """Build, gate and measure what is not up to date, and report.

    Example: dgxlab run experiments/cpu/quickstart.yaml
    """
    experiment, out = read_spec(spec, set_ or [], host), Out(format, quiet)
    _carry_out(experiment, out, db, trust_source, again=again, tree=tree, wait_s=60 * wait)


def gate(
    spec: SpecArgument,
    host: HostOption = None,
    set_: SetOption = None,
    tree: TreeOption = None,
    wait: WaitOption = 60,
    trust_source: TrustSourceOption = False,
    db: DbOption = None,
    format: FormatOption = Format.human,
    quiet: QuietOption = False,
) -> None:
    """Build and run the gates alone.

    Example: dgxlab gate experiments/cpu/quickstart.yaml
    """
    experiment, out = read_spec(spec, set_ or [], host), Out(format, quiet)
    _carry_out(experiment, out, db, trust_source, again=True, tree=tree, wait_s=60 * wait, bench=False)


def plan(  # noqa: PLR0913, PLR0917 - each is an option
    spec: SpecArgument,
    candidate: CandidateArgument = None,
    host: HostOption = None,
    set_: SetOption = None,
    tree: TreeOption = None,
    allow: AllowOption = None,
    effect: EffectOption = None,
    max_minutes: MaxMinutesOption = None,
    trust_source: TrustSourceOption = False,
    db: DbOption = None,
    format: FormatOption = Format.human,
    quiet: QuietOption = False,
) -> None:
    """Print the exact commands of a run from nothing; no host is asked.

    With a candidate, those of an A/B session. With --effect, what such a session would be able to see, by the noise
    floors in the record, and how long it would take.

    Example: dgxlab plan experiments/h200/h200.yaml
    """
    from dgxlab import plan as planning
    from dgxlab.cli._plan import describe

    if candidate and (tree or effect):
        raise UsageError("--tree and --effect are about one experiment", next=command("dgxlab", "plan", spec))
    experiment, out = read_spec(spec, set_ or [], host), Out(format, quiet)
    source = partial(_source, tree=tree, out=out, trust_source=trust_source)
    if effect:
        _show_outlook(experiment, _share(effect), source, out, db)
    elif candidate:
        other = read_spec(candidate, set_ or [], host)
        two = _plan_of_two(experiment, other, allow or (), source, seconds(max_minutes))
        ahead = _ahead(experiment, two.arms[0].source, db)
        out.result(two, lambda: "\n".join([describe(two), *ahead]))
    else:
        one = planning.make(experiment, source(experiment), job_id=experiment.name)
        out.result(one, lambda: describe(one))


def _share(text: str) -> float:
    """Read an effect: `2%` or `0.02`.

    Raises:
        UsageError: if it is no share between 0 and 1.
    """
    try:
        return share(text)
    except ValueError:
        raise UsageError(f"an effect is a share as in 2% or 0.02, not {text!r}", next="dgxlab plan --help") from None


def _source(experiment: Experiment, *, tree: Path | None, out: Out, trust_source: bool) -> Source:
    """Return the tree that a plan is about, from the pins at hand."""
    from dgxlab.cli._display import display
    from dgxlab.cli._lab import connect
    from dgxlab.lab import Lab, resolve
    from dgxlab.source import PinCache, default_path

    cache = PinCache(default_path(), trusted=trust_source)
    bare = Lab(None, cache, connect)  # type: ignore[arg-type]  # nothing is looked up or recorded
    with display(out) as watch:
        return resolve(bare, experiment, tree, watch)


def _plan_of_two(
    baseline: Experiment,
    candidate: Experiment,
    allow: Collection[str],
    source: Callable[[Experiment], Source],
    max_s: float,
) -> Plan:
    """Return the plan of an A/B session."""
    from dgxlab import compare
    from dgxlab import plan as planning

    compare.refuse(compare.differences(baseline, candidate), allow, candidate.path)
    sources = (source(baseline), source(candidate))
    name = planning.session_name(baseline, candidate)
    return planning.make_ab(baseline, candidate, sources, job_id=name, max_s=max_s)


def _ahead(experiment: Experiment, source: Source, db: Path | None) -> list[str]:
    """Return how long a session will be, as far as there is a record that knows."""
    from dgxlab.cli._outlook import planned
    from dgxlab.lab import outlook

    record = database(db, Path(experiment.root))
    if not record.exists():
        return []
    with store(record) as opened:
        return [planned(outlook(opened, experiment, source, experiment.session.effect))]


def _show_outlook(
    experiment: Experiment, effect: float, source: Callable[[Experiment], Source], out: Out, db: Path | None
) -> None:
    """Print what a session will see.

    Raises:
        SpecError: if there is no record to know it from.
    """
    from dgxlab.cli._outlook import describe
    from dgxlab.lab import outlook
    from dgxlab.lab.outlook import command

    record = database(db, Path(experiment.root))
    if not record.exists():
        raise SpecError(f"there is no {record} yet, so no noise floor is known", next=command("noise", experiment))
    tree = source(experiment)
    with store(record) as opened:
        made = outlook(opened, experiment, tree, effect)
    out.result(made, lambda: describe(made, experiment))


def _carry_out(
    experiment: Experiment, out: Out, db: Path | None, trust_source: bool, *, bench: bool = True, **options: Any
) -> None:
    """Run, print the report whatever came of it, and leave with the job's own error."""
    from dgxlab import lab as use_cases
    from dgxlab.cli._display import display

    project = Path(experiment.root)
    out.note(where(db, project))
    with lab(db, create=True, project=project, trust_source=trust_source) as opened:
        gates: list[str] = []
        with display(out) as watch:
            outcome = use_cases.run(opened, experiment, watch=_noting(gates, watch), bench=bench, **options)
        from dgxlab import report  # only now: until here it would delay the measuring

        if bench:
            made = report.collect_experiment(opened.store, experiment, outcome.source, outcome.device)
        else:
            made = report.collect(opened.store, job_id=outcome.job_id)
        show(out, made, lambda: report.render(made))
    out.note(f"{_cells(outcome) if bench else _gates(gates)}; recorded in {database(db, project)}")
    if outcome.error:
        raise outcome.error


def _noting(gates: list[str], watch: Watch) -> Watch:
    """Return a watch that also notes how every gate ended."""

    def see(event: Mapping[str, Any]) -> None:
        if event["event"] in ("gate", "check"):
            gates.append(event["status"])
        watch(event)

    return see


def _gates(ended: Sequence[str]) -> str:
    return ", ".join([plural(len(ended), "gate"), *(f"{number} {how}" for how, number in Counter(ended).items())])


def _cells(outcome: Outcome) -> str:
    counts = f"{plural(outcome.planned, 'cell')}, {outcome.measured} measured now, {outcome.reused} up to date"
    missing = outcome.planned - outcome.measured - outcome.reused
    return counts + (f", {missing} not measured" if missing else "")
