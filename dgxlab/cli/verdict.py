"""dgxlab verdict: the A/B estimator on chains of numbers from anywhere."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dgxlab.cli._options import FailOnOption, Format, FormatOption, QuietOption
from dgxlab.cli._out import Out, plural
from dgxlab.errors import CheckFailed, UsageError, command

if TYPE_CHECKING:
    from dgxlab.stats import Chain, Verdict

KEYS: dict[str, tuple[type, ...]] = {
    "a": (list,),
    "b": (list,),
    "better": (str,),
    "name": (str,),
    "drift_limit": (int, float),
    "noise": (int, float),
    "noise_cycles": (int,),
    "cycles": (int,),
    "flaws": (dict,),
    "burn_in": (list,),
    "model": (str,),
}
"""What a line may say, and of which types; the first three are needed."""


def verdict(
    file: Annotated[Path, typer.Argument(help="JSON lines, one chain each; - is stdin.", show_default=False)],
    holm: Annotated[
        bool, typer.Option("--holm", help="The lines are the cells of one session: Holm over them.")
    ] = False,
    screen: Annotated[bool, typer.Option("--screen", help="One bracket a line, against its noise floor.")] = False,
    drift_limit: Annotated[
        float | None,
        typer.Option("--drift-limit", help="How far two baselines in a row may be apart without a step; else 0.05."),
    ] = None,
    noise: Annotated[
        float | None, typer.Option("--noise", help="The noise floor, a share as in 0.006; else a chain's own.")
    ] = None,
    fail_on: FailOnOption = None,
    format: FormatOption = Format.human,
    quiet: QuietOption = False,
) -> None:
    """Judge A/B chains: faster, slower, same, inconclusive, invalid.

    A line is {"a": [k + 1 baselines], "b": [k candidates], "better": "higher" or "lower"}, with "name", "drift_limit",
    "noise", "noise_cycles" (of the A/A sessions behind it), "cycles" (planned), "burn_in" (baselines before the first),
    "model" and "flaws" ({"3": "why cycle 3 does not count"}) where there are any. Every line is judged alone: many
    unrelated lines make false claims more likely, one of a hundred; --holm holds the lines together to that.

    Example: dgxlab verdict chains.jsonl --format json
    """
    if holm and screen:
        raise UsageError("--holm is about intervals, which a screen has not", next="dgxlab verdict FILE --screen")
    defaults = {key: value for key, value in (("drift_limit", drift_limit), ("noise", noise)) if value is not None}
    lines = [_line(number, text, defaults) for number, text in enumerate(_read(file), 1) if text.strip()]
    if not lines:
        raise UsageError(f"{file} holds no chain", next="dgxlab verdict --help")
    found = list(zip(lines, _judged(lines, holm=holm, screen=screen), strict=True))
    Out(format, quiet).lines((_row(*one) for one in found), lambda: "\n".join(_sentence(*one) for one in found))
    if failed := [word for word in fail_on or () for _, one in found if one.verdict == word]:
        raise CheckFailed(f"{plural(len(failed), 'chain')} of {len(found)} {'is' if len(failed) == 1 else 'are'} "
                          f"{' or '.join(dict.fromkeys(failed))}, on which to fail")  # fmt: skip


@dataclass(frozen=True)
class _Line:
    """One line of the file: what it says, or why it says nothing."""

    number: int
    said: Mapping[str, Any]
    broken: str | None = None

    @property
    def name(self) -> str:
        return _printable(self.said.get("name", f"line {self.number}"))

    @property
    def chain(self) -> Chain:
        from dgxlab.stats import Chain

        keys = ("a", "b", "better", "drift_limit", "cycles", "flaws")
        before = (self.said.get("burn_in") or [None])[-1]
        return Chain(**{key: self.said[key] for key in keys if key in self.said}, before=before)


def _read(file: Path) -> list[str]:
    """Return the file's lines; what is no UTF-8 in them is no JSON either."""
    try:
        data = sys.stdin.buffer.read() if str(file) == "-" else file.read_bytes()
    except OSError as error:
        raise UsageError(f"{file} cannot be read: {error.strerror}", next=command("ls", "-ld", file.parent)) from error
    return data.decode("utf-8-sig", errors="replace").split("\n")


def _line(number: int, text: str, defaults: Mapping[str, Any]) -> _Line:
    try:
        return _Line(number, {**defaults, **_said(text)})
    except (ValueError, RecursionError) as error:
        return _Line(number, {}, f"line {number}: {error}")


def _said(text: str) -> dict[str, Any]:
    """Return what a line says.

    Raises:
        ValueError: if it is no JSON, or its keys are not those of a chain.
    """
    import json

    try:
        said = json.loads(text)
    except ValueError as error:
        raise ValueError(f"no JSON: {error}") from None
    if not isinstance(said, dict):
        raise ValueError('no chain: a chain is {"a": [...], "b": [...], "better": ...}')
    if missing := [key for key in ("a", "b", "better") if key not in said]:
        raise ValueError(f"{missing[0]!r} is missing")
    for key, value in said.items():
        if key not in KEYS:
            raise ValueError(f"{key!r} is no key; there are {', '.join(KEYS)}")
        if not isinstance(value, KEYS[key]) or isinstance(value, bool):
            raise ValueError(f"{key!r} is {value!r:.40}")
    if strange := [cycle for cycle in said.get("flaws", {}) if not cycle.isdecimal() or len(cycle) > 9]:
        raise ValueError(f"there is no cycle {strange[0]!r:.40}")
    return {**said, "flaws": {int(cycle): _printable(why) for cycle, why in said.get("flaws", {}).items()}}


def _printable(text: object) -> str:
    """Return text without the halves of characters that JSON can spell and no terminal can show."""
    return str(text).encode(errors="replace").decode()


def _judged(lines: Sequence[_Line], *, holm: bool, screen: bool) -> Iterator[Verdict]:
    """Yield each line's verdict; those that say nothing are no cells."""
    from dgxlab import stats

    whole = [line for line in lines if line.broken is None]
    say: Iterator[Verdict]
    if screen:
        say = (stats.screen(line.chain, line.said.get("noise"), line.said.get("noise_cycles")) for line in whole)
    elif holm:
        say = iter(stats.judge_session(line.chain for line in whole))
    else:
        say = (stats.judge(line.chain) for line in whole)
    for line in lines:
        yield next(say) if line.broken is None else stats.invalid(0, line.broken)


def _row(line: _Line, found: Verdict) -> dict[str, Any]:
    """Return a verdict as JSON; effects are per cent of the baseline, noise floors shares as in the input."""
    from dgxlab.stats import promoted

    return {
        "line": line.number,
        "name": line.name,
        "verdict": found.verdict,
        "effect_pct": _percent(found.effect),
        "ci_pct": found.ci and [_percent(bound) for bound in found.ci],
        "same_ci_pct": found.same_ci and [_percent(bound) for bound in found.same_ci],
        "confidence": found.confidence,
        "mde_pct": _percent(found.mde),
        "valid_cycles": found.valid_cycles,
        "cycles": found.cycles,
        "p": found.p,
        "k_to_settle": found.k_to_settle,
        "noise_floor": found.noise,
        "promoted": promoted(found, line.said.get("noise")),
        "screen": found.screen,
        "flaws": found.flaws,
        "reasons": found.reasons,
    }


def _sentence(line: _Line, found: Verdict) -> str:
    word = f"screen: {found.verdict}" if found.screen else found.verdict
    parts = [f"{line.name}: {word}"]
    if found.effect is not None:
        parts.append(f"{100 * found.effect:+.2f} %")
    if found.ci is not None and found.mde is not None:
        parts[-1] += f" ({100 * found.confidence:.4g} %: {_range(found.ci)})"
        if found.verdict == "same" and found.same_ci:
            parts[-1] += f", interval of same {_range(found.same_ci)}"
        parts.append(f"{found.valid_cycles} of {plural(found.cycles, 'cycle')}, MDE {100 * found.mde:.2f} %")
    return f"{', '.join(parts)}; {'; '.join(found.reasons)}"


def _range(interval: tuple[float, float]) -> str:
    return " to ".join(f"{100 * bound:+.2f}" for bound in interval) + " %"


def _percent(share: float | None) -> float | None:
    return None if share is None else 100 * share
