"""Find which change made a difference: bisection over steps, and ablation, a session without each patch of a series.

A step is an experiment whose build differs from the step before in one patch or one commit. Each is gated and judged as
in any A/B session, against the first one; the sessions are in the record.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from dgxlab import compare, judgement, model
from dgxlab.chains import comparisons, comparisons_of
from dgxlab.errors import (
    AGAIN,
    BuildFailed,
    ConditionsError,
    DgxlabError,
    GateFailed,
    PatchError,
    RemoteError,
    SpecError,
    UsageError,
    command,
)
from dgxlab.judgement import names
from dgxlab.lab import Lab, Side, Watch, missing, noted, session
from dgxlab.lab.request import Request, UnknownName, sourced
from dgxlab.model import Experiment, ParityGate, RunStep
from dgxlab.source.git import Git
from dgxlab.stats import Bisection, Verdict, estimate, past_half
from dgxlab.tools import Launch

FAULTS = (PatchError, UnknownName, BuildFailed, GateFailed, RemoteError)
"""Errors that lie in what is built: other steps may be well."""

_TRIES = 2  # sessions of a step that other programs disturb before it counts as untestable


@dataclass(frozen=True)
class Step:
    """A build to test: its name, a patch or a commit, and the experiment that builds and measures it."""

    name: str
    experiment: Experiment


@dataclass(frozen=True)
class Subject:
    """What a verdict is on."""

    name: str  # among those of its session, as in tables
    cell: str  # Cell.label
    metric: str
    model: str


@dataclass(frozen=True)
class Search:
    """How steps are measured."""

    cells: Collection[str] = ()  # labels of the cells to compare, () for all
    kind: str = "ab"  # or "screen"
    wait_s: float = model.WAIT_S
    name: str = ""  # of the only subject to return, "" for all

    def compare(
        self, lab: Lab, baseline: Experiment, candidate: Experiment, watch: Watch, used: Collection[str] | None = None
    ) -> Compared:
        """Compare two builds, in a session of an earlier search if there is one.

        The sessions `used` must not answer again, as a search counts each once; None to measure in any case. Raises
        DgxlabError if the session does not begin, or ends in an error that is neither one of FAULTS nor about its
        conditions; a patch that does not apply is one of FAULTS.
        """
        request = Request(self.kind, candidate, baseline, wait_s=self.wait_s, cells=self.cells)
        try:
            job_id, error = self._session(lab, request, watch, used)
        except FAULTS as fault:
            return Compared(fault=fault)
        if error and not isinstance(error, (*FAULTS, ConditionsError)):
            raise error
        if isinstance(error, FAULTS):
            return Compared(job_id, fault=error)
        chains = list(lab.store.job(job_id).plan.chains)
        keys = [(chain.id, comparison) for chain in chains for comparison in comparisons(chain)]
        subjects = dict(zip(keys, _subjects((chain.baseline, chain.candidate) for chain in chains), strict=True))
        judged = judgement.recorded(lab.store, job_id)
        verdicts = [(subjects[each.chain, each.comparison], each.verdict) for each in judged]
        chosen = tuple(pair for pair in verdicts if self.name in ("", pair[0].name))
        valid = any(verdict.effect is not None for _, verdict in chosen)  # of some cells, where others were disturbed
        # where none is, an error says why in better words than they do
        return Compared(job_id, () if error and not valid else chosen, error)

    def _session(
        self, lab: Lab, request: Request, watch: Watch, used: Collection[str] | None
    ) -> tuple[str, DgxlabError | None]:
        sides: Sequence[Side] = ()
        if used is not None:
            request, sides = sourced(lab.cache, request, watch)
            if earlier := missing.answered(lab, request, sides, used):
                noted(watch)(f"session {earlier} has compared the same: its result is used; reject it to measure again")
                return earlier, None
        outcome = session.run(lab, request, watch, sides)
        return outcome.job_id, outcome.error

    def of_one(self, baseline: Experiment, candidate: Experiment) -> Search:
        """Return the search for the only subject that its cells, labels or names, fit; UsageError if several do."""
        every = _subjects(compare.pairs(baseline, candidate))
        fits = [each for each in every if {each.name, each.cell} & {*self.cells}]
        if len(fits) > 1:
            message = f"{', '.join(self.cells)} is {len(fits)} comparisons: {', '.join(each.name for each in fits)}"
            raise UsageError(message, next=f"{AGAIN} with {command('--cell', fits[0].name)}")
        return replace(self, cells=(fits[0].cell,), name=fits[0].name) if fits else self


@dataclass(frozen=True)
class Compared:
    """How a session of two builds ended."""

    session: str = ""  # "" if none began
    verdicts: tuple[tuple[Subject, Verdict], ...] = ()
    fault: DgxlabError | None = None

    @property
    def broken(self) -> bool:
        """Whether a build or its gates are at fault, and not the conditions."""
        return isinstance(self.fault, FAULTS)

    @property
    def verdict(self) -> Verdict | None:
        """The verdict on its first comparison; None without one, or if it is invalid."""
        return next((verdict for _, verdict in self.verdicts if verdict.effect is not None), None)

    @property
    def reason(self) -> str:
        """Why there is no verdict, in a sentence; "" if there is one."""
        if self.fault:
            return cause(self.fault)
        return "" if self.verdict else "; ".join(reason for _, verdict in self.verdicts for reason in verdict.reasons)


def _subjects(pairs: Iterable[tuple[Launch | RunStep, Launch | RunStep]]) -> list[Subject]:
    every = [(left, each) for left, right in pairs for each in comparisons_of(left, right)]
    labels = {cell.key: cell.label for left, _ in every for cell in left.cells}
    return [
        Subject(name, labels[each.baseline], each.metric, left.model)
        for name, (left, each) in zip(names.of_comparisons(every), every, strict=True)
    ]


def cause(fault: DgxlabError) -> str:
    """Return why something cannot be built or measured, of a build that failed the compiler's first error."""
    return fault.details.splitlines()[0] if isinstance(fault, BuildFailed) and fault.details else fault.message


@dataclass(frozen=True)
class Answer:
    """One test of a step: the session, and the probability that the difference is there, None if untestable."""

    step: int
    compared: Compared
    probability: float | None


@dataclass(frozen=True)
class Bisected:
    """The result of a bisection: `suspects` is a range of steps, empty where the ends do not differ."""

    ends: Compared  # the last step against the first
    answers: tuple[Answer, ...] = ()
    suspects: range = range(0)
    probability: float = 0.0


def bisect(
    lab: Lab,
    steps: Sequence[Step],
    search: Search,
    watch: Watch,
    *,
    confidence: float = 0.95,
    on_answer: Callable[[Answer], None] = lambda answer: None,
) -> Bisected:
    """Find the step that made the difference between the first and the last one.

    Args:
        search: Its cells must fit one comparison, by the cell's label or the subject's name.
        confidence: The search ends when so probable a step is found, or after four times as many tests as exact ones
            would take.

    Raises:
        UsageError: if several comparisons fit.
        DgxlabError: if the ends cannot be compared, or a session ends in an error that is not one of FAULTS.
    """
    first = steps[0].experiment
    state = Bisection(len(steps) - 1, confidence)
    search = search.of_one(first, steps[-1].experiment)
    noted(watch)(f"the ends: {steps[-1].name} against {steps[0].name}")
    ends = search.compare(lab, first, steps[-1].experiment, watch, used=())
    if ends.fault:
        raise ends.fault
    if not ends.verdict or ends.verdict.verdict not in ("faster", "slower"):
        return Bisected(ends)
    whole = ends.verdict.effect or 0.0
    # half of the difference is to be told from none and from all of it
    enough = replace(first.session, effect=max(first.session.effect, abs(whole) / 2))
    answers: list[Answer] = []
    while (at := state.next()) is not None and len(answers) < 4 * len(steps).bit_length():
        noted(watch)(f"test {len(answers) + 1}: {steps[at].name} against {steps[0].name}")
        baseline, candidate = (replace(each, session=enough) for each in (first, steps[at].experiment))
        used = [answer.compared.session for answer in answers]
        compared = search.compare(lab, baseline, candidate, watch, used)
        seen = compared.verdict
        measured = estimate(seen) if seen else None
        past = past_half(*measured, seen.valid_cycles - 1, whole) if seen and measured else None
        answers.append(Answer(at, compared, past))
        on_answer(answers[-1])
        if past is not None:
            state.answer(at, past)
        elif compared.broken or sum(answer.step == at for answer in answers) >= _TRIES:
            state.untestable.add(at)
    suspects, probability = state.suspects
    return Bisected(ends, tuple(answers), suspects, probability)


def ablate(
    lab: Lab, experiment: Experiment, name: str, patches: Sequence[str], search: Search, watch: Watch
) -> Iterator[tuple[str, Compared]]:
    """Yield each patch of the series `name`, and how the experiment without it compares with the whole one."""
    whole = gated(experiment)
    for number, patch in enumerate(patches, 1):
        noted(watch)(f"{number} of {len(patches)}: without {patch}")
        others = [str(other) for other in range(1, len(patches) + 1) if other != number]
        without = _with(whole, name, f"{name}:{','.join(others)}" if others else "", f"without-{number}")
        yield patch, search.compare(lab, whole, without, watch, used=())


def series_steps(experiment: Experiment, name: str, patches: Sequence[str]) -> list[Step]:
    """Return an experiment with no patch of the series `name`, then with one more at each step."""
    steps = [Step("none", _with(gated(experiment), name, "", "0"))]
    for number, patch in enumerate(patches, 1):
        first = "1" if number == 1 else f"1-{number}"
        chosen = name if number == len(patches) else f"{name}:{first}"
        steps.append(Step(patch, _with(gated(experiment), name, chosen, str(number))))
    return steps


def commit_steps(experiment: Experiment, clone: Path, good: str, bad: str) -> list[Step]:
    """Return an experiment on each commit of a clone from `good` to `bad`, of merges the first parent alone.

    Raises SpecError if `good` is no ancestor of `bad` there.
    """
    own = Git.checkout(clone)
    ids = [own.attempt("rev-parse", "--verify", "--quiet", f"{name}^{{commit}}").text for name in (good, bad)]
    listed = own.attempt("rev-list", "--first-parent", "--reverse", f"{ids[0]}..{ids[1]}") if all(ids) else None
    commits = listed.text.split() if listed and listed.rc == 0 else []
    if not commits or own.attempt("merge-base", "--is-ancestor", *ids).rc != 0:
        message = f"{clone} has no commits from {good} to {bad}"
        raise SpecError(message, next=command("git", "-C", clone, "log", "--oneline", f"{good}..{bad}"))
    steps = []
    for number, commit in enumerate([ids[0], *commits]):
        subject = own.run("show", "--no-patch", "--format=%s", commit)
        sources = (str(clone.resolve()), *experiment.sources)
        at = replace(gated(experiment), pin=commit, sources=sources, name=_name(experiment, str(number)))
        steps.append(Step(f"{commit[:12]} {subject}", at))
    return steps


def gated(experiment: Experiment) -> Experiment:
    """Return an experiment with parity gates alone, of any count and any path: the step that adds a path lacks it."""
    gates = [gate for gate in experiment.gates if isinstance(gate, ParityGate)]
    loose = (replace(gate, expect=None, unsupported=None, cases="", engaged="") for gate in gates)
    return replace(experiment, gates=tuple(loose))


def _with(experiment: Experiment, name: str, chosen: str, suffix: str) -> Experiment:
    """Return an experiment with `chosen` in the place of the series `name`, "" for nothing."""
    series = tuple(chosen if each.partition(":")[0] == name else each for each in experiment.series)
    return replace(experiment, series=tuple(filter(None, series)), name=_name(experiment, suffix))


def _name(experiment: Experiment, suffix: str) -> str:
    return f"{experiment.name[: 60 - len(suffix)]}-{suffix}"
