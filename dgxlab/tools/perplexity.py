"""llama-perplexity: a gate that compares a model's logits with a reference's, and the import of its logs.

The program exits 0 when it computed nothing, when the reference's file ends early, and when a batch could not be
decoded. So a value counts only if all chunks before it were printed.
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any

from dgxlab.model import (
    AGAINST,
    ARM,
    REFERENCE,
    SHORT,
    SHORT_REFERENCE,
    CheckCommand,
    CheckText,
    Readings,
    environments,
)
from dgxlab.model.reasons import Code, Reason, reason
from dgxlab.tools.reading import Format, Reading, Row, Values, number_or_text
from dgxlab.tools.rows import Refused
from dgxlab.tools.tool import ON_DEVICE, WHERE, ModelGate, Tool, key

_FEWEST_TOKENS = 100  # with fewer tokens the program prints no statistics and exits 0
_ON_PROCESSOR = ("--device", "none", "-fit", "off")  # a GPU's F32 products are TF32, which is no reference
_LAST_DIGIT = 1e-6  # last printed digit of a KLD
_NUMBER = r"(\S+)"
_BASE_CHUNK = re.compile(r"\[([0-9]+)\]([^,\s]*),")
_FINAL = re.compile(rf"Final estimate: PPL = {_NUMBER} \+/- {_NUMBER}")
_CHUNK = re.compile(rf" *([0-9]+) +{_NUMBER} ± +{_NUMBER} +{_NUMBER} ± +{_NUMBER} +{_NUMBER} ± +{_NUMBER} .*%")
_MEAN_KLD = re.compile(rf"Mean +KLD: +{_NUMBER} ± +{_NUMBER}")
_MEAN_RATIO = re.compile(rf"Mean PPL\(Q\)/PPL\(base\) +: +{_NUMBER} ± +{_NUMBER}")
_SAME_TOP = re.compile(r"Same top p: +(\S+) ± +\S+ %")


@dataclass(frozen=True)
class PerplexityGate(ModelGate):
    """The model's logits are as close as the limits demand to those of a reference.

    Another model is run on the processor: what would be exact. The model itself is run where the arm is, in the
    environment of `against`: what a change does, without what tells a GPU from a processor.
    """

    name = "perplexity"

    reference: str = key(
        "Name", "A name under models: what the model would compute exactly, as derived in F32, or the model itself."
    )
    n_ctx: int = key(
        "Annotated[int, Field(ge=16, le=1048576)]", "Context of a chunk, in tokens; its second half counts.", 512
    )
    chunks: int = key("Annotated[int, Field(ge=1, le=10000)]", "Chunks of text.", 4)
    kld_ratio_at_most: float | None = key("Ratio", "Limit of the arm's mean KLD divided by that of against.", None)
    kld_at_most: float | None = key("Ratio", "Limit of the arm's mean KLD.", None)
    ppl_ratio_at_most: float | None = key(
        "Annotated[float, Field(ge=1, le=1e6)]",
        "Limit of the arm's perplexity divided by the reference's, and of its inverse; 1.01 is within 1 %.",
        None,
    )
    n_ctx_short: int | None = key(
        "Annotated[int, Field(ge=16, le=1048576)]",
        "Shorter context that kld_growth_at_most compares with; kld_at_most holds for it too.",
        None,
        later=True,
    )
    kld_growth_at_most: float | None = key(
        "Ratio",
        "Limit of the arm's mean KLD divided by that at n_ctx_short; errors of stored states add up.",
        None,
        later=True,
    )
    _: KW_ONLY
    limit_s: float = 3600.0

    def subject(self) -> str:
        """Return the model and its reference."""
        return f"{self.model} against {self.reference}"

    def limits(self) -> tuple[str, ...]:
        """Return what must hold for the gate to pass, in words."""
        asked = {
            "KLD at most {} times the other environment's": self.kld_ratio_at_most,
            "KLD at most {}": self.kld_at_most,
            "perplexity at most {} times the reference's, and its inverse": self.ppl_ratio_at_most,
            f"KLD at most {{}} times that at n_ctx {self.n_ctx_short}": self.kld_growth_at_most,
        }
        limits = (words.format(f"{limit:g}") for words, limit in asked.items() if limit is not None)
        return (*limits, *super().limits())

    def flaws(self) -> Iterator[str]:
        """Yield why the gate would always pass, or always fail."""
        if self.kld_ratio_at_most is not None and not self.against:
            yield "kld_ratio_at_most needs against, the environment that the arm is held against"
        if (self.kld_ratio_at_most, self.kld_at_most, self.ppl_ratio_at_most) == (None, None, None):
            yield "has no limit: give kld_ratio_at_most, kld_at_most or ppl_ratio_at_most"
        if self.reference == self.model and not self.against:
            yield "is its own reference: give against, the environment that the reference is run in"
        if (self.n_ctx_short is None) != (self.kld_growth_at_most is None):
            yield "n_ctx_short and kld_growth_at_most need each other"
        elif self.n_ctx_short and not self.n_ubatch < self.n_ctx_short < self.n_ctx:
            yield "kld_growth_at_most is vacuous unless n_ubatch < n_ctx_short < n_ctx: one ubatch reads no state"
        for n_ctx, chunks in self._sizes().values():
            if (counted := (n_ctx - 1 - n_ctx // 2) * chunks) < _FEWEST_TOKENS:
                yield f"counts {counted} tokens and llama-perplexity wants {_FEWEST_TOKENS}: raise chunks or n_ctx"

    def roles(self) -> tuple[str, ...]:
        """Return the roles of the gate's commands, in order: a reference writes the logits that the next ones read."""
        return (REFERENCE, *super().roles(), *((SHORT_REFERENCE, SHORT) if self.n_ctx_short else ()))

    def _sizes(self) -> dict[str, tuple[int, int]]:
        """Return context and chunks by the role of the reference; of as many tokens."""
        short = self.n_ctx_short
        return {
            REFERENCE: (self.n_ctx, self.chunks),
            **({SHORT_REFERENCE: (short, self.chunks * self.n_ctx // short)} if short else {}),
        }

    def step(self, env: Mapping[str, str], root: str) -> dict[str, Any]:
        """Return the commands and the text: each reference first, which writes the logits."""
        _, other = environments(self, env)
        commands: list[CheckCommand] = []
        where = ON_DEVICE if self.reference == self.model else _ON_PROCESSOR
        for role, (n_ctx, chunks) in self._sizes().items():
            # whole chunks in a batch, which the program demands
            batch = max(1, self.n_ubatch // n_ctx) * n_ctx
            sizes = ("-c", str(n_ctx), "-b", str(batch), "-ub", str(self.n_ubatch))
            logits = ("--kl-divergence-base", "{logits}")
            text = ("-f", "{text}", "--chunks", str(chunks))
            program = "{bin}/llama-perplexity"
            reference = (program, "-m", f"{{model:{self.reference}}}", *text, *logits, *sizes, *where)
            compared = (program, "-m", f"{{model:{self.model}}}", "--kl-divergence", *logits, *sizes, *ON_DEVICE)
            arms = self.in_both(env, compared)
            commands.append(CheckCommand(role, reference, other, self.reference))
            commands += arms if role == REFERENCE else [replace(arms[0], role=SHORT)]
        return {
            "commands": tuple(commands),
            # no word is less than a token, and the program wants text for two chunks even where it computes one
            "text": CheckText(max(2, self.chunks) * self.n_ctx, self.seed),
        }

    def read(self, role: str, stdout: bytes, stderr: str) -> dict[str, Any]:
        """Return the reference's perplexity, or another role's mean KLD, PPL ratio and same top tokens in percent."""
        text = stdout.decode(errors="replace")
        if role in (REFERENCE, SHORT_REFERENCE):
            chunks = _BASE_CHUNK.findall(text)
            values = {"ppl": _FINAL.findall(stderr)}
        else:
            lines = [match.groups() for line in text.split("\n") if (match := _CHUNK.fullmatch(line))]
            chunks = [(line[0], line[5]) for line in lines]
            shares = [(share,) for share in _SAME_TOP.findall(text)]
            values = {"kld": _MEAN_KLD.findall(text), "ppl_ratio": _MEAN_RATIO.findall(text), "same_top_p": shares}
        of = SHORT_REFERENCE if role in (SHORT_REFERENCE, SHORT) else REFERENCE
        return _chunks_problem(chunks, self._sizes()[of][1]) or _values(values)

    def judge(self, readings: Readings) -> Iterator[Reason]:
        """Yield why the gate did not pass."""
        yield from super().judge(readings)
        arm = readings[ARM]
        for role, limit in ((AGAINST, self.kld_ratio_at_most), (SHORT, self.kld_growth_at_most)):
            if limit is None:
                continue
            # as printed; rounding errors count against the arm
            kld, other = arm["kld"], readings[role]["kld"]
            if not other > _LAST_DIGIT:
                yield reason(Code.KLD_TOO_SMALL, where=WHERE[role], kld=other)
            elif not (kld + _LAST_DIGIT / 2) / (other - _LAST_DIGIT / 2) <= limit:
                yield reason(Code.KLD_RATIO, where=WHERE[role], kld=kld, other=other, limit=limit)
        klds = [readings[role]["kld"] for role in (ARM, SHORT) if role in readings]
        if (limit := self.kld_at_most) is not None and (wrong := [kld for kld in klds if not kld <= limit]):
            yield reason(Code.KLD, kld=wrong[0], limit=limit)
        limit, ratio = self.ppl_ratio_at_most, arm["ppl_ratio"]
        if limit is not None and not (ratio > 0 and max(ratio, 1 / ratio) <= limit):
            yield reason(Code.PPL_RATIO, ratio=ratio, limit=limit)

    def shown(self, readings: Readings) -> Iterator[str]:
        """Yield the arm's KLD, with that of the AGAINST command, and the ratio of perplexities."""
        arm, other = (readings.get(role, {}) for role in (ARM, AGAINST))
        if "kld" in arm:
            against = f", there {other['kld']:.6f}" if "kld" in other else ""
            times = f", {arm['kld'] / other['kld']:.3g} times" if other.get("kld") else ""
            yield f"KLD {arm['kld']:.6f}{against}{times}"
            if "kld" in (short := readings.get(SHORT, {})):
                yield f"KLD at n_ctx {self.n_ctx_short} {short['kld']:.6f}"
            if self.n_ubatch >= self.n_ctx:
                yield "of recurrent states it shows nothing: each context is one ubatch, which reads none stored"
            yield f"perplexity {arm['ppl_ratio']:.6f} times the reference's"


def _chunks_problem(chunks: Sequence[tuple[str, str]], wanted: int) -> dict[str, Any]:
    """Return why chunks, each a number and a value, are not those that were asked for; {} if they are."""
    cut = {"cut": True} if len(chunks) < wanted else {}
    if not chunks:
        return {"problem": f"it computed none of {wanted} chunks", **cut}
    if [int(number) for number, _ in chunks] != list(range(1, wanted + 1)):
        twice = ", not each once" * (len(chunks) == wanted)
        return {"problem": f"it computed {len(chunks)} of {wanted} chunks{twice}", **cut}
    wrong = (f"chunk {number} has no finite number: {value}" for number, value in chunks if _number(value) is None)
    return next(({"problem": problem} for problem in wrong), {})


def _values(printed: Mapping[str, Sequence[Sequence[str]]]) -> dict[str, Any]:
    """Return values that were printed once, and their errors, as finite numbers; else under `problem` what is wrong."""
    values: dict[str, Any] = {}
    for name, matches in printed.items():
        if len(matches) != 1:
            cut = {} if matches else {"cut": True}
            return {"problem": f"{name} was printed {len(matches)} times, not once", **cut}
        for each, text in zip((name, f"{name}_error"), matches[0], strict=False):
            if each != name and text.endswith("nan"):
                continue  # the root of a variance that rounding made negative: the logits are the reference's
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


# -- imported logs of both streams ------------------------------------------------------------------------------------

_ESTIMATE = re.compile(r"Final estimate: PPL = ([0-9]+\.[0-9]{4}) \+/- ([0-9]+\.[0-9]{5})(?![\w.])")
PPL = r"(?:ln\()?PPL\((?:Q|base)\)(?:[-/]PPL\(base\))?\)?"
_QUANTILE = r"(?:99\.9|99\.0|95\.0|90\.0|75\.0|25\.0|10\.0|5\.0|1\.0|0\.1)%"
_NAME = rf"((?:Mean|Maximum|Median|Minimum|RMS|{_QUANTILE}) +(?:{PPL}|KLD|Δp)|Cor\({PPL}, {PPL}\)|Same top p) *: +"
_RATIO = re.compile(_NAME + r"(-?[0-9]+\.[0-9]{6})(?: ± +(-?[0-9]+\.[0-9]{6}))?")
_SHARE = re.compile(_NAME + r"(-?[0-9]+\.[0-9]{2,3})(?: ± +([0-9]+\.[0-9]{3}) )?%")
_BLOCK = re.compile(r"====== .* statistics ======")
_OVER = re.compile(r"over ([0-9]+) chunks, n_ctx=([0-9]+), batch_size=([0-9]+), n_seq=([0-9]+)")
_LAST = "Same top p"


def console(text: str) -> Reading:
    """Parse the final estimate and the statistics of `--kl-divergence` in a log; raises Refused if it is broken."""
    values: dict[str, Values] = {}
    in_block = False
    for number, line in enumerate(text.split("\n"), 1):
        in_block |= bool(_BLOCK.fullmatch(line.strip()))
        if "Final estimate" in line:
            if not (match := _ESTIMATE.search(line)):
                raise Refused("the final estimate cannot be read", number)
            _keep(values, ("PPL", *match.groups()), "", number)
        elif in_block and re.search(r"(?:PPL|KLD|Δp|top p).*:", line):
            share = bool(re.search(r"Δp|top p|^Cor", line))
            if not (match := (_SHARE if share else _RATIO).fullmatch(line.strip())):
                raise Refused("a statistic that cannot be read", number)
            _keep(values, match.groups(), "%" if share else "", number)
    if in_block and _LAST not in values:
        raise Refused(f"the statistics do not end with {_LAST!r}: the file was cut short", text.count("\n") + 1)
    over = _OVER.search(text)
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
    check=PerplexityGate,
    formats={"console": Format(console, "PPL", r"Final estimate: PPL|^====== KL divergence statistics")},
)
