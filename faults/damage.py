"""Damages the output of tools, and finds the values that a damaged text may give without the parsers under test."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from random import Random
from typing import Any

from dgxlab.model import Cell
from dgxlab.tools import backend_ops
from dgxlab.tools.rows import Parsed, equal, plain

Parse = Callable[[str, Sequence[Cell]], Parsed]

NUMBER = re.compile(r"-?[0-9]+(?:\.[0-9]+)?")
KEY = re.compile(r'"\w+": (?:\[[^\]]*\]|"[^"]*"|[^,}\]\n]+)(?:, ?)?')
TOKEN = re.compile(r"[0-9A-Za-z_.+\-]+")
WHOLE_NUMBER = re.compile(r"[+-]?[0-9]+(?:\.[0-9]*)?(?:[eE][+-]?[0-9]+)?")
STATEMENT = "INSERT INTO test_backend_ops ("

NOISE = (
    *("\x1b[1;31m", "nan", "-nan", "NaN", "inf", "-", "-1", "0", "'", '"', "{", "}", "');", "\r", "\x00", "\ufffd"),
    *("e9", "1e999", "0x10", "1,5", "\u0661\u0662", "null", "true", "[]", " ", "9" * 400),
)
"""Texts that replace numbers or are inserted anywhere."""

NOISE_LINES = (
    "ggml_backend_cuda_graph_compute: CUDA graph warmup complete",
    "#0  0x00007f64512dec17 in __GI___wait4 (pid=15209)",
    "llama_perf_context_print: 42 tokens, 3.14 ms, 1234.5 t/s",
    "\x1b[1;33mwarning\x1b[0m: clock 1980 MHz ",
    *("{", "{}", "[]", "", "\r"),
    STATEMENT,
    "  0/0 tests passed",
    "Backend 1/1: CPU",
    "  Backend CUDA0: \x1b[1;32mOK\x1b[0m",
    "\x1b[1;32mOK\x1b[0m",
)


def damage_lines(lines: list[str], random: Random) -> list[str]:
    """Return lines with one random change: a line deleted, doubled, swapped, cut, spliced or inserted."""
    at, other = random.randrange(len(lines)), random.randrange(len(lines))
    cut = random.randrange(len(lines[at]) + 1)
    return random.choice(
        [
            lines[:at] + lines[at + 1 :],
            [*lines[:at], lines[at], *lines[at:]],
            [*lines[:at], lines[other], *lines[at + 1 :]],
            [*lines[:at], lines[at][:cut], *lines[at + 1 :]],
            [*lines[:at], lines[at][:cut] + lines[other][cut:], *lines[at + 1 :]],
            [*lines[:at], lines[at][:cut] + lines[other], *lines[at + 1 :]],
            [*lines[:at], random.choice(NOISE_LINES), *lines[at:]],
            [*lines[:at], lines[at][:cut] + random.choice(NOISE_LINES) + lines[at][cut:], *lines[at + 1 :]],
            [*lines[:at], lines[at][:cut], random.choice(NOISE_LINES), lines[at][cut:], *lines[at + 1 :]],
            [*lines[:at], lines[at][:cut]],
        ]
    ) or [""]


def damage_text(text: str, random: Random) -> str:
    """Return a text with one random change: noise anywhere or in a number, characters cut out, or a key removed."""
    at = random.randrange(len(text) + 1)
    noise = random.choice(NOISE)
    places = [match.span() for match in (KEY if random.random() < 0.15 else NUMBER).finditer(text)]
    if places and random.random() < 0.6:
        start, end = random.choice(places)
        if text[start] == '"':
            return text[:start] + text[end:]
        start, end = random.choice([(start, end), (start, start), (start + 1, end)])
        return text[:start] + noise + text[end:]
    return text[:at] + random.choice([noise + text[at:], text[at + random.randrange(1, 40) :]])


def damaged(text: str, random: Random) -> str:
    """Return a log with one to four random changes."""
    for _ in range(random.randrange(1, 5)):
        whole = random.random() < 0.4
        text = "\n".join(damage_lines(text.split("\n"), random)) if whole else damage_text(text, random)
    return text


# -- what the agent's parsers may give -------------------------------------------------------------------------------


def misread(parse: Parse, text: str, cells: Sequence[Cell]) -> str:
    """Return how a parser misread a text; "" if each cell has the values of its own row, or a problem is reported."""
    parsed = parse(text, cells)
    wanted, seen = {cell.key: cell for cell in cells}, [result.cell for result in parsed.results]
    if len(set(seen)) != len(seen) or not set(seen) <= set(wanted):
        return f"the results are of {seen}"
    if len(seen) != len(cells) and not parsed.problems:
        return "a cell has neither a result nor a problem"
    rows = rows_of(parse, text)
    for result in parsed.results:
        cell = wanted[result.cell]
        may_be = {value for params, values in rows if _is_of(cell, params) for value in values}
        read = [value for each in result.measurements for value in (*each.samples, *each.discarded)]
        if not read or not all(0 < value < float("inf") and value in may_be for value in read):
            return f"{cell.label} has {read}, its rows say {sorted(may_be)[:8]}"
    return ""


def rows_of(parse: Parse, text: str) -> list[tuple[Mapping[str, Any], set[float]]]:
    """Return the parameters and the possible values of everything in a text that looks like a row."""
    if parse is backend_ops.parse:
        statements = [piece.partition("\n")[0] for piece in text.split(STATEMENT)]
        return [(_names(statement), _quoted(statement)) for statement in statements]
    rows: list[tuple[Mapping[str, Any], set[float]]] = []
    for line in text.split("\n"):
        try:
            row = json.loads(line)
            rows += [(row, _speeds(row))] if isinstance(row, dict) else []
        except (ValueError, KeyError, TypeError, ZeroDivisionError, OverflowError, RecursionError):
            continue
    return rows


def _is_of(cell: Cell, params: Mapping[str, Any]) -> bool:
    """Tell whether a row may be the cell's: whatever of the cell it names, it names so."""
    return all(equal(wanted, params[name]) for name, wanted in cell.params.items() if name in params)


def _names(piece: str) -> dict[str, str]:
    """Return the parameters that a case's own column names, where it has one such column."""
    columns = re.findall(r"'((?:\w+=(?:\[[^\]]*\]|[^,']*),?)+)'", piece)
    return dict(re.findall(r"(\w+)=(\[[^\]]*\]|[^,']*)", columns[0])) if len(columns) == 1 else {}


def _quoted(piece: str) -> set[float]:
    return {float(value) for value in piece.split("'") if WHOLE_NUMBER.fullmatch(value)}


def _speeds(row: dict[str, Any]) -> set[float]:
    """Return the speeds that a row's own tokens and times give."""
    if "samples_ns" in row:
        return {(float(row["n_prompt"]) + float(row["n_gen"])) / (float(ns) / 1e9) for ns in row["samples_ns"]}
    pl = float(row["pl"])
    pp, tg = float(row["pp"]) * (1 if row.get("is_pp_shared", 0) in (1, True, "1") else pl), float(row["tg"]) * pl
    return {pp / float(row["t_pp"]), tg / float(row["t_tg"]), (pp + tg) / float(row["t"])}


# -- what may be imported --------------------------------------------------------------------------------------------


def numbers_in(text: str) -> set[float]:
    """Return the numbers in a text that are no part of a word or of another number."""
    return {float(word) for word in TOKEN.findall(text) if WHOLE_NUMBER.fullmatch(word)}


def chunks_of(text: str) -> list[str]:
    """Return every piece of a text that may be a row: a line, or the lines after one that has only a brace."""
    shown = plain(text)
    return [*shown.split("\n"), *re.split(r"^\s*\{\s*$", shown, flags=re.MULTILINE)]


def contains(values: Iterable[float], chunk: str) -> bool:
    """Return whether a piece of text has all of a row's values, as they are or in k, M, G or T."""
    there = numbers_in(chunk)
    scaled = there | {number * scale for number in there for scale in (1e3, 1e6, 1e9, 1e12)}
    return all(any(abs(value - number) <= 1e-9 * abs(value) for number in scaled) for value in values)
