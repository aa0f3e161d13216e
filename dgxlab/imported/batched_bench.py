"""llama-batched-bench: speed with many sequences at once, from the console or as JSON lines."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from dgxlab.agent.parse.parsed import RowError, agree, speed
from dgxlab.imported.reading import Reading, Refused, Row, number_or_text, shared, value, whole_at
from dgxlab.imported.tables import Line, json_lines, markdown

SHOWN = {
    "PP": "pp",
    "TG": "tg",
    "B": "pl",
    "N_KV": "n_kv",
    "T_PP s": "t_pp",
    "S_PP t/s": "speed_pp",
    "T_TG s": "t_tg",
    "S_TG t/s": "speed_tg",
    "T s": "t",
    "S t/s": "speed",
}
"""What the columns of its console stand for."""

TIMES = {"t_pp": "s", "speed_pp": "t/s", "t_tg": "s", "speed_tg": "t/s", "t": "s", "speed": "t/s"}
SIZES = ("pp", "tg", "pl", "n_kv")
SETTING = re.compile(r"(\w+) = (-?\w+)(?:, |$)")
SETTINGS = re.compile(r"^llama_batched_bench: (n_kv_max = .+)$", re.MULTILINE)

DECIMALS = {"s": 3, "t/s": 2}
"""Digits that the console shows of a value, by its unit."""

COLD = "the first row was measured cold: llama-batched-bench warms up with 16 tokens only"


def console(text: str) -> Reading:
    """Read the table: times to a millisecond, speeds to a hundredth of a token.

    Raises:
        Refused: if a row is broken, contradicts itself, or holds a value that is no number above 0.
    """
    said = [dict(SETTING.findall(each)) for each in SETTINGS.findall(text)]
    if len({tuple(each.items()) for each in said}) > 1:
        raise Refused(f"it holds {len(said)} runs with different settings: split it")
    settings = {name: number_or_text(setting) for name, setting in (said[0] if said else {}).items()}
    rows = []
    for line in markdown(text, "S t/s"):
        columns = {SHOWN.get(name, name): cell for name, cell in line.columns.items()}
        if set(columns) != set(SHOWN.values()):
            raise Refused("a header that llama-batched-bench does not print", line.number)
        if not all(re.fullmatch(r"[0-9]+", columns[name]) for name in SIZES):
            raise Refused("its sizes are not whole numbers", line.number)
        for name, unit in TIMES.items():
            if not re.fullmatch(rf"[0-9]+\.[0-9]{{{DECIMALS[unit]}}}", columns[name]):
                raise Refused(f"{name} is {columns[name]}, not as llama-batched-bench prints it", line.number)
        rows.append(Line(line.number, {**columns, **{name: int(columns[name]) for name in SIZES}}))
    return _reading(rows, settings, rounded=True)


def lines(text: str) -> Reading:
    """Read `--output-format jsonl`: times to a microsecond.

    Raises:
        Refused: if a row is broken, contradicts itself, or holds a value that is no number above 0.
    """
    return _reading(list(json_lines(text)), {}, rounded=False)


def _reading(found: Sequence[Line], settings: Mapping[str, Any], *, rounded: bool) -> Reading:
    if not found:
        return Reading((), {})
    names = [name for name in found[0].columns if name not in (*SIZES, *TIMES)]
    same = {**settings, **shared([line.columns for line in found], names)}
    rows = tuple(_row(line, same, rounded) for line in found)
    return Reading(rows, {"settings": same} if same else {}, (COLD,))


def _row(line: Line, same: Mapping[str, Any], rounded: bool) -> Row:
    columns, number = line.columns, line.number
    sizes = {name: whole_at(name, columns.get(name), number) for name in SIZES}
    values = tuple(value(name, unit, columns.get(name), number, above=0) for name, unit in TIMES.items())
    own = {name: columns[name] for name in columns if name not in (*SIZES, *TIMES, *same)}
    is_shared = {**same, **own}.get("is_pp_shared", 0) not in (0, False)
    printed = {each.metric: each.values[0] for each in values}
    for time, name, tokens in _tokens(sizes, is_shared):
        (_check_rounded if rounded else _check)(name, tokens, printed[time], printed[name], number)
    label = f"pp{sizes['pp']} tg{sizes['tg']} B{sizes['pl']}" + "".join(f" {k}={v}" for k, v in own.items())
    return Row(label, {**sizes, **own}, values)


def _tokens(sizes: Mapping[str, int], is_shared: bool) -> Iterator[tuple[str, str, int]]:
    prompt, generated = sizes["pp"] * (1 if is_shared else sizes["pl"]), sizes["tg"] * sizes["pl"]
    yield "t_pp", "speed_pp", prompt
    yield "t_tg", "speed_tg", generated
    yield "t", "speed", prompt + generated


def _check(name: str, tokens: int, time: float, printed: float, number: int) -> None:
    """Refuse a speed that its tokens and time do not give: the row is not what it seems.

    Raises:
        Refused: if so.
    """
    try:
        agree(name, speed(tokens, time), printed)
    except RowError as error:
        raise Refused(str(error), number) from error


def _check_rounded(name: str, tokens: int, time: float, printed: float, number: int) -> None:
    """Do the same where the time has but three decimals, the speed two.

    Raises:
        Refused: if no time and speed that are rounded so give one another.
    """
    longest, shortest = time + 0.0005, time - 0.0005
    fastest = tokens / shortest if shortest > 0 else float("inf")
    if not tokens / longest - 0.0051 <= printed <= fastest + 0.0051:
        raise Refused(f"{name} is {printed:g}, but {tokens} tokens took {time:g} s", number)
