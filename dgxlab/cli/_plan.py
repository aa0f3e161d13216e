"""A plan for people: every command, in order, as one could type it."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator

from dgxlab.model import BuildStep, GateStep, ModelStep, Plan, ProbeStep, RunStep, Step
from dgxlab.units import duration

PLAIN = re.compile(r"[\w@%+=:,./{}-]+", re.ASCII)
"""Words that a shell takes as they are, placeholders among them."""


def describe(plan: Plan) -> str:
    """Return the plan as text; what only the host knows stays a {placeholder}."""
    lines = [f"experiment {plan.name}"]
    for arm in plan.arms:
        series = ", ".join(f"{ref.name}@{ref.digest[:12]}" for ref in arm.source.series) or "none"
        lines.append(f"arm {arm.name}: pin {arm.source.pin[:12]}, series {series}, tree {arm.source.tree[:12]}")
    for step in plan.steps:
        lines += ["", *_step(step)]
    cells = sum(len(step.cells) for step in plan.steps if isinstance(step, RunStep))
    return "\n".join([*lines, "", f"{len(plan.steps)} steps, {cells} cells"])


def _step(step: Step) -> Iterator[str]:
    yield f"[{step.id}] at most {duration(step.limit_s)}"
    if isinstance(step, BuildStep):
        yield "  check out the tree, then"
        yield _command(step.configure)
        yield _command(step.compile)
    elif isinstance(step, ModelStep):
        yield f"  {step.path}"
        yield from (_command(argv) for argv in (step.make, step.quantize) if argv)
    elif isinstance(step, ProbeStep):
        yield f"{_command(step.argv)}    # must know {' '.join(step.flags)}"
    elif isinstance(step, GateStep):
        yield _command(step.argv, dict(step.env))
        yield f"  must pass {step.gate.expect or 'every case; the count is recorded'}"
    else:
        yield _command(step.argv, dict(step.env))
        shown = ", ".join(cell.label for cell in step.cells[:8])
        more = f" and {len(step.cells) - 8} more" if len(step.cells) > 8 else ""
        yield f"  {len(step.cells)} cells: {shown}{more}"


def _command(argv: tuple[str, ...], env: dict[str, str] | None = None) -> str:
    assigned = [f"{key}={shlex.quote(value)}" for key, value in (env or {}).items()]
    return "  " + " ".join([*assigned, *(_word(word) for word in argv)])


def _word(word: str) -> str:
    """Quote a word for a shell, leaving placeholders readable."""
    return word if PLAIN.fullmatch(word) else shlex.quote(word)
