"""dgxlab run, gate, ab, noise, plan: an experiment measured or compared, or the commands that would do it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dgxlab.cli._app import (
    AllowOption,
    Desk,
    FailOnOption,
    HostOption,
    MaxMinutesOption,
    SetOption,
    SpecArgument,
    TrustSourceOption,
    WaitOption,
    WideOption,
    experiment,
    seconds,
)
from dgxlab.cli._out import Out, plural, show_error
from dgxlab.errors import AGAIN, CheckFailed, ConditionsError, DgxlabError, SpecError, UsageError, command
from dgxlab.units import share

if TYPE_CHECKING:
    from dgxlab.lab.session import Request
    from dgxlab.model import Experiment, Plan
    from dgxlab.report import SessionReport

AgainOption = Annotated[bool, typer.Option("--again", help="Measure everything, up to date or not.")]
TreeOption = Annotated[
    Path | None,
    typer.Option("--tree", help="Build this llama.cpp checkout, dirty or not, instead of the spec's series."),
]
BaselineArgument = Annotated[
    str,
    typer.Argument(help="What to compare with: a YAML file, or its name in experiments/.", show_default=False),
]
CandidateArgument = Annotated[
    str, typer.Argument(help="What is to be judged: a YAML file, or its name in experiments/.", show_default=False)
]
ItselfArgument = Annotated[str, typer.Argument(help="A YAML file, or its name in experiments/.", show_default=False)]
OtherArgument = Annotated[str | None, typer.Argument(help="What would be compared with it, as a file or a name.")]
ScreenOption = Annotated[
    bool, typer.Option("--screen", help="One bracket instead of a chain: drops a bad idea early, keeps no good one.")
]
EffectOption = Annotated[
    str | None,
    typer.Option("--effect", metavar="SHARE", help="Say instead what an A/B session would see; 2% or 0.02."),
]


def run(  # noqa: PLR0913 - each is an option
    spec: SpecArgument,
    host: HostOption = None,
    set_: SetOption = None,
    again: AgainOption = False,
    tree: TreeOption = None,
    wait: WaitOption = 60,
    trust_source: TrustSourceOption = False,
    wide: WideOption = False,
    *,
    desk: Desk,
    out: Out,
) -> None:
    """Build, gate and measure what is not up to date, and report.

    Example: dgxlab run experiments/cpu/quickstart.yaml
    """
    from dgxlab.lab.session import Request

    request = Request("run", experiment(spec, set_, host), again=again, tree=tree, wait_s=60 * wait)
    _measure(request, replace(desk, trust_source=trust_source), out, wide=wide)


def gate(
    spec: SpecArgument,
    host: HostOption = None,
    set_: SetOption = None,
    tree: TreeOption = None,
    wait: WaitOption = 60,
    trust_source: TrustSourceOption = False,
    *,
    desk: Desk,
    out: Out,
) -> None:
    """Build and run the gates alone.

    Example: dgxlab gate experiments/cpu/quickstart.yaml
    """
    from dgxlab.lab.session import Request

    request = Request("gate", experiment(spec, set_, host), tree=tree, wait_s=60 * wait)
    _measure(request, replace(desk, trust_source=trust_source), out)


def ab(  # noqa: PLR0913, PLR0917 - each is an option
    baseline: BaselineArgument,
    candidate: CandidateArgument,
    host: HostOption = None,
    set_: SetOption = None,
    allow: AllowOption = None,
    screen: ScreenOption = False,
    fail_on: FailOnOption = None,
    max_minutes: MaxMinutesOption = None,
    wait: WaitOption = 60,
    trust_source: TrustSourceOption = False,
    wide: WideOption = False,
    *,
    desk: Desk,
    out: Out,
) -> None:
    """Measure a candidate against its baseline, and judge it.

    Both are built and gated on one host and then run by turns, A B A ... B A, each run a fresh process. Nothing that
    was measured is shown before the end. --set and --host are for both.

    Example: dgxlab ab threads-2 threads-1
    """
    from dgxlab.lab.session import Request

    first, second = (experiment(name, set_, host) for name in (baseline, candidate))
    kind, max_s = "screen" if screen else "ab", seconds(max_minutes)
    request = Request(kind, second, first, allow=allow or (), wait_s=60 * wait, max_s=max_s)
    _measure(request, replace(desk, trust_source=trust_source), out, fail_on or (), wide=wide)


def noise(
    spec: ItselfArgument,
    host: HostOption = None,
    set_: SetOption = None,
    fail_on: FailOnOption = None,
    wait: WaitOption = 60,
    trust_source: TrustSourceOption = False,
    wide: WideOption = False,
    *,
    desk: Desk,
    out: Out,
) -> None:
    """Measure an experiment against itself: the host's noise floor.

    The floor of each cell is what screens, promotion and `plan --effect` go by.

    Example: dgxlab noise experiments/h200/h200.yaml
    """
    from dgxlab.lab.session import Request

    itself = experiment(spec, set_, host)
    request = Request("noise", itself, itself, wait_s=60 * wait)
    _measure(request, replace(desk, trust_source=trust_source), out, fail_on or (), wide=wide)


def plan(  # noqa: PLR0913 - each is an option
    spec: SpecArgument,
    candidate: OtherArgument = None,
    host: HostOption = None,
    set_: SetOption = None,
    tree: TreeOption = None,
    allow: AllowOption = None,
    effect: EffectOption = None,
    max_minutes: MaxMinutesOption = None,
    trust_source: TrustSourceOption = False,
    *,
    desk: Desk,
    out: Out,
) -> None:
    """Print the exact commands of a run from nothing; no host is asked.

    With a candidate, those of an A/B session. With --effect, what such a session would be able to see, by the noise
    floors in the record, and how long it would take.

    Example: dgxlab plan experiments/h200/h200.yaml
    """
    from dgxlab.cli._plan import describe
    from dgxlab.lab.session import Request

    if candidate and (tree or effect):
        raise UsageError("--tree and --effect are about one experiment", next=command("dgxlab", "plan", spec))
    first = experiment(spec, set_, host)
    desk = replace(desk, project=Path(first.root), trust_source=trust_source)
    if effect:
        try:
            wanted = share(effect)
        except ValueError:
            text = f"an effect is a share as in 2% or 0.02, not {effect!r}"
            raise UsageError(text, next="dgxlab plan --help") from None
        _show_outlook(Request("run", first, tree=tree), wanted, desk, out)
    elif candidate:
        second = experiment(candidate, set_, host)
        session = _planned(Request("ab", second, first, allow=allow or (), max_s=seconds(max_minutes)), desk, out)
        length = _length(session, first, desk)
        out.result(session, lambda: "\n".join([describe(session), *length]))
    else:
        single = _planned(Request("run", first, tree=tree), desk, out)
        out.result(single, lambda: describe(single))


def leave(session: SessionReport, error: DgxlabError | None, fail_on: Collection[str] = ()) -> None:
    """Leave with the code that a session's verdicts ask for; the user's question comes before the job's own error.

    Raises:
        CheckFailed: if a verdict is what the user fails on; the job's error is then shown only.
        DgxlabError: the job's own error.
        ConditionsError: if a verdict is invalid.
    """
    count, of = sum(session.counts.values()), "screen: " if session.kind == "screen" else ""

    def counted(number: int) -> str:
        return f"{of}{plural(number, 'verdict')} of {count} {'is' if number == 1 else 'are'}"

    if failed := [word for word in dict.fromkeys(fail_on) if word in session.counts or word == session.verdict]:
        if error:
            show_error(error)
        number = sum(session.counts.get(word, 0) for word in failed) or count
        mend = f"dgxlab report {session.session}"
        raise CheckFailed(f"{counted(number)} {' or '.join(failed)}, on which to fail", next=mend)
    if error:
        raise error
    if invalid := session.counts.get("invalid", 0):
        raise ConditionsError(f"{counted(invalid)} invalid", next=AGAIN)


def _measure(request: Request, desk: Desk, out: Out, fail_on: Collection[str] = (), *, wide: bool = False) -> None:
    """Do what is asked for, print the report whatever came of it, and leave with its error or its verdicts' code."""
    from dgxlab.cli._display import display
    from dgxlab.lab import session

    desk = replace(desk, project=Path(request.experiments[0].root))
    out.note(desk.where)
    with desk.lab(create=True) as lab:
        with display(out) as watch:
            outcome = session.run(lab, request, watch)
        from dgxlab import report  # only now: until here it would delay the measuring

        page: Any
        if request.baseline:
            page = report.collect_session(lab.store, outcome.job_id)
            counted = page.summary
        elif request.kind == "gate":
            page = report.collect(lab.store, job_id=outcome.job_id)
            ended = [f"{number} {how}" for how, number in Counter(outcome.gates).items()]
            counted = ", ".join([plural(len(outcome.gates), "gate"), *ended])
        else:
            page = report.collect_experiment(lab.store, request.experiment, outcome.source, outcome.device)
            missing = outcome.planned - outcome.measured - outcome.reused
            counted = f"{plural(outcome.planned, 'cell')}, {outcome.measured} measured now, {outcome.reused} up to date"
            counted += f", {missing} not measured" if missing else ""
        out.report(page, lambda: report.render(page, wide=wide))
    out.note(f"{counted}; recorded in {desk.database}")
    if request.baseline:
        leave(page, outcome.error, fail_on)
    elif outcome.error:
        raise outcome.error


def _planned(request: Request, desk: Desk, out: Out) -> Plan:
    from dgxlab.cli._display import display
    from dgxlab.lab.session import full_plan
    from dgxlab.source import PinCache, default_path

    with display(out) as watch:
        return full_plan(PinCache(default_path(), trusted=desk.trust_source), request, watch)


def _length(session: Plan, baseline: Experiment, desk: Desk) -> list[str]:
    """Return how long a session will be, as far as there is a record that knows."""
    from dgxlab.cli._plan import length
    from dgxlab.lab.outlook import outlook

    if not desk.database.exists():
        return []
    with desk.store() as store:
        return [length(outlook(store, baseline, session.arms[0].source, baseline.session.effect))]


def _show_outlook(request: Request, effect: float, desk: Desk, out: Out) -> None:
    from dgxlab.cli._plan import describe_outlook
    from dgxlab.lab import outlook

    if not desk.database.exists():
        mend = outlook.command("noise", request.experiment)
        raise SpecError(f"there is no {desk.database} yet, so no noise floor is known", next=mend)
    source = _planned(request, desk, out).arms[0].source
    with desk.store() as store:
        expected = outlook.outlook(store, request.experiment, source, effect)
    out.result(expected, lambda: describe_outlook(expected, request.experiment))
