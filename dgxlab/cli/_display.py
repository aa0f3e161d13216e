"""Display of a running job: a line for each finished step, and for long ones a bar or, in a log, a line a minute.

No value of a chain is shown before the session has ended: a user who sees the effect early may stop when it looks good.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

from dgxlab.cli._out import Out
from dgxlab.errors import one_line
from dgxlab.model import BASELINE, BURN_IN, CANDIDATE, CHANGED, ParityGate, Source, about, events
from dgxlab.stats import median
from dgxlab.store import gate_digest
from dgxlab.units import conditions, duration, held, metric, ranges, size, style


class Lines:
    """Makes lines of text from the events of a job. A run of a chain is shown with the `chain` event after it.

    `arms` is how many the job has, if its builds may not be among the events.
    """

    def __init__(self, arms: int = 1) -> None:
        self._arms = arms
        self._run: events.RunEvent | None = None  # of a chain, ended and not shown yet
        # of the job that is shown
        self._sources: dict[str, Source] = {}  # by arm
        self._counts: set[tuple[str, str]] = set()  # trees and gates whose counts are recorded
        self._models: set[tuple[str, str]] = set()  # names and paths of those told: each arm has them all

    def of(self, event: Any) -> list[str]:
        """Return the lines to print for an event, [] for most."""
        match event.event:
            case "note":
                return [event.note]
            case "lock" if event.state == "waiting":
                return [f"waiting for the device: {held(event.path, event.owner)}{_until(event)}"]
            case "lock" if event.state == "building":
                return [f"waiting for the build of {event.owner}, in the same folder {event.path}{_until(event)}"]
            case "lock" if event.state == "unwatched":
                return [f"the lock file {event.path} is neither read nor signed: {event.owner}"]
            case "job":
                self._sources, self._counts, self._models = {}, set(), set()
            case "build":
                self._sources[event.arm] = event.source
                how = "reused" if event.reused else f"built in {duration(event.seconds)}"
                return [f"build {event.build_id} of {event.arm}: {how}"]
            case "model" if (event.name, event.path) not in self._models:
                self._models.add((event.name, event.path))
                return [f"model {event.name}: {event.path}, {size(event.size)}"]
            case "gate":
                return [_gate(event, max(self._arms, len(self._sources)) > 1, records=self._records(event))]
            case "run" if event.chain:
                self._run = event
            case "run":
                return _run(event)
            case "chain":
                run, self._run = self._run, None
                return [_chain(event, run)]
        return []

    def _records(self, event: events.GateEvent) -> bool:
        """Return whether a gate's count is the first of its tree here; a checkout's is never recorded."""
        source = self._sources.get(event.arm)
        if source is None or source.dirty:
            return False
        count = (source.tree, gate_digest(event.gate, event.env))
        first = count not in self._counts
        self._counts.add(count)
        return first


def _gate(event: events.GateEvent, several: bool, *, records: bool) -> str:
    gate = event.gate
    again = ", after the chains" if event.id.endswith(":after") else ""
    if not isinstance(gate, ParityGate):
        read = "; ".join((*map(str, event.reasons), *gate.shown(event.readings))) or "nothing read"
        words = f"gate {about(gate)}{f' for {event.arm}' * several}{again}: {event.status}"
        return f"{words}, {read} ({duration(event.seconds)})"
    counted, reading = "nothing counted", event.counts
    if reading["total"] is not None:
        counted = f"{reading['passed']}/{reading['total']}, {reading['unsupported']} unsupported"
    status = f"{event.status}{CHANGED * gate.overridden}"
    words = f"gate {about(gate)}{f' of {event.arm}' * several}{again}: {status}, {counted} ({duration(event.seconds)})"
    records = records and not again and gate.expect is None and event.status == "passed" and not gate.overridden
    return words + "; recorded as what to expect from now on" * records


def _until(event: events.LockEvent) -> str:
    """Return how a wait ends; "" for that of an older agent, which did not tell."""
    return f"; it goes on by itself, or gives up after {duration(event.left_s)}" if event.left_s else ""


def _run(event: events.RunEvent) -> list[str]:
    hard = "hard event, so no verdict uses this run"
    below = [f"  {hard if flag.hard else 'flag'}: {flag.reason}" for flag in event.flags]
    if event.status != "valid":
        return [f"{event.id} {event.status}: {event.reason}", *below]
    below += [f"  refused: {event.reason}"] if event.reason else []
    for result in event.results:
        values = []
        for measurement in result.measurements:
            quantity, value = metric(measurement.metric), median(measurement.samples)
            shown_as = style(quantity, [value])
            values.append(f"{quantity.label} {shown_as.value(value)} {shown_as.unit}".lstrip())
        below.append(f"  {event.cells[result.cell].label}: {', '.join(values)}")
    state = conditions(ranges((seen.name, seen.median) for seen in event.telemetry))
    around = ", ".join(filter(None, (duration(event.seconds), state)))
    return [f"{event.id} {event.tool} ({around})", *below]


def _chain(event: events.ChainEvent, run: events.RunEvent | None) -> str:
    """Return a chain's progress after a run, or while the device cools; `run` is None if none has ended."""
    if event.state == "cooling" or (event.state == "done" and not run):
        return f"{event.id} {', '.join(filter(None, (event.note or 'done', conditions(event.conditions))))}"
    # the arms' durations would reveal the effect
    took = duration(run.seconds) if run and event.role == BURN_IN else ""
    around = ", ".join(filter(None, (took, conditions(event.conditions))))
    what = " ".join(filter(None, (event.id, run.tool if run else "", position(event))))
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


def position(event: events.ChainEvent) -> str:
    """Return where in its chain a run is, as `cycle 3 of 8, baseline`."""
    role, cycle = event.role, event.cycle
    if role == BURN_IN:
        return f"{role} {cycle}"
    return f"cycle {cycle} of {event.cycles}, {role}" if cycle else f"first {role}"


class Waits:
    """For a log, where no bar moves: says what a build or a gate does as it begins, and every minute how far it is."""

    EVERY_S = 60.0

    def __init__(self) -> None:
        self._step = self._words = ""
        self._said = 0.0

    def of(self, event: Any) -> str:
        """Return the line to print for an event, "" for most; a build that is reused has none."""
        if event.event != "progress" or not event.id.startswith(("build:", "gate:")):
            return ""
        if event.id != self._step:
            self._step, self._words = event.id, event.note
            return ""
        if not self._words and (not event.total or event.t - self._said < self.EVERY_S):
            return ""
        words, self._words, self._said = self._words, "", event.t
        return words or f"{event.note.partition(': ')[0]}: {event.id.replace(':', ' ')}, {event.done} of {event.total}"


def notes(out: Out) -> Callable[[events.Event], None]:
    """Return a watcher that prints notes alone."""
    return lambda event: out.note(event.note) if isinstance(event, events.NoteEvent) else None


@contextmanager
def display(out: Out, logged: Collection[str] = (), arms: int = 1) -> Iterator[Callable[[events.Event], None]]:
    """Yield a function that prints the events of a job to stderr, on a terminal with a progress bar.

    `arms` is as in `Lines`. In a log only events of the kinds `logged` are printed, all if it is empty.
    """
    if out.quiet:
        yield lambda event: None
    elif sys.stderr.isatty():
        from dgxlab.cli._terminal import Bar

        bar = Bar(arms)
        with bar.progress:
            yield bar.show
    else:
        lines, waits = Lines(arms), Waits()

        def show(event: events.Event) -> None:
            for line in filter(None, [waits.of(event), *lines.of(event)]):
                if not logged or event.event in logged:
                    out.note(one_line(line))

        yield show
