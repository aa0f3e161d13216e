"""What a running job looks like: a line for everything that ends, and on a terminal a bar for what takes long.

No value of a chain is shown before the session has ended: who knows the effect so far stops when it pleases.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from dgxlab.cli._out import Out
from dgxlab.errors import one_line
from dgxlab.model import BASELINE, BURN_IN, CANDIDATE, CHANGED, about, events
from dgxlab.stats import median
from dgxlab.tools import shown
from dgxlab.units import conditions, duration, metric, size, style


class Lines:
    """Says what happens. A run of a chain is told with the `chain` event that follows it, in one line."""

    def __init__(self) -> None:
        self._run: events.RunEvent | None = None
        """The run of a chain that has ended and was not told of."""
        self._arms: set[str] = set()

    def of(self, event: Any) -> list[str]:
        """Return what to say about an event, [] for most."""
        match event.event:
            case "note":
                return [event.note]
            case "lock" if event.state == "waiting":
                return [f"waiting for the device: {event.path} is held by {event.owner}"]
            case "lock" if event.state == "unwatched":
                return [f"the lock file {event.path} is neither read nor signed: {event.owner}"]
            case "build":
                self._arms.add(event.arm)
                how = "reused" if event.reused else f"built in {duration(event.seconds)}"
                return [f"build {event.build_id} of {event.arm}: {how}"]
            case "model":
                return [f"model {event.name}: {event.path}, {size(event.size)}"]
            case "gate":
                return [_gate(event, f" of {event.arm}" if len(self._arms) > 1 else "")]
            case "check":
                return [_check(event, f" for {event.arm}" if len(self._arms) > 1 else "")]
            case "run" if event.chain:
                self._run = event
            case "run":
                return _run(event)
            case "chain":
                run, self._run = self._run, None
                return [_chain(event, run)]
        return []


def _gate(event: events.GateEvent, of: str) -> str:
    gate = event.gate
    counted = "nothing counted"
    if event.total is not None:
        counted = f"{event.passed}/{event.total}, {event.unsupported} unsupported"
    again = ", after the chains" if event.id.endswith(":after") else ""
    about = f"gate {gate.op} on {gate.backend}{of}{again}"
    changed = gate.overridden
    words = f"{about}: {event.status}{CHANGED * changed}, {counted} ({duration(event.seconds)})"
    recorded = gate.expect is None and event.status == "passed" and not changed
    return words + ("; recorded as what to expect from now on" if recorded else "")


def _check(event: events.CheckEvent, of: str) -> str:
    gate = event.gate
    again = ", after the chains" if event.id.endswith(":after") else ""
    read = "; ".join((*event.reasons, *shown(gate, event.readings))) or "nothing read"
    words = f"gate {about(gate)}{of}{again}: {event.status}"
    return f"{words}, {read} ({duration(event.seconds)})"


def _run(event: events.RunEvent) -> list[str]:
    cells = event.cells
    below = [f"  {'hard event' if flag.hard else 'flag'}: {flag.reason}" for flag in event.flags]
    if event.status != "valid":
        return [f"{event.id} {event.status}: {event.reason}", *below]
    for result in event.results:
        values = []
        for measurement in result.measurements:
            quantity, value = metric(measurement.metric), median(measurement.samples)
            shown_as = style(quantity, [value])
            values.append(f"{quantity.label} {shown_as.value(value)} {shown_as.unit}".lstrip())
        below.append(f"  {cells[result.cell].label}: {', '.join(values)}")
    ranges: dict[str, tuple[float, float]] = {}
    for seen in event.telemetry:  # of one GPU, or of several
        low, high = ranges.get(seen.name, (seen.median, seen.median))
        ranges[seen.name] = (min(low, seen.median), max(high, seen.median))
    around = ", ".join(filter(None, (duration(event.seconds), conditions(ranges))))
    return [f"{event.id} {event.tool} ({around})", *below]


def _chain(event: events.ChainEvent, run: events.RunEvent | None) -> str:
    """Say how far a chain is after a run, or while the device cools; the run is None where none has ended."""
    if event.state == "cooling" or (event.state == "done" and not run):
        about = [event.note or "done", conditions(event.conditions)]
        return f"{event.id} {', '.join(filter(None, about))}"
    # how long the arms take side by side is the effect in other words
    took = duration(run.seconds) if run and event.role == BURN_IN else ""
    around = ", ".join(filter(None, (took, conditions(event.conditions))))
    what = " ".join(filter(None, (event.id, run.tool if run else "", place(event))))
    progress = []  # nothing about the candidate
    if event.role != CANDIDATE and event.drift is not None:
        progress.append(f"baselines {100 * event.drift:.2f} % apart")
    if event.role == BASELINE and event.cycle:
        progress.append(f"{event.valid} of {event.cycle} count")
    if event.state == "done":
        progress.append("done")
    elif event.left_s is not None:
        progress.append(f"{duration(event.left_s)} left")
    words = "; ".join(filter(None, (", ".join(progress), event.note)))
    return what + (f" ({around})" if around else "") + (f": {words}" if words else "")


def place(event: events.ChainEvent) -> str:
    """Name the place of a chain that an event is about."""
    role, cycle = event.role, event.cycle
    if role == BURN_IN:
        return f"{role} {cycle}"
    return f"cycle {cycle} of {event.cycles}, {role}" if cycle else f"first {role}"


@contextmanager
def display(out: Out) -> Iterator[Callable[[events.Event], None]]:
    """Give a function that shows events; on a terminal a bar moves below the lines."""
    if out.quiet:
        yield lambda event: None
    elif sys.stderr.isatty():
        with _Bar() as bar:
            yield bar.show
    else:
        lines = Lines()

        def show(event: events.Event) -> None:
            for line in lines.of(event):
                out.note(one_line(line))

        yield show


class _Bar:
    """Lines above, one bar below."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

        self.console = Console(stderr=True, highlight=False)
        self.progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=self.console,
            transient=True,
        )
        self.task = self.progress.add_task("starting", total=None)
        self.lines = Lines()

    def __enter__(self) -> _Bar:
        self.progress.start()
        return self

    def __exit__(self, *ended: object) -> None:
        self.progress.stop()

    def show(self, event: Any) -> None:
        for line in self.lines.of(event):
            self.console.print(one_line(line), markup=False)
        if event.event == "progress":
            self._move(f"{event.id} {event.note}", event.done, event.total or None)
        elif event.event == "chain":
            self._move(f"{event.id} {place(event)}", event.done, event.total)
            self.progress.refresh()  # runs may be shorter than the time between two pictures
        elif event.event == "step" and event.state == "started":
            self.progress.remove_task(self.task)  # to reset it would leave it the total of the step before
            self.task = self.progress.add_task(str(event.id), total=None)

    def _move(self, text: str, done: float, total: float | None) -> None:
        self.progress.update(self.task, description=one_line(text), completed=done, total=total)
