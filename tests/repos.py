"""Small repositories made with real git: something that looks like llama.cpp, and projects with series on it."""

import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from dgxlab.source import PinCache

IDENTITY = {
    "GIT_AUTHOR_NAME": "Ann Author",
    "GIT_AUTHOR_EMAIL": "ann@example.com",
    "GIT_AUTHOR_DATE": "1700000000 +0100",
    "GIT_COMMITTER_NAME": "Cid Committer",
    "GIT_COMMITTER_EMAIL": "cid@example.com",
    "GIT_COMMITTER_DATE": "1700000001 +0900",
    "GIT_CONFIG_NOSYSTEM": "1",
    "GIT_CONFIG_GLOBAL": os.devnull,
}

FORMAT = ("--zero-commit", "--no-signature", "--full-index", "--no-numbered", "--no-stat", "-U1")


def function(name: str, body: str = "") -> str:
    """Return C text of eight lines; two functions differ only in their first line, so contexts repeat."""
    return f"void {name}(void) {{\n    int i = 0;\n    start(i);\n{body}    stop(i);\n    return;\n}}\n\n\n"


GGML_C = "".join(function(name) for name in ("one", "two", "three", "four"))

LLAMA = {
    "CMakeLists.txt": "project(toy)\n",
    "README.md": "a toy\n",
    ".gitignore": "build/\n*.o\n",
    "ggml/ggml.c": GGML_C,
    "ggml/ops.c": "".join(function(name) for name in ("add", "mul")),
}
"""What looks like llama.cpp to dgxlab."""


def git(where: Path, *args: str, env: Mapping[str, str] | None = None, input: bytes | None = None) -> str:
    ran = subprocess.run(
        ["git", "-C", str(where), *args],
        env={**os.environ, **IDENTITY, **(env or {})},
        input=input,
        capture_output=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr.decode()
    return ran.stdout.decode(errors="surrogateescape").removesuffix("\n")


def write(where: Path, files: Mapping[str, str | bytes | None]) -> None:
    for name, content in files.items():
        path = where / name
        if content is None:
            path.unlink()
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())


def commit(
    where: Path,
    files: Mapping[str, str | bytes | None],
    message: str = "a change",
    env: Mapping[str, str] | None = None,
) -> str:
    write(where, files)
    git(where, "add", "--all", env=env)
    git(where, "commit", "--quiet", "--allow-empty", "--cleanup=verbatim", "-m", message, env=env)
    return git(where, "rev-parse", "HEAD")


def upstream(where: Path, files: Mapping[str, str | bytes | None] = LLAMA) -> str:
    git(where.parent, "init", "--quiet", "--initial-branch=main", str(where))
    return commit(where, files, "the start")


def patch_text(where: Path, revision: str = "HEAD") -> bytes:
    """Return a commit as git format-patch writes it for a series."""
    return git(where, "format-patch", "-1", "--stdout", *FORMAT, revision).encode(errors="surrogateescape") + b"\n"


def quiet(line: str) -> None:
    pass


def cache_of(path: Path, source: Path, *pins: str) -> PinCache:
    """Return a cache that has these commits of a clone."""
    cache = PinCache(path)
    for pin in pins:
        cache.ensure(pin, [str(source)], quiet)
    return cache


def write_series(root: Path, name: str, patches: Mapping[str, bytes], extra: Sequence[str] = ()) -> None:
    """Write patches/<name> of a project: patch files in order, and further lines of its series file."""
    write(root / "patches" / name, {**patches, "series": "\n".join([*patches, *extra]) + "\n"})
