"""dgxlab ab, noise: sessions that give verdicts."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dgxlab.cli._lab import database, lab, project
from dgxlab.cli._lab import experiment as read_spec
from dgxlab.cli._options import (
    AllowOption,
    DbOption,
    FailOnOption,
    Format,
    FormatOption,
    HostOption,
    QuietOption,
    SetOption,
    WaitOption,
)
from dgxlab.cli._out import Out, plural
from dgxlab.errors import AGAIN, CheckFailed, ConditionsError, SpecError

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
    wait: WaitOption = 60,
    db: DbOption = None,
    format: FormatOption = Format.human,
    quiet: QuietOption = False,
) -> None:
    """Measure a candidate against its baseline, and judge it.

    Both are built and gated on one host and then run by turns, A B A ... B A, each run a fresh process. Nothing that
    was measured is shown before the end. --set and --host are for both.

    Example: dgxlab ab stock w4a16
    """
    one, two = (_experiment(name, set_ or [], host) for name in (baseline, candidate))
    _carry_out(one, two, Out(format, quiet), db, "screen" if screen else "ab", allow or (), fail_on or (), 60 * wait)


def noise(
    spec: Annotated[str, typer.Argument(help="A YAML file, or its name in experiments/.", show_default=False)],
    host: HostOption = None,
    set_: SetOption = None,
    fail_on: FailOnOption = None,
    wait: WaitOption = 60,
    db: DbOption = None,
    format: FormatOption = Format.human,
    quiet: QuietOption = False,
) -> None:
    """Measure an experiment against itself: the host's noise floor.

    The floor of each cell is what screens, promotion and `plan --effect` go by.

    Example: dgxlab noise experiments/h200.yaml
    """
    one = _experiment(spec, set_ or [], host)
    _carry_out(one, one, Out(format, quiet), db, "noise", (), fail_on or (), 60 * wait)


def _experiment(name: str, overrides: Sequence[str], host: str | None) -> Experiment:
    """Read the spec of that path, or of that name in the project.

    Raises:
        SpecError: if there is none, or anything is wrong with it.
    """
    path = Path(name)
    if path.suffix in (".yaml", ".yml") or len(path.parts) > 1 or path.is_file():
        return read_spec(path, overrides, host)
    from dgxlab.spec.resolve import label

    folder = project() / "experiments"
    known = sorted(spec.stem for spec in folder.glob("*.yaml"))
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1)
        raise SpecError(
            f"{label(folder)} has no experiment {name!r}" + (f"; there is {near[0]!r}" if near else ""),
            next=f"ls {label(folder)}",
        )
    return read_spec(Path(label(folder / f"{name}.yaml")), overrides, host)


def _carry_out(
    baseline: Experiment,
    candidate: Experiment,
    out: Out,
    db: Path | None,
    kind: str,
    allow: Collection[str],
    fail_on: Collection[str],
    wait_s: float,
) -> None:
    """Hold the session, print the report whatever came of it, and leave with its error or its verdict's code."""
    from dgxlab import lab as use_cases
    from dgxlab.cli._display import display

    with lab(db, create=True) as opened:
        with display(out) as watch:
            session = use_cases.ab(opened, baseline, candidate, watch=watch, kind=kind, allow=allow, wait_s=wait_s)
        from dgxlab import report  # only now: until here it would delay the measuring

        made = report.collect_session(opened.store, session.job_id)
        out.result(made, lambda: report.render(made))
    out.note(f"{made.summary}; recorded in {database(db)}")
    if session.error:
        raise session.error
    _judge(made, fail_on)


def _judge(made: SessionReport, fail_on: Collection[str]) -> None:
    """Leave with the code that the verdicts ask for.

    Raises:
        CheckFailed: if one is what the user fails on.
        ConditionsError: if one is invalid.
    """
    count = sum(made.counts.values())
    if failed := [word for word in fail_on if word in made.counts or word == made.verdict]:
        number = sum(made.counts.get(word, 0) for word in set(failed)) or count
        raise CheckFailed(f"{plural(number, 'verdict')} of {count} {_is(number)} {' or '.join(dict.fromkeys(failed))}, "
                          "on which to fail")  # fmt: skip
    if invalid := made.counts.get("invalid", 0):
        raise ConditionsError(f"{plural(invalid, 'verdict')} of {count} {_is(invalid)} invalid", next=AGAIN)


def _is(number: int) -> str:
    return "is" if number == 1 else "are"
