"""dgxlab bisect, ablate: which patch or commit made a difference."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from dgxlab.cli import _complete
from dgxlab.cli._app import Workspace, experiment, readable_experiments
from dgxlab.cli._out import Out, plural, table
from dgxlab.cli.patch import known_series
from dgxlab.cli.run import JobOptions
from dgxlab.errors import ConditionsError, UsageError, edit
from dgxlab.project import or_init, root

if TYPE_CHECKING:
    from dgxlab.lab.search import Bisected, Compared, Step, Subject
    from dgxlab.model import Experiment
    from dgxlab.stats import Verdict

_LikeOption = Annotated[
    str | None,
    Option(
        "--like",
        metavar="EXPERIMENT",
        help="What to build and measure; by default the only spec that fits.",
        autocompletion=_complete.experiments,
    ),
]


def bisect(  # noqa: PLR0913 - each is an option
    good: str = Argument(help="The last step known without the difference: a commit, or a patch's number; 0 for none."),
    bad: str = Argument(help="A step with the difference: a later commit, or a patch's number."),
    cell: str = Option(..., help="The cell to judge by, as tables call it: pp512, pp128 tg64 B8 S_TG."),
    series: str | None = Option(None, help="Search the patches of this series.", autocompletion=_complete.series),
    tree: Path | None = Option(None, help="Search the commits of this llama.cpp clone."),
    confidence: float = Option(0.95, min=0.51, max=0.999, help="How probable the answer must be."),
    like: _LikeOption = None,
    *,
    options: JobOptions,
    workspace: Workspace,
    out: Out,
) -> None:
    """Find the patch or the commit that changed a cell's speed.

    The ends are compared first. Then a step at a time is built, gated and compared with GOOD in an A/B session, until
    one step is as probable as --confidence; a step that cannot be built or fails its gates is left out.

    Example: dgxlab bisect 0 3 --series w4a16 --cell pp512
    """
    from dgxlab.cli._display import display
    from dgxlab.lab import search

    if bool(series) == bool(tree):
        raise UsageError("name one of --series and --tree, to search in", next="dgxlab bisect --help")
    spec = _template(series, like, options, out)
    if series:
        steps = _between(search.series_steps(spec, series, _patches(spec, series)), good, bad)
    else:
        assert tree
        steps = search.commit_steps(spec, tree, good, bad)
    by = search.Search((cell,), wait_s=60 * options.wait)

    def tell(answer: search.Answer) -> None:
        what = "cannot be tested" if answer.probability is None else f"there with {100 * answer.probability:.1f} %"
        out.note(f"{steps[answer.step].name}: {answer.compared.reason or what}")

    with options.at(workspace, spec).lab(create=True) as lab, display(out) as watch:
        result = search.bisect(lab, steps, by, watch, confidence=confidence, on_answer=tell)
    _show_found(result, steps, cell, confidence, out)


def ablate(
    series: str = Argument(help="The series: a folder under patches/.", autocompletion=_complete.series),
    cell: list[str] | None = Option(None, help="Compare this cell alone, as tables call it; may be given again."),
    screen: bool = Option(False, "--screen", help="One bracket a patch instead of a chain: drops, and keeps nothing."),
    like: _LikeOption = None,
    *,
    options: JobOptions,
    workspace: Workspace,
    out: Out,
) -> None:
    """Measure a series without each of its patches in turn.

    Each time it is compared with all of it: `slower` says that the patch makes the cell faster. A patch that others
    need is listed with the reason: a later patch does not apply, or the build or a gate fails.

    Example: dgxlab ablate gdn-state --like h200-gdn-on
    """
    from dgxlab.cli._display import display
    from dgxlab.lab import search
    from dgxlab.store import alias

    spec = _template(series, like, options, out)
    by = search.Search(tuple(cell or ()), "screen" if screen else "ab", 60 * options.wait)
    rows: list[dict[str, Any]] = []
    shown: list[dict[str, str]] = []
    with options.at(workspace, spec).lab(create=True) as lab, display(out) as watch:
        for patch, compared in search.ablate(lab, spec, series, _patches(spec, series), by, watch):
            rows.append(_value(compared) | {"without": patch})
            words = shown_verdicts(compared.verdicts) or [
                f"{'cannot be left out' if compared.broken else 'no verdict'}: {compared.reason}"
            ]
            out.note(f"without {patch}: {'; '.join(words)}")
            shown += [
                {"without": patch if not number else "", "verdict": text, "session": alias(compared.session)}
                for number, text in enumerate(words)
            ]
    out.result(rows, lambda: table(shown), outcomes=True)


def _show_found(result: Bisected, steps: Sequence[Step], cell: str, confidence: float, out: Out) -> None:
    """Print a bisection's result; ConditionsError if its ends do not differ, or it is less sure than `confidence`."""
    from dgxlab.store import alias

    ends = "; ".join(shown_verdicts(result.ends.verdicts)) or result.ends.reason
    if not result.suspects:
        message = f"{cell} does not differ between {steps[0].name} and {steps[-1].name}: {ends}"
        raise ConditionsError(message, next=f"dgxlab report {result.ends.session}")
    names = [steps[at].name for at in result.suspects]
    tests: list[tuple[str, Compared, float | None]] = [("all of it", result.ends, 1.0)]
    tests += [(steps[answer.step].name, answer.compared, answer.probability) for answer in result.answers]
    sure = f"{100 * result.probability:.1f} % sure"
    value = {
        "suspects": names,
        "probability": result.probability,
        "tests": [_value(compared) | {"step": step, "there": there} for step, compared, there in tests],
    }
    rows = [
        {
            "step": step,
            "there": "-" if there is None else f"{100 * there:.1f} %",
            "verdict": "; ".join(shown_verdicts(compared.verdicts)) or compared.reason,
            "session": alias(compared.session) or "-",
        }
        for step, compared, there in tests
    ]
    out.result(value, "\n".join([f"{sure}: {' or '.join(names)} ({ends})", "", table(rows)]), outcomes=True)
    if result.probability < confidence:
        message = f"only {sure} after {plural(len(result.answers), 'test')}"
        raise ConditionsError(message, next="repeat it with fewer steps, or with a larger session.cycles")


def _template(series: str | None, like: str | None, options: JobOptions, out: Out) -> Experiment:
    """Return the experiment that a search measures: --like, else the only one that fits."""
    if like is None:
        every = [each for each in readable_experiments(out.note) if each.bench]
        fits = [each for each in every if (series in each.series if series else not each.series)]
        if series and not fits:
            known_series(root(), [series])
            raise UsageError(f"no experiment applies {series}", next=f"write `series: [{series}]` into one")
        if len(fits) != 1:
            what = f"apply {series}" if series else "apply no series"
            some = fits[0].name if fits else "EXPERIMENT"
            message = f"{len(fits)} experiments {what}: choose one with --like"
            raise UsageError(message, next=or_init(f"add --like {some}"))
        like = fits[0].path
    spec = experiment(like, options.set_, options.host)
    if series and series not in spec.series:
        raise UsageError(f"{spec.name} does not apply {series}", next=edit(spec.path))
    return spec


def _patches(spec: Experiment, name: str) -> list[str]:
    from dgxlab import series

    return [patch.name.removesuffix(".patch") for patch in series.read(Path(spec.root), name, spec.pin).patches]


def _between(steps: list[Step], good: str, bad: str) -> list[Step]:
    numbers = [int(text) if text.isdecimal() else -1 for text in (good, bad)]
    if not 0 <= numbers[0] < numbers[1] < len(steps):
        message = (
            f"GOOD and BAD are {good} and {bad}; they must be two numbers of 0 to {len(steps) - 1}, the smaller first"
        )
        raise UsageError(message, next="dgxlab patch list")
    return steps[numbers[0] : numbers[1] + 1]


def _value(compared: Compared) -> dict[str, Any]:
    cells = [
        {**vars(subject), "verdict": verdict.verdict, "effect": verdict.effect}
        for subject, verdict in compared.verdicts
    ]
    return {"cells": cells, "session": compared.session, "reason": compared.reason}


def shown_verdicts(verdicts: Sequence[tuple[Subject, Verdict]]) -> list[str]:
    """Return a line for each verdict: `pp512 slower -3.10 % (-3.50 to -2.70)`, or why it is invalid."""
    from dgxlab.report.cells import effect_text

    return [f"{subject.name} {verdict.verdict}{effect_text(verdict)}" for subject, verdict in verdicts]
