"""The benchmark runs of one job: the devices are held before each, and it is in the journal after it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dgxlab.agent.journal import Journal
from dgxlab.agent.lease import DeviceLease
from dgxlab.agent.measure import Attempt, Bench
from dgxlab.errors import AGAIN, DgxlabError, GateFailed, HostBusy, RemoteError
from dgxlab.model import RunStep

Fill = Callable[[Sequence[str], str], "list[str]"]
Identify = Callable[[RunStep], Mapping[str, str]]


class Runs:
    """Launches and records them.

    Args:
        job_id: Whose they are.
        fill: Replaces the placeholders in an arm's argv.
        identify: Says what a run measures: the build_id and model_id of its event.
        keep: Descriptors that children inherit; those of the locks come and go in it.

    Attributes:
        journal: Where everything is told.
        telemetry: What is sampled beside them.
    """

    def __init__(
        self,
        job_id: str,
        journal: Journal,
        bench: Bench,
        lease: DeviceLease,
        fill: Fill,
        identify: Identify,
        keep: list[int],
    ) -> None:
        self.journal = journal
        self.telemetry = bench.telemetry
        self._job_id = job_id
        self._bench = bench
        self._lease = lease
        self._fill = fill
        self._identify = identify
        self._keep = keep
        self._lasting = tuple(keep)
        self._position = 0

    def hold(self) -> float:
        """Have the devices for the next launch, never before the builds are done; return the seconds that it took."""
        waited = self._lease.hold()
        self.telemetry.start()
        self._keep[:] = [*self._lasting, *self._lease.fds]
        return waited

    def launch(self, step: RunStep, name: str, absent: Sequence[str] = (), *, pin: bool = False) -> Attempt:
        """Run it once; `name` becomes its raw files' names, the rest is as in `Bench.run`."""
        argv = self._fill(step.argv, step.arm)
        return self._bench.run(step, argv, name, self._lease.disturbance, absent, pin=pin)

    def record(self, step: RunStep, fields: Mapping[str, Any], **place: Any) -> None:
        """Write a run's event; `place` says where in a chain it ran."""
        identity = self._identify(step)
        self.journal.emit("run", id=step.id, arm=step.arm, position=self._position, **identity, **place, **fields)
        self._position += 1

    def failure(self, name: str, attempt: Attempt, tries: int = 1) -> DgxlabError:
        """Return why a run gave no number, as the error that the job ends with."""
        reason = attempt.fields["reason"] + (f" ({tries} attempts)" if tries > 1 else "")
        if attempt.again == "disturbed":
            return HostBusy(f"{name} was not left alone: {reason}", next=AGAIN)
        kind = GateFailed if attempt.fields["status"] == "discarded" else RemoteError
        return kind(reason, next=self.log(attempt))

    def log(self, attempt: Attempt) -> str:
        """Return the command that shows what a run said on stderr."""
        return f"dgxlab logs {self._job_id} {attempt.fields['raw']['stderr']['path']}"
