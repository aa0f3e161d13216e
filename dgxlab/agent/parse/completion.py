"""llama-completion: the text that it generated, and how many tokens it says that it computed."""

from __future__ import annotations

import hashlib
import re
from typing import Any

PROMPT = re.compile(r"prompt eval time = *[0-9.]+ ms / *([0-9]{1,9}) tokens")
GENERATED = re.compile(r"(?<!prompt )eval time = *[0-9.]+ ms / *([0-9]{1,9}) runs")


def read_greedy(stdout: bytes, stderr: str) -> dict[str, Any]:
    """Return the md5 and length of the text, and the tokens that were computed, None where that is not said.

    Of the generated tokens the last is not computed with: the program counts one less. What is not said may have been
    lost on the way out: `cut` says so, and another launch may show it.
    """
    prompt, generated = PROMPT.findall(stderr), GENERATED.findall(stderr)
    return {
        **({} if prompt and generated else {"cut": True}),
        "md5": hashlib.md5(stdout, usedforsecurity=False).hexdigest(),
        "bytes": len(stdout.strip()),
        "n_prompt": int(prompt[0]) if len(prompt) == 1 else None,
        "n_gen": int(generated[0]) + 1 if len(generated) == 1 else None,
    }
