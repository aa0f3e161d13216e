"""What the client of a server prints, made from a constant step."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

ABOUT = {"model": "m.gguf", "slots": 4, "n_ctx": 256, "n_vocab": 32000, "ready_s": 0.1}
STEP_US = 2000


def stream(first_us: int, pp: int = 16, tg: int = 100, step_us: int = STEP_US, **changes: Any) -> dict[str, Any]:
    end = {"stop": "limit", "prompt": pp, "cached": 0, "ms": (tg - 1) * step_us / 1e3}
    whole = {"sent_us": 10, "status": 200, "end": end}
    return {**whole, "at_us": [first_us, *[step_us] * (tg - 1)], "tokens": [1] * tg, **changes}


def output(
    streams: Sequence[int], pp: int, tg: int, waves: int, step_us: int = STEP_US, about: dict[str, Any] = ABOUT
) -> str:
    """Return the lines for these numbers of streams; a stream begins a step after the one before."""
    lines: list[dict[str, Any]] = [{"server": about}]
    for pl in streams:
        wave = [stream(5000 + step_us * i, pp, tg, step_us) for i in range(pl)]
        lines.append({"pp": pp, "tg": tg, "pl": pl, "waves": [{"cpu": 0.05, "late_us": 90, "streams": wave}] * waves})
    return "\n".join(map(json.dumps, lines))
