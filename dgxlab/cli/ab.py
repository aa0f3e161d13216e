"""dgxlab ab, noise: sessions that give verdicts."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dgxlab.cli._lab import database, experiment, lab, where
from dgxlab.cli._options import (
    AllowOption,
    DbOption,
    FailOnOption,
    Format,
    FormatOption,
    HostOption,
    MaxMinutesOption,
    QuietOption,
    SetOption,
    TrustSourceOption,
    WaitOption,
    seconds,
)
from dgxlab.cli._out import Out, plural, show_error
from dgxlab.cli._tables import show
from dgxlab.errors import AGAIN, CheckFailed, ConditionsError, DgxlabError

if TYPE_CHECKING:
    from dgxlab.model import Experiment
    from dgxlab.report import SessionReport


BaselineArgument = Annotated[
    str,
    typer.Argument(help="What to compare with: a YAML file, or its name in experiments/.", show_default=False),
]
CandidateArgument = Annotated[
    str, typer.Argument(help="What is to be judged: a YAML file, or its name in experiments/.", show_default=False)
]
ScreenOption = Annotated[
    bool, typer.Option("--screen", help="One bracket instead of a chain: drops a bad idea early, keeps no good one.")
]


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
    db: DbOption = None,
    format: FormatOption = Format.human,
    quiet: QuietOption = False,
) -> None:
    """Measure a candidate against its baseline, and judge it.

    Both are built and gated on one host and then run by turns, A B A ... B A, each run a fresh process. Nothing that
    was measured is shown before the end. --set and --host are for both.

    Example: dgxlab ab threads-2 threads-1
    """
    one, two = (experiment(name, set_ or [], host) for name in (baseline, candidate))
    _carry_out(
        one,
        two,
        Out(format, quiet),
        db,
        fail_on or (),
        trust_source,
        kind="screen" if screen else "ab",
        allow=allow or (),
        wait_s=60 * wait,
        max_s=seconds(max_minutes),
    )


def noise(
    spec: Annotated[str, typer.Argument(help="A YAML file, or its name in experiments/.", show_default=False)],
    host: HostOption = None,
    set_: SetOption = None,
    fail_on: FailOnOption = None,
    wait: WaitOption = 60,
    trust_source: TrustSourceOption = False,
    db: DbOption = None,
    format: FormatOption = Format.human,
    quiet: QuietOption = False,
) -> None:
    """Measure an experiment against itself: the host's noise floor.

    The floor of each cell is what screens, promotion and `plan --effect` go by.

    Example: dgxlab noise experiments/h200/h200.yaml
    """
    one = experiment(spec, set_ or [], host)
    _carry_out(one, one, Out(format, quiet), db, fail_on or (), trust_source, kind="noise", wait_s=60 * wait)


def _carry_out(
    baseline: Experiment,
    candidate: Experiment,
    out: Out,
    db: Path | None,
    fail_on: Collection[str],
    trust_source: bool,
    **options: Any,
) -> None:
    """Hold the session, print the report whatever came of it, and leave with its error or its verdict's code."""
    from dgxlab import lab as use_cases
    from dgxlab.cli._display import display

    project = Path(baseline.root)
    out.note(where(db, project))
    with lab(db, create=True, project=project, trust_source=trust_source) as opened:
        with display(out) as watch:
            session = use_cases.ab(opened, baseline, candidate, watch=watch, **options)
        from dgxlab import report  # only now: until here it would delay the measuring

        made = report.collect_session(opened.store, session.job_id)
        show(out, made, lambda: report.render(made))
    out.note(f"{made.summary}; recorded in {database(db, project)}")
    leave(made, session.error, fail_on)


def leave(made: SessionReport, error: DgxlabError | None, fail_on: Collection[str] = ()) -> None:
    """Leave with the code that a session's verdicts ask for; the user's question comes before the job's own error.

    Raises:
        CheckFailed: if a verdict is what the user fails on; the job's error is then shown only.
        DgxlabError: the job's own error.
        ConditionsError: if a verdict is invalid.
    """
    count, of = sum(made.counts.values()), "screen: " if made.kind == "screen" else ""
    if failed := [word for word in fail_on if word in made.counts or word == made.verdict]:
        number = sum(made.counts.get(word, 0) for word in set(failed)) or count
        words = " or ".join(dict.fromkeys(failed))
        if error:
            show_error(error)
        raise CheckFailed(
            f"{of}{plural(number, 'verdict')} of {count} {_is(number)} {words}, on which to fail",
            next=f"dgxlab report {made.session}",
        )
    if error:
        raise error
    if invalid := made.counts.get("invalid", 0):
        raise ConditionsError(f"{of}{plural(invalid, 'verdict')} of {count} {_is(invalid)} invalid", next=AGAIN)


def _is(number: int) -> str:
    return "is" if number == 1 else "are"
