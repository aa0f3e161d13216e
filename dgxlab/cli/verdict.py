"""dgxlab verdict: the A/B estimator on chains of numbers from anywhere."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from typer import Argument, Option

from dgxlab.cli._app import FailOnOption
from dgxlab.cli._out import Out, plural
from dgxlab.errors import CheckFailed, UsageError, access, command
from dgxlab.units import change, interval

if TYPE_CHECKING:
    from dgxlab.stats import Chain, Verdict


def verdict(
    file: Path = Argument(help="JSON lines, one chain each; - is stdin."),
    holm: bool = Option(False, "--holm", help="The lines are the cells of one session: Holm over them."),
    screen: bool = Option(False, "--screen", help="One bracket a line, against its noise."),
    drift_limit: float | None = Option(
        None, help="How far two baselines in a row may be apart without a step; else 0.05."
    ),
    noise: float | None = Option(
        None, help="With --screen the noise, a share as in 0.006; else the noise floor, in place of a chain's own."
    ),
    fail_on: FailOnOption = None,
    *,
    out: Out,
) -> None:
    """Judge chains: faster, slower, same, inconclusive, invalid.

    A line is {"a": [k + 1 baselines], "b": [k candidates], "better": "higher" or "lower"}, with "name", "drift_limit",
    "noise", "noise_cycles" (of the A/A session behind it), "cycles" (planned), "burn_in" (baselines before the first),
    "model" and "flaws" ({"3": "why cycle 3 does not count"}) as optional keys. Each line is judged alone, with a 1 %
    rate of false claims per line; --holm limits the rate to 1 % over all lines.

    Example: dgxlab verdict chains.jsonl --format json
    """
    from dgxlab import stats

    if holm and screen:
        mend = command("dgxlab", "verdict", file, "--screen")
        raise UsageError("--holm corrects intervals, and a screen has none", next=mend)
    defaults = {key: value for key, value in (("drift_limit", drift_limit), ("noise", noise)) if value is not None}
    lines: dict[int, Line] = {}
    results: dict[int, Verdict] = {}
    for number, text in enumerate(_read(file), 1):
        if text.strip():
            try:
                lines[number] = _line(text, {**defaults, "name": f"line {number}"})
            except (ValueError, RecursionError) as error:
                lines[number] = Line([], [], "", f"line {number}")
                results[number] = stats.invalid(0, f"line {number}: {error}")
    whole = [number for number in lines if number not in results]  # malformed lines do not count for Holm
    if not whole:
        why = next((f": {result.reasons[0]}" for result in results.values()), "")
        raise UsageError(f"{file} holds no chain{why}", next="dgxlab verdict --help")
    results |= zip(whole, _judged([lines[number] for number in whole], holm=holm, screen=screen), strict=True)
    judged = [(line, results[number]) for number, line in lines.items()]
    rows = ({"line": number, **_row(line, results[number])} for number, line in lines.items())
    out.lines(rows, lambda: "\n".join(_sentence(*each) for each in judged), outcomes=True)
    if failed := [word for word in fail_on or () for result in results.values() if result.verdict == word]:
        are = f"{'is' if len(failed) == 1 else 'are'} {' or '.join(dict.fromkeys(failed))}"
        raise CheckFailed(f"{plural(len(failed), 'chain')} of {len(judged)} {are}, on which to fail")


@dataclass(frozen=True)
class Line:
    """One line of the input: a chain."""

    a: list[Any]
    b: list[Any]
    better: str
    name: str = ""
    model: str = ""
    flaws: dict[str, str] = field(default_factory=dict)
    drift_limit: float | None = None
    noise: float | None = None
    noise_cycles: int | None = None
    cycles: int | None = None
    burn_in: list[Any] = field(default_factory=list)

    @property
    def chain(self) -> Chain:
        """The chain for `stats`."""
        from dgxlab.stats import DRIFT_LIMIT, Chain

        limit = DRIFT_LIMIT if self.drift_limit is None else self.drift_limit
        flaws = {int(cycle): why for cycle, why in self.flaws.items()}
        return Chain(self.a, self.b, self.better, limit, self.cycles, flaws, before=(self.burn_in or [None])[-1])


def _read(file: Path) -> list[str]:
    with access(file, "read", UsageError):
        data = sys.stdin.buffer.read() if str(file) == "-" else file.read_bytes()
    return data.decode("utf-8-sig", errors="replace").split("\n")  # a line that is not UTF-8 is not JSON either


def _line(text: str, defaults: Mapping[str, Any]) -> Line:
    """Read a line; raises ValueError if it is not JSON or not a chain."""
    from dgxlab.model import from_json

    try:
        keys = json.loads(text)
    except ValueError as error:
        raise ValueError(f"no JSON: {error}") from None
    if not isinstance(keys, dict):
        raise ValueError('no chain: a chain is {"a": [...], "b": [...], "better": ...}')
    line = from_json(Line, {**defaults, **keys})
    if strange := [cycle for cycle in line.flaws if not cycle.isdecimal() or len(cycle) > 9]:
        raise ValueError(f"there is no cycle {strange[0]!r:.40}")
    return line


def _judged(lines: list[Line], *, holm: bool, screen: bool) -> list[Verdict]:
    from dgxlab import stats

    if screen:
        return [stats.screen(line.chain, line.noise, line.noise_cycles) for line in lines]
    if holm:
        return list(stats.judge_session(line.chain for line in lines))
    return [stats.judge(line.chain) for line in lines]


def _row(line: Line, result: Verdict) -> dict[str, Any]:
    """Return a verdict as JSON; effects are per cent of the baseline, noise floors shares as in the input."""
    from dgxlab.stats import promoted

    def percent(share: float | None) -> float | None:
        return None if share is None else 100 * share

    own = {"name": line.name, "verdict": result.verdict}
    in_percent = {
        "effect_pct": percent(result.effect),
        "ci_pct": result.ci and [percent(bound) for bound in result.ci],
        "same_ci_pct": result.same_ci and [percent(bound) for bound in result.same_ci],
        "mde_pct": percent(result.mde),
    }
    decided = {"noise_floor": result.noise, "promoted": promoted(result, line.noise)}
    names = ("confidence", "valid_cycles", "cycles", "p", "k_to_settle", "screen", "flaws", "reasons")
    return {**own, **in_percent, **decided, **{name: getattr(result, name) for name in names}}


def _sentence(line: Line, result: Verdict) -> str:
    parts = [f"{line.name}: {result.verdict}{' (screen)' * result.screen}"]
    if result.effect is not None:
        parts.append(f"{change(result.effect)} %")
    if result.ci is not None and result.mde is not None:
        parts[-1] += f" ({100 * result.confidence:.4g} %: {interval(result.ci)} %)"
        if result.verdict == "same" and result.same_ci:
            parts[-1] += f", equivalence interval {interval(result.same_ci)} %"
        parts.append(f"{result.valid_cycles} of {plural(result.cycles, 'cycle')}")
        parts.append(f"smallest detectable effect {100 * result.mde:.2f} %")
    return f"{', '.join(parts)}; {'; '.join(result.reasons)}"
