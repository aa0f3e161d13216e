"""llama-perplexity: which chunks it computed, and what it says of them in the end.

The program exits 0 when it computed nothing, when the reference's file ends early, and when a batch could not be
decoded. So a value counts only where every chunk before it is there. What is missing may have been lost on the way out:
`cut` beside `problem` says so, and another launch may show it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

NUMBER = r"(\S+)"
BASE_CHUNK = re.compile(r"\[([0-9]+)\]([^,\s]*),")
FINAL = re.compile(rf"Final estimate: PPL = {NUMBER} \+/- {NUMBER}")
CHUNK = re.compile(rf" *([0-9]+) +{NUMBER} ± +{NUMBER} +{NUMBER} ± +{NUMBER} +{NUMBER} ± +{NUMBER} .*%")
MEAN_KLD = re.compile(rf"Mean +KLD: +{NUMBER} ± +{NUMBER}")
MEAN_RATIO = re.compile(rf"Mean PPL\(Q\)/PPL\(base\) +: +{NUMBER} ± +{NUMBER}")
LAST = re.compile(r"Same top p: +(\S+) ± +\S+ %")


def read_reference(stdout: str, stderr: str, chunks: int) -> dict[str, Any]:
    """Return the reference's perplexity, or under `problem` why it has none that counts."""
    said = BASE_CHUNK.findall(stdout)
    if problem := _chunks([int(number) for number, _ in said], [ppl for _, ppl in said], chunks):
        return problem
    return _values({"ppl": FINAL.findall(stderr), "ppl_error": [pair[::-1] for pair in FINAL.findall(stderr)]})


def read_divergence(stdout: str, chunks: int) -> dict[str, Any]:
    """Return mean KLD and perplexity ratio with their errors, or under `problem` why they do not count."""
    lines = [match.groups() for line in stdout.split("\n") if (match := CHUNK.fullmatch(line))]
    if problem := _chunks([int(line[0]) for line in lines], [line[5] for line in lines], chunks):
        return problem
    kld, ratio, last = MEAN_KLD.findall(stdout), MEAN_RATIO.findall(stdout), LAST.findall(stdout)
    return _values(
        {
            "kld": kld,
            "kld_error": [pair[::-1] for pair in kld],
            "ppl_ratio": ratio,
            "ppl_ratio_error": [pair[::-1] for pair in ratio],
            "same_top_p": [(share, "") for share in last],
        }
    )


def _chunks(numbers: Sequence[int], values: Sequence[str], wanted: int) -> dict[str, Any]:
    """Return why the chunks are not those that were asked for, each with a number; {} if they are."""
    cut = {"cut": True} if len(numbers) < wanted else {}
    if not numbers:
        return {"problem": f"it computed none of {wanted} chunks", **cut}
    if list(numbers) != list(range(1, wanted + 1)):
        twice = ", not each once" * (len(numbers) == wanted)
        return {"problem": f"it computed {len(numbers)} of {wanted} chunks{twice}", **cut}
    wrong = [number for number, value in zip(numbers, values, strict=True) if _number(value) is None]
    return {"problem": f"chunk {wrong[0]} has no finite number: {values[wrong[0] - 1]}"} if wrong else {}


def _values(found: dict[str, list[tuple[str, str]]]) -> dict[str, Any]:
    """Return each value that was printed once, as a finite number; else under `problem` the first that was not."""
    values: dict[str, Any] = {}
    for name, printed in found.items():
        if len(printed) != 1:
            return {
                "problem": f"{name} was printed {len(printed)} times, not once",
                **({} if printed else {"cut": True}),
            }
        values[name] = _number(printed[0][0])
        if values[name] is None:
            return {"problem": f"{name} is no finite number: {printed[0][0]}"}
    return values


def _number(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None
