"""How far a job is: its step, what that does, and how long the rest takes by earlier sessions."""

from __future__ import annotations

from dataclasses import dataclass, replace

from dgxlab.lab import Watch
from dgxlab.lab.outlook import device_on, expected
from dgxlab.model import BuildStep, ChainStep, GateStep, HostEntry, ModelStep, RunStep, Step, about, events
from dgxlab.store import Job, Store
from dgxlab.units import duration


def words(step: Step) -> str:
    """Return what a step does, in words."""
    match step:
        case BuildStep():
            return f"build {step.arm}"
        case ModelStep():
            return f"make model {step.model} ready"
        case GateStep():
            return f"gate {about(step.gate)} of {step.arm}"
        case RunStep():
            return f"{step.tool} of {step.arm}"
        case ChainStep():
            return f"a chain of {step.baseline.tool}"
    return f"check the flags of {step.argv[0].rpartition('/')[2]}"


@dataclass
class Progress:
    """Passes a job's events to `watch`, with the place of their step in the job, and what follows it in times left."""

    store: Store
    host: HostEntry
    job: Job
    watch: Watch

    def __post_init__(self) -> None:
        plan = self.job.plan
        self.steps = {step.id: (number, step) for number, step in enumerate(plan.steps, 1)}
        self.took = expected(self.store, plan, device_on(self.store, self.host, plan))
        self._at, self._since = "", 0.0

    def see(self, event: events.Event) -> None:
        """Pass one event; a step that is seen first is told with what it does."""
        step = getattr(event, "id", "")
        if step in self.steps and step != self._at and getattr(event, "state", "") != "done":
            self._at, self._since = step, event.t
            self.watch(events.ProgressEvent(id=step, done=0, total=0, note=self._place(event.t, begins=True)))
        if isinstance(event, events.GateEvent):
            self.took[f"{event.id}:after"] = event.seconds  # where it is run again after the chains
        elif isinstance(event, events.ProgressEvent) and step in self.steps:
            event = replace(event, note=f"{self._place(event.t)}: {event.note}")
        elif isinstance(event, events.ChainEvent) and event.left_s:
            later, note = self._later(), ""
            if later is None:
                note = "what follows is not counted"
            elif self._chooses(self.steps[self._at][0] + 1):
                note = "a chain that follows is counted with its fewest cycles"
            notes = "; ".join(filter(None, (event.note, note)))
            event = replace(event, left_s=event.left_s + (later or 0.0), note=notes)
        self.watch(event)

    def _place(self, now: float, *, begins: bool = False) -> str:
        number, step = self.steps[self._at]
        place = f"step {number} of {len(self.steps)}"
        took = self.took[self._at]
        if begins:
            place = f"{place}: {words(step)}" + (f", about {duration(took)}" if took else "")
        later = self._later()
        if took is None or later is None:
            return place
        left = took - (now - self._since)
        if left < 0:  # it takes longer than before
            return place
        left += later
        least = "at least " if self._chooses(number) else ""
        return f"{place}, {least}{duration(left)} left" if left >= 1 else place

    def _later(self) -> float | None:
        """Return how long the steps after the present one take; None if that of one is not known."""
        number, _ = self.steps[self._at]
        later = [self.took[each] for each, (place, _) in self.steps.items() if place > number]
        return None if None in later else sum(filter(None, later))

    def _chooses(self, first: int) -> bool:
        """Return whether a chain from this step on chooses its cycles: it is counted with the fewest."""
        rest = (step for number, step in self.steps.values() if number >= first)
        return any(isinstance(step, ChainStep) and not step.cycles for step in rest)
