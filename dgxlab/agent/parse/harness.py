"""A kernel's own tests: a line each on stderr, `ok   WHAT` or `FAIL WHAT: WHY`, and in the end `passed` or `FAILED`."""

from __future__ import annotations

import re
from typing import Any

TEST = re.compile(r"(ok  |FAIL) (\S.*)")


def read_harness(stderr: str) -> dict[str, Any]:
    """Return how many tests passed, which failed and why, and the harness's last word on it."""
    lines = [line.rstrip() for line in stderr.split("\n")]
    tests = [match.groups() for line in lines if (match := TEST.fullmatch(line))]
    verdicts = [line for line in lines if line in ("passed", "FAILED")]
    return {
        "passed": sum(how == "ok  " for how, _ in tests),
        "failed": [what for how, what in tests if how == "FAIL"],
        "verdict": verdicts[0] if len(verdicts) == 1 else "",
    }
