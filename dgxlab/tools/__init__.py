"""The programs that measure and check, each with all that is known of it in one module, and the registry of them.

A module declares its flags, the cells it measures, its launches, the parsing of its output and of imported files of it,
what is exported of it, the metrics of its verdicts, and its gate. Everything else asks here and names no program. The
agent carries this package: standard library only, Python 3.10.

A new tool is a module with a TOOL, listed in TOOLS below, and the record of its entries or gate in dgxlab.model.

tool      what a tool declares, and what several have in common
rows      strict reading of the rows that a tool prints
reading   imported files: their encodings, and what is read of them
parity    the gate of test-backend-ops, which has a reading of its own
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from dgxlab.errors import SpecError
from dgxlab.model import AGAINST, ARM, REFERENCE, Bench, Cell, Check, CheckStep, Experiment, ParityGate
from dgxlab.tools import backend_ops, batched_bench, completion, harness, llama_bench, parity, perplexity
from dgxlab.tools.tool import WHERE, Benchmark, Checker, Key, Launch, Readings, Tool

TOOLS: Mapping[str, Tool] = {
    tool.program: tool
    for tool in (
        backend_ops.TOOL,
        llama_bench.TOOL,
        batched_bench.TOOL,
        completion.TOOL,
        perplexity.TOOL,
        harness.TOOL,
    )
}
"""By program."""

BENCHES: Mapping[str, Benchmark] = {tool.bench.name: tool.bench for tool in TOOLS.values() if tool.bench}
"""By their names in specs and in the record."""

CHECKS: Mapping[type, Checker] = {tool.check.gate: tool.check for tool in TOOLS.values() if tool.check}
"""By the record of the gate."""

Wanted = Callable[[str, Mapping[str, str], Cell], bool]
"""(model name, environment, cell) -> whether it must be measured."""


# -- benchmarks -------------------------------------------------------------------------------------------------------


def bench_of(entry: Bench) -> Benchmark:
    """Return what measures a bench entry."""
    return next(bench for bench in BENCHES.values() if type(entry) is bench.entry)


def launches(experiment: Experiment, wanted: Wanted = lambda model, env, cell: True) -> Iterator[Launch]:
    """Expand every bench entry into launches, with the unwanted cells left out of them.

    Raises:
        SpecError: if an entry has no cell, or its sizes do not fit its own settings.
    """
    for number, entry in enumerate(experiment.bench):
        env = {**experiment.env, **entry.env}
        some, expand = False, bench_of(entry).launches
        for launch in expand(entry, env, lambda model, cell, env=env: wanted(model, env, cell)):  # type: ignore[misc]
            some = True
            if launch.cells:
                yield launch
        if not some:
            raise SpecError(f"bench[{number}] measures nothing: exclude removes every cell", next="dgxlab plan")


# -- gates ------------------------------------------------------------------------------------------------------------


def targets_of(experiment: Experiment) -> set[str]:
    """Return the programs to build for an experiment's entries and gates."""
    used = {type(part) for part in (*experiment.bench, *experiment.gates)}
    targets = {parity.PROGRAM} if ParityGate in used else set()
    for tool in TOOLS.values():
        if tool.built and used & {tool.bench and tool.bench.entry, tool.check and tool.check.gate}:
            targets.add(tool.program)
    return targets


def check_step(step: str, arm: str, gate: Check, experiment: Experiment) -> CheckStep:
    """Return the step of an experiment's gate.

    Raises:
        SpecError: if the kernel that it tests is not there.
    """
    fields = CHECKS[type(gate)].step(gate, experiment.env, experiment.root)
    return CheckStep(step, arm, gate, limit_s=gate.limit_s, **fields)


def files_of(gate: Check, root: str) -> dict[str, str]:
    """Return the texts that a gate of a project compiles, by path; raises SpecError as `check_step` does."""
    return dict(CHECKS[type(gate)].step(gate, {}, root).get("files", {}))


def sources(gate: Check, files: Mapping[str, str]) -> dict[str, str]:
    """Return what a gate compiles, by the name under which it is recorded, given the texts of its files."""
    return CHECKS[type(gate)].sources(gate, files)


def models_of(gate: Check) -> tuple[str, ...]:
    """Return the names of the models that a gate reads."""
    return tuple(filter(None, (gate.model, getattr(gate, "reference", ""))))


def roles(gate: Check) -> tuple[str, ...]:
    """Return the roles of a gate's commands, in the order in which they run."""
    return (*((REFERENCE,) if hasattr(gate, "reference") else ()), ARM, *((AGAINST,) if gate.against else ()))


def read_check(gate: Check, role: str, stdout: bytes, stderr: str) -> dict[str, Any]:
    """Return what a command of a gate printed, or under `problem` why that is nothing."""
    return CHECKS[type(gate)].read(gate, role, stdout, stderr)


def judge_check(gate: Check, readings: Readings) -> tuple[str, ...]:
    """Return why a gate did not pass, one sentence a reason; () when it did."""
    readings = {role: readings[role] for role in roles(gate) if role in readings}
    problems = [f"{WHERE[role]}: {reading['problem']}" for role, reading in readings.items() if "problem" in reading]
    if problems:  # the commands after one that failed were not run
        return tuple(problems)
    if missing := [WHERE[role] for role in roles(gate) if role not in readings]:
        return (f"{missing[0]} was not run",)
    return tuple(CHECKS[type(gate)].judge(gate, readings))


def shown(gate: Check, readings: Readings) -> tuple[str, ...]:
    """Return what a gate found, in words."""
    return tuple(CHECKS[type(gate)].shown(gate, readings))
