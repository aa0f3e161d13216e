"""llama-completion: greedy text of a model, for the gate that compares it byte for byte."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping
from typing import Any

from dgxlab.model import AGAINST, ARM, CheckText, GreedyGate
from dgxlab.tools.tool import GATE_ON_MODEL, ON_DEVICE, WHERE, Checker, Key, Readings, Tool, engaged, in_both

N_BATCH = 2048
"""The program's own logical batch size, which n_ubatch may exceed."""

KEYS = {
    **GATE_ON_MODEL,
    "n_prompt": Key(
        "Annotated[int, Field(ge=1, le=65536)]", "Words of the prompt, each most often one token.", default=64
    ),
    "n_gen": Key("Annotated[int, Field(ge=2, le=65536)]", "Generated tokens.", default=32),
    "expect": Key("Md5", "The md5 that the text must have; it belongs to one model, build and machine.", default=""),
}

PROMPT = re.compile(r"prompt eval time = *[0-9.]+ ms / *([0-9]{1,9}) tokens")
GENERATED = re.compile(r"(?<!prompt )eval time = *[0-9.]+ ms / *([0-9]{1,9}) runs")


def step(gate: GreedyGate, env: Mapping[str, str], root: str) -> dict[str, Any]:
    """Return the commands and the prompt of a gate."""
    # room for words that are two tokens; it is part of the command, because the cache's size chooses kernels
    context = 2 * gate.n_prompt + gate.n_gen + 64
    argv = (
        *("{bin}/llama-completion", "-m", f"{{model:{gate.model}}}"),
        *("-f", "{text}", "-no-cnv", "--no-display-prompt", "--ignore-eos", "--temp", "0", "--seed", "0"),
        *("-n", str(gate.n_gen), "-c", str(context)),
        *("-b", str(max(N_BATCH, gate.n_ubatch)), "-ub", str(gate.n_ubatch), *ON_DEVICE),
    )
    return {"commands": in_both(gate, env, argv), "text": CheckText(gate.n_prompt, gate.seed)}


def flaws(gate: GreedyGate) -> Iterator[str]:
    """Yield why the gate could only pass."""
    if not gate.against and not gate.expect:
        yield "compares with nothing: give against, expect or both"


def read_greedy(gate: GreedyGate, role: str, stdout: bytes, stderr: str) -> dict[str, Any]:
    """Return the md5 and length of the text, and the tokens that were computed, None where that is not said.

    Of the generated tokens the last is not computed with: the program counts one less. `cut` says that a count is
    missing: it may have been lost on the way out, and another launch may show it.
    """
    prompt, generated = PROMPT.findall(stderr), GENERATED.findall(stderr)
    return {
        **({} if prompt and generated else {"cut": True}),
        "md5": hashlib.md5(stdout, usedforsecurity=False).hexdigest(),
        "bytes": len(stdout.strip()),
        "n_prompt": int(prompt[0]) if len(prompt) == 1 else None,
        "n_gen": int(generated[0]) + 1 if len(generated) == 1 else None,
    }


def judge(gate: GreedyGate, readings: Readings) -> Iterator[str]:
    """Yield why the gate did not pass."""
    yield from engaged(gate, readings)
    for role, reading in readings.items():
        if reading["bytes"] == 0:
            yield f"{WHERE[role]} printed no text"
        if reading["n_gen"] != gate.n_gen:
            count = "an unknown number" if reading["n_gen"] is None else reading["n_gen"]
            yield f"{WHERE[role]} generated {count} of {gate.n_gen} tokens"
        if not reading["n_prompt"]:
            yield f"{WHERE[role]} does not say how many tokens the prompt has"
    md5 = readings[ARM]["md5"]
    if gate.expect and md5 != gate.expect:
        yield f"expected md5 {gate.expect}, got {md5}"
    if gate.against and md5 != readings[AGAINST]["md5"]:
        yield f"the text is another one than in {WHERE[AGAINST]}: md5 {md5}, there {readings[AGAINST]['md5']}"


def shown(gate: GreedyGate, readings: Readings) -> Iterator[str]:
    """Yield each text's md5 once, with the tokens of the arm's."""
    arm, other = (readings.get(role, {}) for role in (ARM, AGAINST))
    sizes = f", {arm['n_prompt']} + {arm['n_gen']} tokens" if "md5" in arm else ""
    yield from (f"md5 {md5}{sizes}" for md5 in dict.fromkeys(filter(None, (arm.get("md5"), other.get("md5")))))


TOOL = Tool(
    "llama-completion",
    check=Checker(
        GreedyGate,
        "The most likely tokens are the same, byte for byte, in the arm's environment and in that of against.",
        KEYS,
        flaws,
        step,
        read_greedy,
        judge,
        shown,
    ),
)
