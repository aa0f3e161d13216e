"""dgxlab run, gate, ab, noise, plan: measure or compare experiments, or show the commands for it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from dgxlab.cli import _complete
from dgxlab.cli._app import FailOnOption, TrustSourceOption, WideOption, Workspace, connect, experiment, experiments
from dgxlab.cli._out import Out, plural, show_error
from dgxlab.errors import AGAIN, CheckFailed, ConditionsError, DgxlabError, SpecError, UsageError, command
from dgxlab.units import share

if TYPE_CHECKING:
    from dgxlab.lab.outlook import Outlook
    from dgxlab.lab.request import Request
    from dgxlab.model import Experiment, HostEntry, Plan
    from dgxlab.report import SessionReport

_STOCK = "stock"  # the experiment that two checkouts are measured with, unless another is named
# differences between the arms that --allow can permit
Same = StrEnum("Same", ["matrix", "models", "engines", "session", "host"])

SpecArgument = Annotated[
    str, Argument(help="The experiment's YAML file, or its name in experiments/.", autocompletion=_complete.experiments)
]
_AllowOption = Annotated[
    list[Same] | None, Option("--allow", help="Compare arms that differ in this too; may be given again.")
]
_TREE = "Build this llama.cpp checkout, dirty or not, instead of the spec's series"
_TreeOption = Annotated[Path | None, Option("--tree", help=f"{_TREE}.")]
_MaxMinutesOption = Annotated[
    float | None,
    Option(
        "--max-minutes",
        metavar="MINUTES",
        help="Longest time of the chains, without builds and gates: fewer cycles, which detect larger effects.",
    ),
]


@dataclass(frozen=True)
class _SpecOptions:
    """Options of every command that reads specs."""

    host: Annotated[
        str | None, Option("--host", help="Run on this host instead of the spec's.", autocompletion=_complete.hosts)
    ] = None
    set_: Annotated[
        list[str] | None,
        Option("--set", metavar="KEY=VALUE", help="Override one value of the spec; may be given again."),
    ] = None
    trust_source: TrustSourceOption = False

    def requests(self, kind: str, spec: str, baseline: str = "", **options: Any) -> list[Request]:
        """Read the specs, by path or name, and return the request for each experiment of the first one.

        `options` are further fields of a request. A baseline of the same name is the experiment itself.
        """
        from dgxlab.lab.request import Request

        first = experiment(baseline, self.set_, self.host) if baseline not in ("", spec) else None
        every = experiments(spec, self.set_, self.host)
        return [Request(kind, each, each if baseline == spec else first, **options) for each in every]

    def request(self, kind: str, spec: str, baseline: str = "", **options: Any) -> Request:
        """Return the only request of a spec that is no sweep, as `requests`."""
        experiment(spec, self.set_)  # raises SpecError for a sweep
        (only,) = self.requests(kind, spec, baseline, **options)
        return only

    def at(self, workspace: Workspace, spec: Experiment) -> Workspace:
        """Return the workspace of the project that a spec belongs to."""
        return replace(workspace, project=Path(spec.root), trust_source=self.trust_source)


@dataclass(frozen=True)
class JobOptions(_SpecOptions):
    """Options of every command that measures."""

    wait: Annotated[
        int,
        Option("--wait", metavar="MINUTES", min=0, help="Wait so long for a device that others use; 0: not at all."),
    ] = 60


@dataclass(frozen=True)
class _FleetOptions(JobOptions):
    """Options of commands that measure on several hosts at once."""

    host: Annotated[
        str | None,
        Option(
            "--host",
            help="Run on this host instead of the spec's; on several at once, separated by commas.",
            autocompletion=_complete.hosts,
        ),
    ] = None
    nodes: Annotated[
        int | None, Option("--nodes", min=1, help="Run on so many nodes of the cluster at once, on each by itself.")
    ] = None

    def requests(self, kind: str, spec: str, baseline: str = "", **options: Any) -> list[Request]:
        """Read the specs for the first of the hosts."""
        first = JobOptions(self.host and self.host.partition(",")[0], self.set_)
        return first.requests(kind, spec, baseline, **options)

    def hosts(self, own: str) -> list[str]:
        """Return the hosts, or nodes, that the options name, all of them known; `own` is that of the spec."""
        names = list(dict.fromkeys((self.host or own).split(",")))
        first, *others = map(connect, names)  # raises before anything is measured if one is not known or not trusted
        if not self.nodes:
            return names
        nodes = first.probe().nodes
        if len(nodes) < self.nodes or others:
            message = f"{self.nodes} nodes of host {names[0]} were asked for, and it has {len(nodes)} that take jobs"
            raise UsageError(message, next=command("dgxlab", "doctor", names[0]))
        known = sorted(nodes, key=lambda node: node.facts is None)  # what was measured there may be up to date
        return [f"{names[0]}/{node.name}" for node in known[: self.nodes]]


def run(
    spec: SpecArgument,
    again: bool = Option(False, "--again", help="Measure everything, up to date or not."),
    tree: _TreeOption = None,
    wide: WideOption = False,
    *,
    options: _FleetOptions,
    workspace: Workspace,
    out: Out,
) -> None:
    """Build, gate and measure what is not up to date, and report.

    Example: dgxlab run experiments/cpu/quickstart.yaml
    """
    _measure(options.requests("run", spec, again=again, tree=tree), options, workspace, out, wide=wide)


def gate(
    spec: SpecArgument, tree: _TreeOption = None, *, options: _FleetOptions, workspace: Workspace, out: Out
) -> None:
    """Build and run the gates alone.

    Example: dgxlab gate experiments/cpu/quickstart.yaml
    """
    _measure(options.requests("gate", spec, again=True, tree=tree), options, workspace, out)


def ab(  # noqa: PLR0913 - each is an option
    baseline: str | None = Argument(
        None,
        help="What to compare with: a YAML file, or its name in experiments/; stock with two checkouts.",
        autocompletion=_complete.experiments,
    ),
    candidate: str | None = Argument(
        None,
        help="The experiment to judge, a file or a name; the baseline's spec if left out with --tree.",
        autocompletion=_complete.experiments,
    ),
    tree: list[Path] | None = Option(
        None, "--tree", help=f"{_TREE}, as the candidate; given twice, the baseline's and the candidate's."
    ),
    allow: _AllowOption = None,
    screen: bool = Option(
        False, "--screen", help="One bracket, A B A, instead of a chain: it can reject, never promote."
    ),
    fail_on: FailOnOption = None,
    max_minutes: _MaxMinutesOption = None,
    wide: WideOption = False,
    *,
    options: _FleetOptions,
    workspace: Workspace,
    out: Out,
) -> None:
    """Measure a candidate against its baseline, and judge it.

    Both are built and gated on one host, then run alternately, A B A ... B A, each run a fresh process. No
    measured value is shown before the end. --set and --host apply to both.

    With --tree, a working tree of llama.cpp is judged as it is on the disk, against the spec's own build or against
    another working tree. Its results have a name of their own and never count for the experiment.

    Example: dgxlab ab stock --tree ../llama.cpp
    """
    kind = "screen" if screen else "ab"
    arms = _arms(baseline, candidate, tree or [])
    requests = options.requests(kind, **arms, allow=allow or (), max_s=seconds(max_minutes))
    _measure(requests, options, workspace, out, fail_on or (), wide=wide)


def noise(
    spec: SpecArgument,
    fail_on: FailOnOption = None,
    wide: WideOption = False,
    *,
    options: _FleetOptions,
    workspace: Workspace,
    out: Out,
) -> None:
    """Measure an experiment against itself: its noise.

    Screens and tries use the noise of each cell, `plan --effect` the noise floor, which is its upper 95 % bound.

    Example: dgxlab noise experiments/h200/h200.yaml
    """
    _measure(options.requests("noise", spec, spec), options, workspace, out, fail_on or (), wide=wide)


def plan(
    spec: SpecArgument,
    candidate: str | None = Argument(
        None, help="What would be compared with it, as a file or a name.", autocompletion=_complete.experiments
    ),
    tree: _TreeOption = None,
    allow: _AllowOption = None,
    effect: str | None = Option(
        None, metavar="SHARE", help="Show instead which effects an A/B session for this one can detect; 2% or 0.02."
    ),
    max_minutes: _MaxMinutesOption = None,
    *,
    options: _SpecOptions,
    workspace: Workspace,
    out: Out,
) -> None:
    """Show every command that a full run would execute.

    Earlier results are ignored, and no host is contacted. Operations and types that the pin does not have are refused.
    Beside each step is how long it took the last time, a build the longest, a run by the median of the last ones; with
    --host the last line says what is recorded there.

    With a candidate: the commands of an A/B session. With --effect: the effects that such a session can detect, given
    the noise floors in the record, and its duration.

    Example: dgxlab plan experiments/h200/h200.yaml
    """
    from dgxlab.cli._plan import entry_of

    if candidate and (tree or effect):
        given = ("--effect", effect) if effect else ("--tree", tree)
        raise UsageError(f"{given[0]} is about one experiment, not two", next=command("dgxlab", "plan", spec, *given))
    if candidate:
        requests = options.requests("ab", candidate, spec, allow=allow or (), max_s=seconds(max_minutes))
    else:
        requests = options.requests("run", spec, tree=tree)
    first = requests[0].experiments[0]
    host = entry_of([each for request in requests for each in request.experiments], out)
    workspace, beside = options.at(workspace, first), bool(options.host and not candidate)
    shown = [_planned(request, host, effect, workspace, out, beside=beside) for request in requests]
    values = [value for value, _ in shown]
    out.result(values if len(values) > 1 else values[0], "\n\n".join(text for _, text in shown))


def raise_for_verdicts(session: SessionReport, error: DgxlabError | None, fail_on: Collection[str] = ()) -> None:
    """Raise the error that a session ends the command with, if any.

    Raises:
        CheckFailed: if a verdict is one of `fail_on`; the job's own error is then only printed.
        DgxlabError: `error`, the job's own.
        ConditionsError: if a verdict is invalid.
    """
    count, what = sum(session.counts.values()), f"{'screen ' * (session.kind == 'screen')}verdict"

    def counted(number: int) -> str:
        return f"{plural(number, what)} of {count} {'is' if number == 1 else 'are'}"

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


def _arms(baseline: str | None, candidate: str | None, trees: Sequence[Path]) -> dict[str, Any]:
    """Return the arms of an A/B session as arguments of `_SpecOptions.requests`."""
    if len(trees) > 2:
        raise UsageError("a session compares two checkouts", next="dgxlab ab --help")
    if len(trees) == 2:
        baseline = baseline or _STOCK
    if not baseline or not (candidate or trees):
        raise UsageError("an A/B session needs two experiments, or one and a --tree", next="dgxlab ab --help")
    before, after = [None, None, *trees][-2:]
    return {"spec": candidate or baseline, "baseline": baseline, "baseline_tree": before, "tree": after}


def seconds(max_minutes: float | None) -> float:
    """Return a limit in seconds, 0 for none."""
    if max_minutes is not None and not 0 < max_minutes < math.inf:
        raise UsageError(f"{max_minutes:g} minutes are no time to measure in", next=f"{AGAIN} without --max-minutes")
    return 60 * (max_minutes or 0.0)


def _measure(
    requests: Sequence[Request],
    options: _FleetOptions,
    workspace: Workspace,
    out: Out,
    fail_on: Collection[str] = (),
    *,
    wide: bool = False,
) -> None:
    """Run the request, print the report in any case, then raise the error of the job or of its verdicts."""
    from dgxlab.cli._display import display
    from dgxlab.cli._on_end import on_end
    from dgxlab.lab import session

    request = requests[0]
    workspace, tell = options.at(workspace, request.experiments[0]), on_end(out)
    out.note(workspace.where)
    hosts = options.hosts(request.experiment.host)
    requests = [replace(each, wait_s=60.0 * options.wait) for each in requests]
    if len(requests) > 1 or len(hosts) > 1:
        from dgxlab.cli._fleet import Several

        several = Several(workspace, out, tell, fail_on, wide)
        if len(requests) > 1:
            several.sweep(requests, hosts)
        else:
            several.fleet(requests[0], hosts)
        return
    request = requests[0].at(hosts[0])
    with workspace.lab(create=True) as lab:
        with display(out) as watch:
            outcome = session.run(lab, request, watch)
        from dgxlab import report  # imported late: earlier it would delay the measuring

        page: Any
        if request.baseline:
            page = report.collect_session(lab.store, outcome.job_id)
            counted = page.summary
        elif request.kind == "gate":
            page = report.collect_job(lab.store, outcome.job_id)
            ended = [f"{number} {how}" for how, number in Counter(outcome.gates).items()]
            counted = ", ".join([plural(len(outcome.gates), "gate"), *ended])
        else:
            page = report.collect_experiment(lab.store, outcome.experiment, outcome.source, outcome.device)
            missing = outcome.planned - outcome.measured - outcome.reused
            counted = f"{plural(outcome.planned, 'cell')}, {outcome.measured} measured now, {outcome.reused} up to date"
            counted += f", {missing} not measured" if missing else ""
            if (older := outcome.disturbed - page.disturbed.count(outcome.job_id)) > 0:
                counted += f", {older} disturbed now: the report has numbers of earlier sessions instead"
                counted += f" (dgxlab report {outcome.job_id} has these; --again measures all again)"
            if hard := page.disturbed:
                counted += f", {len(hard)} with a hard event (dgxlab report {max(hard)}; --again measures all again)"
        out.report(page, lambda: report.render(page, wide=wide))
        if outcome.job_id:
            tell(lab.store.job(outcome.job_id), counted)
    out.note(f"{counted}; recorded in {workspace.database}")
    if request.baseline:
        raise_for_verdicts(page, outcome.error, fail_on)
    elif outcome.error:
        raise outcome.error


def _planned(
    request: Request, host: HostEntry, effect: str | None, workspace: Workspace, out: Out, *, beside: bool
) -> tuple[Plan | Outlook, str]:
    """Return a plan, or an outlook, and its text; `beside` says to add what the record already has of it."""
    from dgxlab.cli._display import display
    from dgxlab.cli._plan import describe, describe_outlook, describe_recorded, length
    from dgxlab.lab import missing, outlook, session
    from dgxlab.source import PinCache

    first, recorded = request.experiments[0], workspace.database.exists()
    wanted = first.session.effect
    if effect:
        try:
            wanted = share(effect)
        except ValueError:
            message = f"an effect is a share as in 2% or 0.02, not {effect!r}"
            raise UsageError(message, next="dgxlab plan --help") from None
        if not recorded:
            mend = outlook.noise_command(first)
            raise SpecError(f"there is no {workspace.database} yet, so no noise floor is known", next=mend)
    with display(out) as watch:
        planned = session.full_plan(PinCache(trusted=workspace.trust_source), request, watch)
    expected, took, ends = None, dict[str, float | None](), list[str]()
    if recorded:
        with workspace.store() as store:
            device = outlook.device_on(store, host, planned)
            planned = outlook.shared(store, planned, device)
            took = outlook.expected(store, planned, device, anew=True)
            if beside and (known := missing.recorded(store, PinCache(), host, request, lambda event: None)):
                ends.append(describe_recorded(known, first.host))
            if effect or request.baseline:
                expected = outlook.outlook(store, host, first, planned.arms[0].source, wanted)
    if effect and expected:
        return expected, describe_outlook(expected, first)
    return planned, "\n".join([describe(planned, took), *ends, *([length(expected)] if expected else [])])
