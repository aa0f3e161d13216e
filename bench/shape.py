"""`python -m bench.shape`: the size of the package and its tests, and how many modules name each tool."""

from __future__ import annotations

import ast
import re
import statistics
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

PROJECT = Path(__file__).resolve().parent.parent

TOOLS = {
    "test-backend-ops": r"backend[-_]ops|BackendOps",
    "llama-bench": r"llama[-_]bench|LlamaBench",
    "llama-batched-bench": r"batched[-_]bench|BatchedBench",
    "llama-perplexity": r"perplexity|Perplexity",
    "harness": r"harness|Harness",
}
"""Regex for each tool's names in the code."""

PROSE = re.compile(r"[a-z]+,? [a-z]+,? [a-z]+,? [a-z]+")
"""Four words in a row: a sentence."""

Function = ast.FunctionDef | ast.AsyncFunctionDef


def main() -> None:
    """Print the counts, one per line."""
    for what, count in shape(PROJECT).items():
        print(f"{what:<44} {count}")


def shape(project: Path) -> dict[str, str]:
    """Return the counts of a project by their labels."""
    package, tests = (_trees(project / name) for name in ("dgxlab", "tests"))
    sizes = sorted(node.end_lineno - node.lineno + 1 for node in _functions(package) if node.end_lineno)
    once = [node for node in _functions(package) if node.name.startswith("_") and _named_once(node.name, package)]
    asking = [node for node in _functions(tests) if node.name.startswith("test_")]
    quoting = sum(any(map(_quotes, ast.walk(node))) for node in asking)
    return {
        "lines of dgxlab/": f"{_lines(package):,}",
        "modules": f"{len(package):,}",
        "functions": f"{len(sizes):,}",
        "lines of a function, median": f"{statistics.median(sizes):g}",
        "lines of a function, 90th percentile": f"{sizes[len(sizes) * 9 // 10]}",
        "lines of the longest function": f"{sizes[-1]}",
        "private helpers named once": f"{len(once):,}",
        "lines of tests/": f"{_lines(tests):,}",
        "tests": f"{len(asking):,}",
        "tests that quote prose": f"{100 * quoting / len(asking):.0f} %",
        **{f"modules that name {tool}": str(_naming(pattern, package)) for tool, pattern in TOOLS.items()},
    }


def _trees(folder: Path) -> dict[Path, tuple[str, ast.Module]]:
    texts = {path: path.read_text() for path in sorted(folder.rglob("*.py"))}
    return {path: (text, ast.parse(text)) for path, text in texts.items()}


def _functions(trees: dict[Path, tuple[str, ast.Module]]) -> Iterator[Function]:
    for _, tree in trees.values():
        yield from (node for node in ast.walk(tree) if isinstance(node, Function))


def _lines(trees: dict[Path, tuple[str, ast.Module]]) -> int:
    return sum(text.count("\n") for text, _ in trees.values())


def _named_once(name: str, trees: dict[Path, tuple[str, ast.Module]]) -> bool:
    """Whether the package names it once besides its definition."""
    return not name.endswith("__") and sum(_words(text)[name] for text, _ in trees.values()) == 2


@cache
def _words(text: str) -> Counter[str]:
    return Counter(re.findall(r"\w+", text))


def _quotes(node: ast.AST) -> bool:
    """Whether a node is an assertion, or a `match`, with a sentence in it."""
    if isinstance(node, ast.Assert):
        inside = ast.walk(node.test)
    elif isinstance(node, ast.keyword) and node.arg == "match":
        inside = ast.walk(node.value)
    else:
        return False
    return any(
        isinstance(each, ast.Constant) and isinstance(each.value, str) and PROSE.search(each.value) for each in inside
    )


def _naming(pattern: str, trees: dict[Path, tuple[str, ast.Module]]) -> int:
    return sum(bool(re.search(pattern, text)) for text, _ in trees.values())


if __name__ == "__main__":
    main()
