"""A try of a loop: a checkout, measured in stages against the best so far, and recorded in the ledger.

Each stage is an ordinary session, and what follows from it is computed from the record alone (`judgement.tries`). So a
try that was interrupted goes on where it stopped when the same command is run again.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from dgxlab import model, series, stats
from dgxlab.chains import comparisons
from dgxlab.errors import (
    AGAIN,
    BudgetSpent,
    BuildFailed,
    ConditionsError,
    DgxlabError,
    GateFailed,
    HostBusy,
    SpecError,
    UsageError,
    command,
    edit,
    one_line,
)
from dgxlab.judgement import tries
from dgxlab.judgement.tries import HELD_OUT, KINDS, RecordedTry
from dgxlab.lab import Lab, Watch, session
from dgxlab.lab.outlook import noise_command
from dgxlab.lab.request import Request, source_of
from dgxlab.model import Experiment, Plan, Source
from dgxlab.plan import cycles_by_hand, launched_gates
from dgxlab.source.git import Git
from dgxlab.source.programs import locked
from dgxlab.store import alias
from dgxlab.units import duration


@dataclass(frozen=True)
class Try:
    """What a loop asks for: a checkout to be measured against a baseline, with a hypothesis and the loop's limits."""

    baseline: Experiment
    tree: Path
    because: str
    parent: str | None = None  # the promoted try to compare with; "0" for the baseline itself, None for the newest
    wait_s: float = model.WAIT_S
    max_s: float = 0.0  # for the whole ledger, 0 for no limit
    max_tries: int = 0  # of the whole ledger, 0 for no limit

    @property
    def ledger(self) -> tuple[str, str]:
        """The baseline and the host whose tries it is one of."""
        return self.baseline.name, self.baseline.host


def attempt(lab: Lab, asked: Try, watch: Watch) -> tuple[str, bool]:
    """Measure a try, or take it up again, and record how it ends; return its id, and whether it had ended before.

    Raises:
        SpecError: if there is no hypothesis, the checkout is not of the pin or has untracked files, nothing differs, or
            the baseline has changed since the try was begun.
        UsageError: if `parent` is no promoted try of the ledger.
        HostBusy: if another loop uses the host, or others use it longer than `wait_s`.
        BudgetSpent: if the ledger has reached a limit.
        ConditionsError: if the host is too noisy for the wanted effect, or a session gave no verdict.
        DgxlabError: as `session.run`. After any error the same call goes on with the try.
    """
    if not asked.because.strip():
        raise SpecError("a try needs a hypothesis, and --because says nothing", next="dgxlab try --help")
    if not launched_gates(asked.baseline):
        message = f"{asked.baseline.name} has no gate that checks results, so no try could be promoted"
        raise SpecError(message, next=edit(asked.baseline.path))
    source = source_of(lab.cache, asked.baseline, asked.tree, watch)
    every = tries.ledger(lab.store, *asked.ledger)
    wanted = _parent(every, asked)
    rows = [row for row in every if not row.rejected]
    same = [row for row in rows if (row.pin, row.tree) == (source.pin, source.tree)]
    if asked.parent:
        same = [row for row in same if row.parent == wanted]
    if ended := [row.try_id for row in same if row.ended]:
        return ended[-1], True
    if files := series.untracked(asked.tree):
        message = f"{asked.tree} has files that git does not track, {len(files)} in all: {', '.join(files[:3])}"
        add = command("git", "-C", asked.tree, "add", files[0])
        raise SpecError(message, next=f"{add}, or ignore what is no source")
    with _alone(lab, asked.baseline.host):
        parent = same[0].parent if same else wanted
        of_parent = parent and _made(lab, tries.find(tries.ledger(lab.store), parent))
        reference = of_parent or source_of(lab.cache, asked.baseline, None, watch)
        if reference.tree == source.tree:
            raise SpecError(f"{asked.tree} is what it would be compared with", next=f"change something in {asked.tree}")
        change = series.diff(lab.cache, source, reference)
        begun = [row.try_id for row in same if _goes_on(lab, row, reference, change)]
        if begun:
            try_id = begun[0]
        else:
            _check_budget(rows, asked, 0.0)
            diff = series.diff(lab.cache, source)
            because = one_line(asked.because)
            try_id = tries.begin(lab.store, asked.ledger, because, source, diff=diff, change=change, parent=parent)
        _Measure(lab, asked, rows, try_id, source, of_parent or None, watch).to_the_end()
    return try_id, False


@dataclass(frozen=True)
class _Measure:
    lab: Lab
    asked: Try
    rows: Sequence[RecordedTry]  # the ledger before
    try_id: str
    source: Source
    reference: Source | None  # None for the baseline's own series
    watch: Watch
    begun: float = field(default_factory=time.monotonic)

    def to_the_end(self) -> None:
        """Measure the stages that are missing, and record how the try ends."""
        store, row = self.lab.store, tries.find(tries.ledger(self.lab.store), self.try_id)
        promoted = tries.tests_until(store, tries.last_test(store, row))
        earlier = tries.sessions_of(store, self.try_id).values()  # of a try that was interrupted
        before = sum(max(0.0, (job.finished_at or job.intent_at) - job.intent_at) for job in earlier)
        while stage := (state := tries.state_of(store, self.try_id, promoted)).next:
            _check_budget(self.rows, self.asked, before + time.monotonic() - self.begun)
            error = self._measure(stage, stats.level(promoted))
            if (again := tries.state_of(store, self.try_id, promoted)).next == stage:
                if error and not isinstance(error, (BuildFailed, GateFailed)):
                    raise error
                raise ConditionsError(f"the {stage} of try {self.try_id} decides nothing: {again.why}", next=AGAIN)
        tries.end(store, row, state, before + time.monotonic() - self.begun)

    def _measure(self, stage: str, level: float) -> DgxlabError | None:
        """Measure one stage in a session of its own, behind the jobs of others; return its error.

        The session is the stage's from its begin: it may end, and be recorded, after this client has left.
        """
        baseline, begun = self.asked.baseline, partial(tries.put_session, self.lab.store, self.try_id, stage)
        check = partial(_refuse_noise, baseline, level) if stage != HELD_OUT else None
        spec = held_out(baseline) if stage == HELD_OUT else baseline
        request = Request(KINDS[stage], spec, spec, tree=self.source, baseline_tree=self.reference, level=level)
        request = replace(request, wait_s=self.asked.wait_s, behind=True, check=check, begun=begun)
        outcome = session.run(self.lab, request, self.watch)
        begun(outcome.job_id)  # which may have been another client's
        return outcome.error


def held_out(experiment: Experiment) -> Experiment:
    """Return the experiment that measures the held-out cells of another."""
    return replace(experiment, name=f"{experiment.name[:40]}-held-out", bench=experiment.holdout, holdout=())


def export(lab: Lab, root: Path, name: str, row: RecordedTry) -> list[str]:
    """Write what a try changes in its pin as the series patches/<name> of the project `root`; return its patch files.

    Every series is made on a pin, not on other series. So this one has the changes of the try's reference, too.

    Raises SpecError as `series.export`, or if the pin cannot be found.
    """
    source = _made(lab, row)
    with lab.cache.scratch() as folder:
        checkout = Git(folder, user=True, is_work_tree=True)
        checkout.run("init", "--quiet")
        (folder / ".git/objects/info/alternates").write_text(f"{lab.cache.path.resolve() / 'objects'}\n")
        checkout.run("checkout", "--quiet", "--detach", row.pin)
        checkout.run("read-tree", "-u", "--reset", source.tree)
        exported = series.export(root, name, lab.cache, row.pin, folder, row.because)
    return [patch.name for patch in exported.patches]


def _parent(rows: Sequence[RecordedTry], asked: Try) -> str | None:
    """Return the id of the promoted try that a new one is compared with, None for the baseline itself."""
    promoted = [row for row in rows if row.promoted and row.pin == asked.baseline.pin]
    if asked.parent == "0" or (asked.parent is None and not promoted):
        return None
    row = tries.find(rows, asked.parent) if asked.parent else promoted[-1]
    if row not in promoted:
        message = f"try {row.number} is not promoted over pin {asked.baseline.pin[:12]}: nothing is compared with it"
        raise UsageError(message, next="dgxlab tries list")
    return row.try_id


def _made(lab: Lab, row: RecordedTry) -> Source:
    """Return what a try has built."""
    return series.remake(lab.cache, row.pin, row.tree, tries.diff_of(lab.store, row.try_id))


def _goes_on(lab: Lab, row: RecordedTry, reference: Source, change: str) -> bool:
    """Return whether an unfinished try was begun against this reference; True if it does not say, as older ones.

    Raises SpecError if it was not and has sessions: its stages would not agree.
    """
    jobs = tries.sessions_of(lab.store, row.try_id).values()
    for job in jobs:
        if (was := job.plan.arms[0].source.tree) != reference.tree:
            message = f"try {row.number} was begun against tree {was[:12]} of {row.baseline}, which has changed"
            reject = ("session", "reject", alias(job.job_id), "--because", "its baseline has changed")
            first = ("cancel", alias(job.job_id)) if job.state in ("intended", "running") else reject
            raise SpecError(f"{message} to {reference.tree[:12]}", next=command("dgxlab", *first))
    return bool(jobs) or row.diff_over == "pin" or tries.change_of(lab.store, row.try_id) == change


def _check_budget(rows: Sequence[RecordedTry], asked: Try, now_s: float) -> None:
    """Raise BudgetSpent if the ended tries of a ledger, and `now_s` seconds of this one, have reached a limit."""
    ended = [row for row in rows if row.ended]
    spent = now_s + sum(row.seconds or 0.0 for row in ended)
    reached = [f"{len(ended)} of {asked.max_tries} tries"] if 0 < asked.max_tries <= len(ended) else []
    reached += [f"{duration(spent)} of {duration(asked.max_s)}"] if 0 < asked.max_s <= spent else []
    if reached:
        message = f"the ledger of {asked.baseline.name} on {asked.baseline.host} has used {' and '.join(reached)}"
        raise BudgetSpent(message, next="dgxlab report --form tries")


def _refuse_noise(baseline: Experiment, level: float, planned: Plan) -> None:
    """Raise ConditionsError if, by a plan's noise, not even the longest chain finds the wanted effect."""
    sigmas = {(noise.cell, noise.metric): noise.sigma for chain in planned.chains for noise in chain.noise}
    asked = [each for chain in planned.chains for each in comparisons(chain)]
    sigma, cell = max((sigmas[each.baseline, each.metric], each.baseline) for each in asked)
    by_hand = cycles_by_hand(baseline.session, stats.claims_at(level, len(asked)))
    cycles = by_hand or stats.cycle_range(len(asked))[1]
    finds, wanted = stats.mde(sigma, cycles, len(asked)), baseline.session.effect
    if finds > wanted:
        label = next(each.label for chain in planned.chains for each in chain.baseline.cells if each.key == cell)
        message = f"the noise of {label} on host {baseline.host}, {100 * sigma:.2g} %, is too high:"
        message += f" {cycles} cycles find an effect of {100 * finds:.2g} % or more"
        message += f", and session.effect is {100 * wanted:.2g} %"
        mend = f"{noise_command(baseline)}, when it is quiet, or a larger session.effect: {edit(baseline.path)}"
        raise ConditionsError(message, next=mend)


@contextmanager
def _alone(lab: Lab, host: str) -> Iterator[None]:
    """Be the only loop of this machine on a host; HostBusy if there is another one."""

    def refuse() -> None:
        raise HostBusy(f"another loop uses host {host}: one at a time", next=AGAIN)

    with locked(lab.cache.path.with_name(f"loop-{host.replace('/', '-')}.lock"), refuse):
        yield
