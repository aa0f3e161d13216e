"""`python -m bench.words`: finds words to avoid in the project's texts.

The list is `tool.dgxlab.words` in pyproject.toml: a regular expression, and what to write instead.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

PROJECT = Path(__file__).resolve().parent.parent
READ = (".py", ".md", ".j2", ".yaml")
"""Kernels are left out: their text is part of the digest of the series that copies them."""

QUOTES = ("tests/golden/", "tests/kernels/test_w4a16_gemm.py")
"""Files that quote other texts."""


def main() -> None:
    """Print each use of a word to avoid; exit with 1 if there is any."""
    hits = list(places(PROJECT, rules(PROJECT)))
    print("\n".join(hits) or "plain English")
    sys.exit(bool(hits))


def rules(project: Path) -> dict[str, str]:
    """Return the words to avoid, as regexes, each with its replacement."""
    settings = tomllib.loads((project / "pyproject.toml").read_text())["tool"]["dgxlab"]["words"]
    return dict(settings["avoid"])


def places(project: Path, avoid: dict[str, str]) -> Iterator[str]:
    """Yield `path:line: word: replacement` for each such word in the project's tracked texts."""
    patterns = [(re.compile(rf"\b(?:{word})\b", re.IGNORECASE), instead) for word, instead in avoid.items()]
    files = subprocess.run(["git", "ls-files", "-z"], cwd=project, capture_output=True, text=True, check=True).stdout
    for name in files.split("\0"):
        if not name.endswith(READ) or name.startswith(QUOTES):
            continue
        for number, line in enumerate((project / name).read_text().splitlines(), 1):
            for pattern, instead in patterns:
                if match := pattern.search(line):
                    yield f"{name}:{number}: {match[0]!r}: {instead}"


if __name__ == "__main__":
    main()
