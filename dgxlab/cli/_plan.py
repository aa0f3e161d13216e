"""A plan as text: every command in order, ready to type; and the effects that an A/B session can detect."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from dgxlab import model, stats
from dgxlab.chains import drift_limit, shortest_burn_in
from dgxlab.cli._out import Out, as_typed, plural, table
from dgxlab.errors import SpecError
from dgxlab.lab.outlook import noise_command
from dgxlab.lab.provision import need_files
from dgxlab.model import BASELINE, BURN_IN, CANDIDATE, ChainStep, ParityGate, Plan, RunStep
from dgxlab.project import hosts_files
from dgxlab.spec.hosts import look_up
from dgxlab.stats import cycle_range
from dgxlab.units import duration, metric, percent

if TYPE_CHECKING:
    from dgxlab.lab.missing import Recorded
    from dgxlab.lab.outlook import Outlook

_PLAIN = re.compile(r"[\w@%+=:,./{}-]+", re.ASCII)  # words that need no shell quoting, placeholders included
_NEVER = "over 100"  # shown when more cycles are needed than dgxlab proposes


def entry_of(experiments: Sequence[model.Experiment], out: Out) -> model.HostEntry:
    """Return the entry of the host, one without settings if no hosts.yaml names it: the record may have it.

    A note says that, or which file of a model is missing if the host is this machine.
    """
    name, entry = experiments[0].host, None
    try:
        entry = look_up(name, hosts_files())
        if name == "local":
            need_files(name, experiments, lambda path: Path(path).expanduser().is_file())
    except SpecError as error:
        out.note(f"note: {error.message}; next: {error.next}")
    return entry or model.HostEntry(name)


def describe(plan: Plan, expected: Mapping[str, float | None]) -> str:
    """Return a plan as text; what only the host knows is a {placeholder}.

    `expected` has the seconds that each step took there, by its id, as `outlook.expected` returns them; of a chain that
    chooses its cycles those of the shortest.
    """
    lines = [f"experiment {plan.name}"]
    for arm in plan.arms:
        series = ", ".join(map(str, arm.source.series)) or "none"
        lines.append(f"arm {arm.name}: pin {arm.source.pin[:12]}, series {series}, tree {arm.source.tree[:12]}")
    made: dict[tuple[str, str], str] = {}  # by what a step makes, the first that does: the host makes it once
    for step in plan.steps:
        head, *rest = _chain(step) if isinstance(step, ChainStep) else _step(step)
        if isinstance(step, model.BuildStep | model.ModelStep):
            tree = plan.arm(step.arm).source.tree if isinstance(step, model.BuildStep) else ""
            first = made.setdefault((tree, model.canonical(replace(step, id="", arm=""))), step.id)
            if first != step.id:
                head, rest = f"[{step.id}] the same as {first}", []
        took = expected.get(step.id)
        when = "the longest so far" if isinstance(step, model.BuildStep) else "the last time"
        when = "by the median of the last runs" if isinstance(step, RunStep | ChainStep) else when
        when = "or more" if isinstance(step, ChainStep) and not step.cycles else when
        lines += ["", head if not took else f"{head}; {duration(took)} {when}", *rest]
    single = sum(len(step.cells) for step in plan.steps if isinstance(step, RunStep))
    cells = single + sum(len(chain.baseline.cells) for chain in plan.chains)
    known = [took for took in expected.values() if took is not None]
    unknown = [step.id for step in plan.steps if expected.get(step.id) is None]
    least = f"; about {duration(sum(known))} if nothing is reused" if any(known) else ""
    more = f" and {len(unknown) - 3} more" if len(unknown) > 3 else ""
    least += f", besides {', '.join(unknown[:3])}{more}, of which no time is known" if least and unknown else ""
    return "\n".join([*lines, "", f"{plural(len(plan.steps), 'step')}, {plural(cells, 'cell')}{least}"])


def _step(step: model.Step) -> Iterator[str]:
    assert not isinstance(step, ChainStep)
    yield f"[{step.id}] at most {duration(step.limit_s)}"
    if isinstance(step, model.BuildStep):
        yield "  check out the tree, then"
        yield _command(step.configure)
        yield _command(step.compile)
    elif isinstance(step, model.ModelStep):
        yield f"  {step.path}"
        yield from (_command(argv) for argv in (step.make, step.quantize) if argv)
    elif isinstance(step, model.ProbeStep):
        yield f"{_command(step.argv)}    # must know {' '.join(step.flags)}"
    elif isinstance(step, model.GateStep):
        if isinstance(gate := step.gate, ParityGate):
            yield _command(step.commands[0].argv, step.env)
            changed = model.CHANGED * gate.overridden
            yield f"  must pass {gate.expect or 'every case; the count is recorded'}{changed}"
            if gate.engaged:
                yield f"  must hold: {gate.engaged!r} on stderr"
            return
        text = f"{{text}} is {plural(step.text.words, 'word')} of seed {step.text.seed}" if step.text else ""
        files = f"{{files}} is a folder with {plural(len(step.files), 'file')}" if step.files else ""
        yield f"  {'; '.join(filter(None, (model.about(gate), text, files)))}"
        yield from (_command(command.argv, command.env) for command in step.commands)
        yield f"  must hold: {'; '.join(gate.limits())}"
    else:
        yield _command(step.argv, step.env)
        yield from _markers(step)
        yield _cells(step)


def _chain(step: ChainStep) -> Iterator[str]:
    extra = 0 if step.screen else stats.EXTRA_CYCLES
    least, most = (step.cycles, step.cycles) if step.cycles else cycle_range(step.claims)
    runs = f"{shortest_burn_in(step) + 2 * least + 1} to {stats.BURN_IN_RUNS[1] + 2 * (most + extra) + 1} runs"
    yield f"[{step.id}] {runs} of at most {duration(max(step.baseline.limit_s, step.candidate.limit_s))} each"
    if step.candidate == step.baseline:
        yield "  baseline and candidate"
        yield _command(step.baseline.argv, step.baseline.env)
        yield from _markers(step.baseline)
    else:
        for run, role, absent in ((step.baseline, BASELINE, step.absent), (step.candidate, CANDIDATE, ())):
            yield f"  {role} {run.arm}"
            yield _command(run.argv, run.env)
            yield from _markers(run, absent)
    yield _cells(step.baseline)
    if 0 < step.cycles <= 3:
        order = f"A{' B A' * step.cycles}"
    elif step.cycles:
        order = f"A B A ... B A with {step.cycles} B"
    else:
        within = f", as many as {duration(step.max_s)} allow" if step.max_s else ""
        order = f"A B A ... B A with {least} to {most} B, by its noise, to find {100 * step.effect:g} %{within}"
    one_more = f", and at most {extra} cycles more where a run failed or was disturbed" if extra else ""
    yield f"  order: {BURN_IN} of the {BASELINE}, then {order}{one_more}"
    if step.block_s:
        yield f"  each A and B is a block: its arm runs for {duration(step.block_s)}, and then the run that counts"
    if step.pin:
        yield "  each run is pinned to as many processors as it has threads, on cores of their own while there are some"
    warm = "each arm at its own temperature" if step.block_s else "the arms at their shared temperature"
    conditions = "each run waits until the device has cooled" if step.thermal == "cold" else warm
    limit = f"{100 * drift_limit(step):g} %"
    costs = f"a step of more than {limit} costs its cycle, which no other replaces"
    apart = f"baselines at most {limit} apart" if step.screen else costs
    yield f"  thermal {step.thermal}: {conditions}; {apart}"


def _markers(run: RunStep, absent: Sequence[str] = ()) -> Iterator[str]:
    """Yield a line with what must be on a run's stderr, and what must not."""
    limits = [*(f"{marker!r} on stderr" for marker in run.markers), *(f"{marker!r} not on stderr" for marker in absent)]
    if limits:
        yield f"  must hold: {'; '.join(limits)}"


def _cells(step: RunStep) -> str:
    shown = ", ".join(cell.label for cell in step.cells[:8])
    more = f" and {len(step.cells) - 8} more" if len(step.cells) > 8 else ""
    return f"  {plural(len(step.cells), 'cell')}: {shown}{more}"


def _command(argv: tuple[str, ...], env: Mapping[str, str] | None = None) -> str:
    assigned = [f"{key}={shlex.quote(value)}" for key, value in (env or {}).items()]
    return "  " + " ".join([*assigned, *(word if _PLAIN.fullmatch(word) else shlex.quote(word) for word in argv)])


def describe_recorded(recorded: Recorded, host: str) -> str:
    """Return what a record has of an experiment on a host, as a line."""
    (passed, gates), (measured, cells) = recorded.gates, recorded.cells
    words = ["built" if recorded.built else "not built", f"{passed} of {plural(gates, 'gate')} passed"]
    words.append(f"{measured} of {plural(cells, 'cell')} measured")
    return f"on {host}: {', '.join(words)}"


def describe_outlook(outlook: Outlook, experiment: model.Experiment) -> str:
    """Return the predictions for a session as text: a row per comparison, then the planned and the needed length."""
    effect = percent(outlook.effect)
    lines = [f"experiment {experiment.name} on host {experiment.host}, to see an effect of {effect}"]
    if outlook.claims:
        rows = [
            {
                "cell": " ".join(filter(None, (claim.model, claim.label, metric(claim.metric).label))),
                "noise floor": percent(claim.floor),
                "detectable": percent(claim.mde),
                "cycles": str(claim.needed or _NEVER),
                "measured by": claim.session,
            }
            for claim in outlook.claims
        ]
        needed = f"{_NEVER} cycles, which no session has"
        if outlook.needed is not None:
            needed = _session(outlook.needed, outlook.seconds_needed)
        lines += ["", table(rows, right=("noise floor", "detectable", "cycles"))]
        lines += ["", length(outlook), f"needed for {effect}: {needed}"]
    if outlook.unknown:
        lines += ["", f"no noise floor: {', '.join(outlook.unknown)}"]
        lines.append(f"measured by: {as_typed(noise_command(experiment))}")
    return "\n".join(lines)


def length(outlook: Outlook) -> str:
    """Return a line with the planned cycles of a session, and how long they take if the record tells."""
    if outlook.cycles is None:
        fewest, most = cycle_range(outlook.family)
        return f"planned: {fewest} to {most} cycles, as the burn-in of each chain decides"
    decides = "" if outlook.fixed else "; the burn-in of each chain decides"
    return f"planned: {_session(outlook.cycles, outlook.seconds)}{decides}"


def _session(cycles: int, seconds: float | None) -> str:
    took = "how long is not known, as it never ran here" if seconds is None else f"about {duration(seconds)}"
    return f"{cycles} cycles, {took}"
