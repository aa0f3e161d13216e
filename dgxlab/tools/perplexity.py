"""llama-perplexity: a model's logits beside a reference's, as a gate, and its statistics in imported logs.

The program exits 0 when it computed nothing, when the reference's file ends early, and when a batch could not be
decoded. So a value counts only where every chunk before it is there. `cut` beside `problem` says that something is
missing: it may have been lost on the way out, and another launch may show it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from dgxlab.model import AGAINST, ARM, REFERENCE, CheckCommand, CheckText, PerplexityGate, environments
from dgxlab.tools.reading import Format, Reading, Row, Values, number_or_text
from dgxlab.tools.rows import Refused
from dgxlab.tools.tool import GATE_ON_MODEL, ON_DEVICE, WHERE, Checker, Key, Readings, Tool, engaged, in_both

FEWEST_TOKENS = 100
"""Fewer than so many are no statistics for the program, which then prints none and exits 0."""

ON_PROCESSOR = ("--device", "none", "-fit", "off")
"""A GPU's F32 products are TF32, which is no reference."""

LAST_DIGIT = 1e-6
"""Of a KLD as the program prints it."""

KEYS = {
    **GATE_ON_MODEL,
    "reference": Key("Name", "A name under models: what the model would compute exactly, as derived in F32."),
    "n_ctx": Key(
        "Annotated[int, Field(ge=16, le=1048576)]",
        "Context of a chunk, in tokens; its second half counts.",
        default=512,
    ),
    "chunks": Key("Annotated[int, Field(ge=1, le=10000)]", "Chunks of text.", default=4),
    "kld_ratio_at_most": Key("Ratio", "Limit of the arm's mean KLD divided by that of against.", default=""),
    "kld_at_most": Key("Ratio", "Limit of the arm's mean KLD.", default=""),
    "ppl_ratio_at_most": Key(
        "Annotated[float, Field(ge=1, le=1e6)]",
        "Limit of the arm's perplexity divided by the reference's, and of its inverse; 1.01 is within 1 %.",
        default="",
    ),
}

# -- a gate's commands and what they print ----------------------------------------------------------------------------

NUMBER = r"(\S+)"
BASE_CHUNK = re.compile(r"\[([0-9]+)\]([^,\s]*),")
FINAL = re.compile(rf"Final estimate: PPL = {NUMBER} \+/- {NUMBER}")
CHUNK = re.compile(rf" *([0-9]+) +{NUMBER} ± +{NUMBER} +{NUMBER} ± +{NUMBER} +{NUMBER} ± +{NUMBER} .*%")
MEAN_KLD = re.compile(rf"Mean +KLD: +{NUMBER} ± +{NUMBER}")
MEAN_RATIO = re.compile(rf"Mean PPL\(Q\)/PPL\(base\) +: +{NUMBER} ± +{NUMBER}")
SAME_TOP = re.compile(r"Same top p: +(\S+) ± +\S+ %")


def step(gate: PerplexityGate, env: Mapping[str, str], root: str) -> dict[str, Any]:
    """Return the commands and the text of a gate: the reference first, which writes the logits."""
    # whole chunks in a batch, which the program demands
    batch = max(1, gate.n_ubatch // gate.n_ctx) * gate.n_ctx
    sizes = ("-c", str(gate.n_ctx), "-b", str(batch), "-ub", str(gate.n_ubatch))
    logits = ("--kl-divergence-base", "{logits}")
    text = ("-f", "{text}", "--chunks", str(gate.chunks))
    reference = (*_program(gate.reference), *text, *logits, *sizes, *ON_PROCESSOR)
    compared = (*_program(gate.model), "--kl-divergence", *logits, *sizes, *ON_DEVICE)
    _, other = environments(gate, env)
    return {
        "commands": (CheckCommand(REFERENCE, reference, other, gate.reference), *in_both(gate, env, compared)),
        # no word is less than a token, and the program wants text for two chunks even where it computes one
        "text": CheckText(max(2, gate.chunks) * gate.n_ctx, gate.seed),
    }


def _program(model: str) -> tuple[str, ...]:
    return ("{bin}/llama-perplexity", "-m", f"{{model:{model}}}")


def flaws(gate: PerplexityGate) -> Iterator[str]:
    """Yield why the gate could only pass, or never."""
    if gate.kld_ratio_at_most is not None and not gate.against:
        yield "kld_ratio_at_most needs against, the environment that the arm is held against"
    if gate.against and gate.kld_ratio_at_most is None:
        yield "against is of no use without kld_ratio_at_most"
    if (gate.kld_ratio_at_most, gate.kld_at_most, gate.ppl_ratio_at_most) == (None, None, None):
        yield "has no limit: give kld_ratio_at_most, kld_at_most or ppl_ratio_at_most"
    if (counted := (gate.n_ctx - 1 - gate.n_ctx // 2) * gate.chunks) < FEWEST_TOKENS:
        yield f"counts {counted} tokens and llama-perplexity wants {FEWEST_TOKENS}: raise chunks or n_ctx"


def read(gate: PerplexityGate, role: str, stdout: bytes, stderr: str) -> dict[str, Any]:
    """Return what a command printed, or under `problem` why that does not count."""
    text = stdout.decode(errors="replace")
    if role == REFERENCE:
        chunks = BASE_CHUNK.findall(text)
        values = {"ppl": FINAL.findall(stderr)}
    else:
        lines = [match.groups() for line in text.split("\n") if (match := CHUNK.fullmatch(line))]
        chunks = [(line[0], line[5]) for line in lines]
        shares = [(share,) for share in SAME_TOP.findall(text)]
        values = {"kld": MEAN_KLD.findall(text), "ppl_ratio": MEAN_RATIO.findall(text), "same_top_p": shares}
    numbers, printed = [int(number) for number, _ in chunks], [value for _, value in chunks]
    return _chunks(numbers, printed, gate.chunks) or _values(values)


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


def _values(printed: Mapping[str, Sequence[Sequence[str]]]) -> dict[str, Any]:
    """Return values that were printed once, and their errors, as finite numbers; else under `problem` what is wrong."""
    values: dict[str, Any] = {}
    for name, matches in printed.items():
        if len(matches) != 1:
            cut = {} if matches else {"cut": True}
            return {"problem": f"{name} was printed {len(matches)} times, not once", **cut}
        for each, text in zip((name, f"{name}_error"), matches[0], strict=False):
            values[each] = _number(text)
            if values[each] is None:
                return {"problem": f"{each} is no finite number: {text}"}
    return values


def _number(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def judge(gate: PerplexityGate, readings: Readings) -> Iterator[str]:
    """Yield why the gate did not pass."""
    yield from engaged(gate, readings)
    arm, where = readings[ARM], WHERE[AGAINST]
    if (limit := gate.kld_ratio_at_most) is not None:
        # as printed, with what rounding may hide counted against the arm
        kld, other = arm["kld"], readings[AGAINST]["kld"]
        if not other > LAST_DIGIT:
            yield f"the KLD in {where} prints as {other:.6f}: too small to compare with, a wider model has more"
        elif not (kld + LAST_DIGIT / 2) / (other - LAST_DIGIT / 2) <= limit:
            both = f"{kld:.6f} and {other:.6f}"
            yield f"the KLD is {kld / other:.3g} times that in {where} ({both}), at most {limit:g} is allowed"
    if gate.kld_at_most is not None and not arm["kld"] <= gate.kld_at_most:
        yield f"the KLD is {arm['kld']:.6f}, at most {gate.kld_at_most:g} is allowed"
    limit, ratio = gate.ppl_ratio_at_most, arm["ppl_ratio"]
    if limit is not None and not (ratio > 0 and max(ratio, 1 / ratio) <= limit):
        yield f"the perplexity is {ratio:.6f} times the reference's, at most {limit:g} and its inverse are allowed"


def shown(gate: PerplexityGate, readings: Readings) -> Iterator[str]:
    """Yield the KLD, beside the other environment's, and the ratio of perplexities."""
    arm, other = (readings.get(role, {}) for role in (ARM, AGAINST))
    if "kld" in arm:
        against = f", there {other['kld']:.6f}" if "kld" in other else ""
        times = f", {arm['kld'] / other['kld']:.3g} times" if other.get("kld") else ""
        yield f"KLD {arm['kld']:.6f}{against}{times}"
        yield f"perplexity {arm['ppl_ratio']:.6f} times the reference's"


# -- imported logs of both streams ------------------------------------------------------------------------------------

ESTIMATE = re.compile(r"Final estimate: PPL = ([0-9]+\.[0-9]{4}) \+/- ([0-9]+\.[0-9]{5})(?![\w.])")
PPL = r"(?:ln\()?PPL\((?:Q|base)\)(?:[-/]PPL\(base\))?\)?"
QUANTILE = r"(?:99\.9|99\.0|95\.0|90\.0|75\.0|25\.0|10\.0|5\.0|1\.0|0\.1)%"
NAME = rf"((?:Mean|Maximum|Median|Minimum|RMS|{QUANTILE}) +(?:{PPL}|KLD|Δp)|Cor\({PPL}, {PPL}\)|Same top p) *: +"
RATIO = re.compile(NAME + r"(-?[0-9]+\.[0-9]{6})(?: ± +(-?[0-9]+\.[0-9]{6}))?")
SHARE = re.compile(NAME + r"(-?[0-9]+\.[0-9]{2,3})(?: ± +([0-9]+\.[0-9]{3}) )?%")
BLOCK = re.compile(r"====== .* statistics ======")
OVER = re.compile(r"over ([0-9]+) chunks, n_ctx=([0-9]+), batch_size=([0-9]+), n_seq=([0-9]+)")
LAST = "Same top p"


def console(text: str) -> Reading:
    """Read the final estimate, and the statistics of `--kl-divergence`.

    Raises:
        Refused: if one is no number, is there twice, or the statistics are not whole.
    """
    values: dict[str, Values] = {}
    in_block = False
    for number, line in enumerate(text.split("\n"), 1):
        in_block |= bool(BLOCK.fullmatch(line.strip()))
        if "Final estimate" in line:
            if not (match := ESTIMATE.search(line)):
                raise Refused("the final estimate cannot be read", number)
            _keep(values, ("PPL", *match.groups()), "", number)
        elif in_block and re.search(r"(?:PPL|KLD|Δp|top p).*:", line):
            share = bool(re.search(r"Δp|top p|^Cor", line))
            if not (match := (SHARE if share else RATIO).fullmatch(line.strip())):
                raise Refused("a statistic that cannot be read", number)
            _keep(values, match.groups(), "%" if share else "", number)
    if in_block and LAST not in values:
        raise Refused(f"the statistics do not end with {LAST!r}: the file was cut short", text.count("\n") + 1)
    over = OVER.search(text)
    names = ("n_chunk", "n_ctx", "n_batch", "n_seq")
    params = dict(zip(names, map(number_or_text, over.groups()), strict=True)) if over else {}
    return Reading((Row("perplexity", params, tuple(values.values())),) if values else (), {})


def _keep(values: dict[str, Values], printed: Sequence[str | None], unit: str, number: int) -> None:
    name, value, error = re.sub(r" +", " ", str(printed[0])), str(printed[1]), printed[2]
    if name in values:
        raise Refused(f"{name} is there twice: split the file", number)
    values[name] = Values(name, unit, (float(value),))
    if error is not None:
        values[f"{name} error"] = Values(f"{name} error", unit, (float(error),))


TOOL = Tool(
    "llama-perplexity",
    check=Checker(
        PerplexityGate,
        "The logits are near those of a reference on the processor, and nearer than in the environment of against.",
        KEYS,
        flaws,
        step,
        read,
        judge,
        shown,
    ),
    formats={"console": Format(console, "PPL", r"Final estimate: PPL|^====== KL divergence statistics")},
)
