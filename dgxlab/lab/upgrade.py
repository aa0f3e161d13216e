"""The check of a newer pin: whether stock and each series apply, build and pass there, and a screen against the old."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from dgxlab import series
from dgxlab.errors import BuildFailed, ConditionsError, PatchError, SpecError
from dgxlab.lab import Lab, Watch, noted, session
from dgxlab.lab.request import Request, operations
from dgxlab.lab.search import FAULTS, Search, Subject, cause, gated
from dgxlab.model import Experiment, ParityGate
from dgxlab.stats import Verdict
from dgxlab.store import gate_digest
from dgxlab.tools import gate_step

CUDA_FILES = (".cu", ".cuh")


@dataclass(frozen=True)
class Upgrade:
    """What became of stock, or of one series, on the new pin. None: not known, as an earlier step failed."""

    series: str  # "" for stock
    applies: bool
    builds: bool | None = None
    gates: dict[str, str] = field(default_factory=dict)  # op: counts, or why it failed
    passed: bool | None = None
    verdicts: tuple[tuple[Subject, Verdict], ...] = ()  # of the screen against the old pin
    sessions: tuple[str, ...] = ()
    reason: str = ""  # why a column is empty or says no
    next: str = ""  # the command that helps
    problems: tuple[str, ...] = ()  # of a series that applies, as `series.check` finds them
    uncompiled: Literal["", "some", "all"] = ""  # which of its files but tests are CUDA files, not built

    @property
    def well(self) -> bool:
        """Whether it applies, and passed everything that the experiment can try of it."""
        return self.applies and (self.uncompiled == "all" or bool(self.builds and self.passed))


@dataclass(frozen=True)
class PinCheck:
    """How the rows of an upgrade are made; `experiment` is on the old pin, and its own series are left out."""

    experiment: Experiment
    pin: str
    sources: Sequence[str]
    screen: bool
    wait_s: float

    def rows(self, lab: Lab, names: Sequence[str], others: Collection[Experiment], watch: Watch) -> Iterator[Upgrade]:
        """Yield the row of stock, then of each series.

        A row has the parity gates of the experiment, and of the operations that those of `others` that apply the series
        have gates for; the row of stock has those of all series that are tried. An operation that the patched C sources
        do not name is left out: another series brings it. Where the experiment builds no CUDA files, a series that has
        nothing but tests beside them is not built: it would measure stock. Raises DgxlabError for an error that does
        not lie in what is built.
        """
        lab.cache.ensure(self.pin, self.sources, noted(watch))
        rows = [self._applied(lab, name) for name in ("", *names)]
        ops: dict[str, set[str]] = {row.series: set() for row, commit in rows if commit}
        for each in others:
            gates = {gate.op for gate in each.gates if isinstance(gate, ParityGate)}
            for name in ops.keys() & {part.partition(":")[0] for part in each.series}:
                ops[name] |= gates
        ops[""] = set().union(*ops.values())
        for number, (row, commit) in enumerate(rows, 1):
            if not commit:
                yield row
                continue
            noted(watch)(f"{number} of {len(rows)}: {row.series or 'stock'}")
            yield self._tried(lab, row, sorted(ops[row.series] & operations(lab.cache, commit)), watch)

    def _applied(self, lab: Lab, name: str) -> tuple[Upgrade, str]:
        """Return the row of a series as far as its patches tell, and the commit to build, "" for none."""
        root = Path(self.experiment.root)
        try:
            read = [series.read(root, name, self.pin)] if name else []
            commit = series.apply(lab.cache, self.pin, read).commit
        except (PatchError, SpecError) as error:
            port = f"dgxlab patch refresh {name} --pin {self.pin} --beside"
            mend = port if isinstance(error, PatchError) else error.next
            return Upgrade(name, applies=False, reason=error.message, next=mend), ""
        row = Upgrade(name, applies=True, problems=tuple(series.check(root, name, lab.cache, self.pin)) if name else ())
        paths = [path for each in read for path in each.paths]
        others = [path for path in paths if not path.endswith(CUDA_FILES)]
        if self.experiment.cmake.get("GGML_CUDA") == "ON" or others == paths:
            return row, commit
        if all(path.startswith("tests/") for path in others):
            return replace(row, uncompiled="all"), ""
        return replace(row, uncompiled="some"), commit

    def _tried(self, lab: Lab, row: Upgrade, ops: Sequence[str], watch: Watch) -> Upgrade:
        """Return the row with what the build, the gates and the screen gave."""
        name = row.series
        old = replace(gated(self.experiment), series=tuple(filter(None, [name])))
        gates = [gate for gate in old.gates if isinstance(gate, ParityGate)]
        others = [op for op in ops if op not in {gate.op for gate in gates}] if gates else []
        more = [replace(gates[0], op=op, env={}, where={}) for op in others]
        short = f"{old.name[:40]}-{name or 'stock'}"[:55]
        old = replace(old, gates=(*gates, *more), name=short)
        new = replace(old, pin=self.pin, sources=tuple(self.sources), name=f"{short}-new")
        row = self._gated(lab, row, new, watch)
        if not (row.passed and self.screen and new.bench):
            return row
        try:  # the gates have just passed, and the pins have different cases
            baseline, candidate = (replace(each, gates=()) for each in (old, new))
            compared = Search(kind="screen", wait_s=self.wait_s).compare(lab, baseline, candidate, watch)
        except ConditionsError as error:  # the noise is not known
            return replace(row, reason=error.message, next=error.next)
        sessions = tuple(filter(None, (*row.sessions, compared.session)))
        reason = row.reason or (compared.reason if compared.fault else "")  # an invalid verdict has its own reasons
        return replace(row, verdicts=compared.verdicts, sessions=sessions, reason=reason)

    def _gated(self, lab: Lab, row: Upgrade, new: Experiment, watch: Watch) -> Upgrade:
        """Return the row with what the build and the gates gave, now or in an earlier check of the same build."""
        try:
            gates = replace(new, bench=(), holdout=())  # what is not run needs no operation that the pin lacks
            outcome = session.run(lab, Request("gate", gates, wait_s=self.wait_s), watch)
        except FAULTS as refused:
            return replace(row, reason=cause(refused), next=refused.next)
        error = outcome.error
        if error and not isinstance(error, FAULTS):
            raise error
        counts, sessions = {}, dict.fromkeys(filter(None, [outcome.job_id]))
        for gate in new.gates:
            assert isinstance(gate, ParityGate)
            question = gate_digest(gate, gate_step("", "", gate, new).env)
            if seen := lab.store.latest_gate(outcome.build, outcome.device.id, question, gate):
                ended = "" if seen["status"] == "passed" else f" ({seen['status']})"
                counts[gate.op] = f"{seen['passed']}/{seen['total']}, {seen['unsupported']} unsupported{ended}"
                sessions[seen["job_id"]] = None
        built = not isinstance(error, BuildFailed)
        row = replace(row, builds=built, gates=counts, sessions=tuple(sessions))
        if error is None:
            return replace(row, passed=True)
        return replace(row, passed=False if built else None, reason=cause(error), next=error.next)
