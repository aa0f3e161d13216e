"""Registry of the programs that measure and check, with one module per program.

Other packages use this registry and name no program. The agent carries it: standard library only, Python 3.10.
A new tool is a module with a TOOL, listed in TOOLS below.

tool      classes that declare a tool, and code that several tools share
rows      strict parsing of the rows that a tool prints
reading   imported files: their encodings and formats, and the parsed rows
profile   kernel times under a tracer; profile_files has the rules for kernels' names
parity    the gate of test-backend-ops, with its own parser
load      the client of llama-server, which runs on the host; its requests are in wave
clients   results of other clients of servers
"""

from collections.abc import Callable, Iterator, Mapping

from dgxlab import model, units
from dgxlab.errors import SpecError
from dgxlab.model import Bench, Cell, Check, Experiment, GateStep, LaunchedGate, ParityGate
from dgxlab.model.reasons import Code, Reason, reason
from dgxlab.tools import (
    backend_ops,
    batched_bench,
    clients,
    completion,
    harness,
    llama_bench,
    llama_server,
    parity,
    perplexity,
    profile,
)
from dgxlab.tools.backend_ops import BackendOpsBench
from dgxlab.tools.batched_bench import BatchedBench
from dgxlab.tools.completion import GreedyGate
from dgxlab.tools.harness import HarnessGate
from dgxlab.tools.llama_bench import LlamaBench
from dgxlab.tools.llama_server import ServeBench
from dgxlab.tools.perplexity import PerplexityGate
from dgxlab.tools.profile import ProfileBench
from dgxlab.tools.tool import WHERE, Benchmark, Key, Launch, Tool, keys_of

TOOLS: Mapping[str, Tool] = {
    tool.program: tool
    for tool in (
        *(module.TOOL for module in (backend_ops, llama_bench, batched_bench, completion, perplexity)),
        *(module.TOOL for module in (harness, profile, llama_server)),
        *clients.TOOLS,
    )
}
"""All tools by program."""

BENCHES: Mapping[str, type[Benchmark]] = {tool.bench.name: tool.bench for tool in TOOLS.values() if tool.bench}
CHECKS: Mapping[str, type[Check]] = {tool.check.name: tool.check for tool in TOOLS.values() if tool.check}
"""The kinds of bench entries, and of gates that run commands, by their keys in specs."""

Bench.declared[:] = BENCHES.values()
Check.declared[:] = CHECKS.values()

EXPORTED: Mapping[str, type[Benchmark]] = {
    tool.program: tool.bench
    for tool in sorted(TOOLS.values(), key=lambda tool: tool is not llama_bench.TOOL)
    if tool.bench and tool.bench.compared
}
"""Tools whose rows `dgxlab export` writes, by program; the default of llama.cpp's compare script comes first."""

BY_FORM: Mapping[str, str] = {bench.form: name for name, bench in BENCHES.items()}
"""By a report's `--form`, the kind of bench entries whose results it shows."""


def metric_label(tool: str, metric: str) -> str:
    """Return the label of a metric of a tool that compares several; "" of another, whose cells need none."""
    return units.metric(metric).label if len(BENCHES[tool].compared) > 1 else ""


Wanted = Callable[[str, Mapping[str, str], Cell], bool]
"""Takes model name, environment and cell; returns whether the cell must be measured."""


def launches(experiment: Experiment, wanted: Wanted = lambda model, env, cell: True) -> Iterator[Launch]:
    """Yield the launches that measure an experiment's cells; cells that are not `wanted` are left out.

    Raises SpecError if `exclude` of an entry leaves no cell, or its sizes do not fit its settings.
    """
    for number, entry in enumerate(experiment.bench):
        env = {**experiment.env, **entry.env}
        some = False
        assert isinstance(entry, Benchmark)
        for launch in entry.launches(env, lambda model, cell, env=env: wanted(model, env, cell)):  # type: ignore[misc]
            some = True
            if launch.cells:
                yield launch
        if not some:
            raise SpecError(f"bench[{number}] measures nothing: exclude removes every cell", next="dgxlab plan")


def targets_of(experiment: Experiment) -> set[str]:
    """Return the cmake targets that an experiment's bench entries and gates run."""
    used = {type(part) for part in (*experiment.bench, *experiment.gates)}
    targets = {tool.runs or tool.program for tool in TOOLS.values() if tool.built and used & {tool.bench, tool.check}}
    targets |= {gate.program for gate in experiment.gates if isinstance(gate, HarnessGate) and gate.program}
    return targets | {parity.PROGRAM} if ParityGate in used else targets


# -- gates ------------------------------------------------------------------------------------------------------------


def gate_step(step: str, arm: str, gate: LaunchedGate, experiment: Experiment) -> GateStep:
    """Return the `GateStep` with id `step` for a gate on `arm`; raises SpecError if code to compile is missing."""
    if isinstance(gate, ParityGate):
        command = model.CheckCommand(model.ARM, parity.command(gate), {**experiment.env, **gate.env})
        return GateStep(step, arm, gate, (command,), limit_s=gate.limit_s)
    asked = gate.step(experiment.env, experiment.root)
    if isinstance(gate, HarnessGate):
        asked["files"] = {path: experiment.kernels.get(path, text) for path, text in asked["files"].items()}
    return GateStep(step, arm, gate, limit_s=gate.limit_s, **asked)


def judge_check(gate: Check, readings: model.Readings) -> tuple[Reason, ...]:
    """Return why a gate did not pass, given the readings of its commands by role; () if it passed."""
    readings = {role: readings[role] for role in gate.roles() if role in readings}
    problems = {WHERE[role]: reading["problem"] for role, reading in readings.items() if "problem" in reading}
    if problems:  # the commands after one that failed were not run
        return tuple(reason(Code.COMMAND, where=where, problem=problem) for where, problem in problems.items())
    if missing := [WHERE[role] for role in gate.roles() if role not in readings]:
        return (reason(Code.NOT_RUN, where=missing[0]),)
    return tuple(gate.judge(readings))
