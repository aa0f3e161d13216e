"""Build logs of cmake, ninja and the compilers: how far a build is, and the first thing that went wrong."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import takewhile

from dgxlab.tools.rows import plain

PROGRESS = re.compile(r"\[([0-9]{1,7})/([0-9]{1,7})\] (.+)")

# gcc, clang, nvcc, ptxas, ninja; the linker; cmake. Diagnostics start in the first column: what is indented is source
# that they quote, and may say anything.
ERRORS = re.compile(
    r"(?!.*?(?:warning|note)(?: #[\w-]+)?\s*:.*error)"
    r"\S.*?[:);] ?(?:fatal |internal compiler |catastrophic )?error(?: #[\w-]+)?\s*:"
    r"|(?:nvcc|ptxas|nvlink|fatbinary|cicc|cudafe\+\+|ninja:) ?(?:error|fatal)\s*:"
    r"|.*undefined reference to |.*multiple definition of |\S*ld: cannot find "
    r"|CMake Error"
)
LD_FUNCTION = re.compile(r"\S*ld: .*: in function ")
FAILED = "FAILED: "
ENDS = (FAILED, "ninja: ")
"""How the line after the output of a step that failed begins, unless ninja counts on."""

CONTEXT = 5
"""Lines kept after an error."""
WIDTH = 300
"""Characters kept of a line: a template's name or a compiler's command can be thousands long."""


def progress(line: str) -> tuple[int, int, str] | None:
    """Read `[n/m] what` as (n, m, what); None for any other line."""
    match = PROGRESS.fullmatch(plain(line).strip())
    if not match or int(match[1]) > int(match[2]):
        return None
    return int(match[1]), int(match[2]), match[3]


def first_error(log_text: str) -> str:
    """Return the first error of a build log with the few lines that explain it, "" when there is none.

    An error that no known compiler, linker, cmake or ninja printed (a tool that is missing, or was killed) is the first
    FAILED step with the end of what it said.
    """
    lines = [line.rstrip() for line in plain(log_text).split("\n")]
    for number, line in enumerate(lines):
        if ERRORS.match(line) and not PROGRESS.match(line):
            after = lines[number + 1 :]
            if line.startswith("CMake"):  # its own words, or what a compiler said inside them when it tried one
                block = [each for each in takewhile(lambda each: not each or each[0].isspace(), after) if each]
                tried = [each.strip() for each in block if ERRORS.match(each.strip())]
                return _text([line, *(tried or block)[:CONTEXT]])
            before = [lines[number - 1]] if number and LD_FUNCTION.match(lines[number - 1]) else []
            return _text([*before, line, *takewhile(lambda each: each[:1].isspace(), after[:CONTEXT])])
    for number, line in enumerate(lines):
        if line.startswith(FAILED):
            step = takewhile(lambda each: not (PROGRESS.match(each) or each.startswith(ENDS)), lines[number + 1 :])
            return _text([line, *list(step)[-CONTEXT:]])
    return ""


def _text(lines: Sequence[str]) -> str:
    return "\n".join(line if len(line) <= WIDTH else line[: WIDTH - 3] + "..." for line in lines)
