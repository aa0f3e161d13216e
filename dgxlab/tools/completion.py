"""llama-completion: greedy text of a model, for the gate that compares it byte for byte."""

import hashlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from dgxlab.model import AGAINST, ARM, CheckText, Readings
from dgxlab.model.reasons import Code, Reason, reason
from dgxlab.tools.tool import ON_DEVICE, WHERE, ModelGate, Tool, key

_N_BATCH = 2048  # the program's own logical batch size, which n_ubatch may exceed
_PROMPT = re.compile(r"prompt eval time = *[0-9.]+ ms / *([0-9]{1,9}) tokens")
_GENERATED = re.compile(r"(?<!prompt )eval time = *[0-9.]+ ms / *([0-9]{1,9}) runs")


@dataclass(frozen=True)
class GreedyGate(ModelGate):
    """The model generates the same text, byte for byte, in the arm's environment and with the variables of against."""

    name = "greedy"

    n_prompt: int = key("Annotated[int, Field(ge=1, le=65536)]", "Words of the prompt, each most often one token.", 64)
    n_gen: int = key("Annotated[int, Field(ge=2, le=65536)]", "Generated tokens.", 32)
    expect: str = key("Md5", "The md5 that the text must have; it belongs to one model, build and machine.", "")

    def limits(self) -> tuple[str, ...]:
        """Return what must hold for the gate to pass, in words."""
        same = ("the same text in both environments",) if self.against else ()
        return (*same, *((f"md5 {self.expect}",) if self.expect else ()), *super().limits())

    def flaws(self) -> Iterator[str]:
        """Yield why the gate would always pass."""
        if not self.against and not self.expect:
            yield "compares with nothing: give against, expect or both"

    def step(self, env: Mapping[str, str], root: str) -> dict[str, Any]:
        """Return the commands and the text of the prompt."""
        # room for words that are two tokens; it is part of the command, because the cache's size chooses kernels
        context = 2 * self.n_prompt + self.n_gen + 64
        argv = (
            *("{bin}/llama-completion", "-m", f"{{model:{self.model}}}"),
            *("-f", "{text}", "-no-cnv", "--no-display-prompt", "--ignore-eos", "--temp", "0", "--seed", "0"),
            *("-n", str(self.n_gen), "-c", str(context)),
            *("-b", str(max(_N_BATCH, self.n_ubatch)), "-ub", str(self.n_ubatch), *ON_DEVICE),
        )
        return {"commands": self.in_both(env, argv), "text": CheckText(self.n_prompt, self.seed)}

    def read(self, role: str, stdout: bytes, stderr: str) -> dict[str, Any]:
        """Return md5 and length (bytes) of the text, and the tokens of prompt and text; `cut` if a count is missing."""
        prompt, generated = _PROMPT.findall(stderr), _GENERATED.findall(stderr)
        return {
            **({} if prompt and generated else {"cut": True}),
            "md5": hashlib.md5(stdout, usedforsecurity=False).hexdigest(),
            "bytes": len(stdout.strip()),
            "n_prompt": int(prompt[0]) if len(prompt) == 1 else None,
            # the last token is not evaluated: the program counts one less
            "n_gen": int(generated[0]) + 1 if len(generated) == 1 else None,
        }

    def judge(self, readings: Readings) -> Iterator[Reason]:
        """Yield why the gate did not pass."""
        yield from super().judge(readings)
        for role, reading in readings.items():
            if reading["bytes"] == 0:
                yield reason(Code.NO_TEXT, where=WHERE[role])
            if reading["n_gen"] != self.n_gen:
                yield reason(Code.GENERATED, where=WHERE[role], count=reading["n_gen"], wanted=self.n_gen)
            if not reading["n_prompt"]:
                yield reason(Code.NO_PROMPT, where=WHERE[role])
        md5 = readings[ARM]["md5"]
        if self.expect and md5 != self.expect:
            yield reason(Code.MD5, wanted=self.expect, md5=md5)
        if self.against and md5 != readings[AGAINST]["md5"]:
            yield reason(Code.OTHER_TEXT, where=WHERE[AGAINST], md5=md5, other=readings[AGAINST]["md5"])

    def shown(self, readings: Readings) -> Iterator[str]:
        """Yield each different md5, with the numbers of tokens of the arm."""
        arm, other = (readings.get(role, {}) for role in (ARM, AGAINST))
        sizes = f", {arm['n_prompt']} + {arm['n_gen']} tokens" if "md5" in arm else ""
        yield from (f"md5 {md5}{sizes}" for md5 in dict.fromkeys(filter(None, (arm.get("md5"), other.get("md5")))))


TOOL = Tool("llama-completion", check=GreedyGate)
