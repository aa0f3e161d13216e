"""llama-perplexity: the final estimate, and the statistics of `--kl-divergence`, in a log of both its streams."""

from __future__ import annotations

import re

from dgxlab.imported.reading import Reading, Refused, Row, Values, number_or_text

FINAL = re.compile(r"Final estimate: PPL = ([0-9]+\.[0-9]{4}) \+/- ([0-9]+\.[0-9]{5})(?![\w.])")
PPL = r"(?:ln\()?PPL\((?:Q|base)\)(?:[-/]PPL\(base\))?\)?"
QUANTILE = r"(?:99\.9|99\.0|95\.0|90\.0|75\.0|25\.0|10\.0|5\.0|1\.0|0\.1)%"
NAME = rf"((?:Mean|Maximum|Median|Minimum|RMS|{QUANTILE}) +(?:{PPL}|KLD|Δp)|Cor\({PPL}, {PPL}\)|Same top p) *: +"
RATIO = re.compile(NAME + r"(-?[0-9]+\.[0-9]{6})(?: ± +(-?[0-9]+\.[0-9]{6}))?")
SHARE = re.compile(NAME + r"(-?[0-9]+\.[0-9]{2,3})(?: ± +([0-9]+\.[0-9]{3}) )?%")
BLOCK = re.compile(r"====== .* statistics ======")
OVER = re.compile(r"over ([0-9]+) chunks, n_ctx=([0-9]+), batch_size=([0-9]+), n_seq=([0-9]+)")
LAST = "Same top p"


def console(text: str) -> Reading:
    """Read the values; what llama-perplexity exits with says nothing, so only they count.

    Raises:
        Refused: if one is no number, is there twice, or the statistics are not whole.
    """
    values: dict[str, Values] = {}
    in_block = False
    for number, line in enumerate(text.split("\n"), 1):
        in_block |= bool(BLOCK.fullmatch(line.strip()))
        if "Final estimate" in line:
            if not (found := FINAL.search(line)):
                raise Refused("the final estimate cannot be read", number)
            _keep(values, "PPL", found[1], found[2], "", number)
        elif in_block and re.search(r"(?:PPL|KLD|Δp|top p).*:", line):
            share = bool(re.search(r"Δp|top p|^Cor", line))
            if not (found := (SHARE if share else RATIO).fullmatch(line.strip())):
                raise Refused("a statistic that cannot be read", number)
            _keep(values, re.sub(r" +", " ", found[1]), found[2], found[3], "%" if share else "", number)
    if in_block and LAST not in values:
        raise Refused(f"the statistics do not end with {LAST!r}: the file was cut short", text.count("\n") + 1)
    over = OVER.search(text)
    names = ("n_chunk", "n_ctx", "n_batch", "n_seq")
    params = dict(zip(names, map(number_or_text, over.groups()), strict=True)) if over else {}
    rows = (Row("perplexity", params, tuple(values.values())),) if values else ()
    return Reading(rows, {})


def _keep(values: dict[str, Values], name: str, printed: str, error: str | None, unit: str, number: int) -> None:
    if name in values:
        raise Refused(f"{name} is there twice: split the file", number)
    values[name] = Values(name, unit, (float(printed),))
    if error is not None:
        values[f"{name} error"] = Values(f"{name} error", unit, (float(error),))
