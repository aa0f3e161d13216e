"""Why a patch does not apply: which file, which hunk, which line.

Blob ids by path (`blobs`) say what the tree has where the patch was to go.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from dgxlab.series.patchfile import Change, Patch
from dgxlab.source.git import Git, reason


def fits(change: Change, blobs: Mapping[str, str]) -> bool:
    """Tell whether a file is the very one that the patch was made on, and its new place is free."""
    if change.old_path and change.old_blob not in ("", blobs.get(change.old_path)):
        return False
    if change.old_path and change.old_path not in blobs:
        return False
    return change.new_path in ("", change.old_path) or change.new_path not in blobs


def how_moved(change: Change, blobs: Mapping[str, str]) -> str:
    """Say what is in the way of a change that does not fit."""
    if change.old_path and change.old_path not in blobs:
        return f"{change.old_path} is not there"
    if change.old_path and change.old_blob not in ("", blobs[change.old_path]):
        base, found = change.old_blob[:12], blobs[change.old_path][:12]
        return f"{change.old_path} moved: the patch was made on blob {base}, there it is {found}"
    return f"{change.new_path} is there already"


def trials(git: Git, folder: Path, patch: Patch, blobs: Mapping[str, str]) -> list[str]:
    """Say of each hunk of a patch what a plain apply would do with it, by trying on copies of its files in `folder`."""
    return [line for change in patch.changes for line in _trial(git, folder / "trial", change, blobs)]


def merge_conflicts(git: Git, folder: Path, patch: Patch) -> list[str]:
    """Name each place where a three-way apply left both sides in the index, by its line in the merged file."""
    listed = git.run("--literal-pathspecs", "ls-files", "-u", "-z", "--", *sorted(patch.paths))
    stages: dict[str, dict[str, str]] = {}
    for row in filter(None, listed.split("\0")):
        entry, path = row.split("\t", 1)
        _, blob, stage = entry.split(" ")
        stages.setdefault(path, {})[stage] = blob
    return [line for path, sides in sorted(stages.items()) for line in _both_sides(git, folder, path, sides)]


def _trial(git: Git, top: Path, change: Change, blobs: Mapping[str, str]) -> list[str]:
    if not change.hunks or change.old_path not in blobs:
        return []
    copy = top / change.old_path
    copy.parent.mkdir(parents=True, exist_ok=True)
    copy.write_bytes(git.read("cat-file", "blob", blobs[change.old_path]))
    flags = ("apply", "--reject", "--verbose", "--whitespace=nowarn", "-")
    ran = git.attempt("-C", str(top), f"--work-tree={top}", *flags, input=change.text)
    offsets = {int(n): int(line) for n, line in re.findall(r"Hunk #(\d+) succeeded at (\d+)", ran.err)}
    rejected = {int(n) for n in re.findall(r"Rejected hunk #(\d+)", ran.err)}
    if ran.rc != 0 and not rejected:
        return [f"{change.path}: {reason(ran.err)}"]
    verdicts = []
    for number, hunk in enumerate(change.hunks, 1):
        verdict = "does not apply" if number in rejected else f"would land at line {offsets.get(number, hunk.new_line)}"
        verdicts.append(f"{change.path}, hunk {number} (line {hunk.line}): {verdict}")
    return verdicts


def _both_sides(git: Git, folder: Path, path: str, sides: Mapping[str, str]) -> list[str]:
    if set(sides) != {"1", "2", "3"}:
        return [f"{path}: both add it"]
    files = []
    for stage in "213":
        files.append(folder / f"side{stage}")
        files[-1].write_bytes(git.read("cat-file", "blob", sides[stage]))
    merged = git.attempt("merge-file", "-p", "-q", *map(str, files)).out.split(b"\n")
    starts = [number for number, line in enumerate(merged, 1) if line.startswith(b"<<<<<<< ")]
    return [f"{path}: conflict {i} (line {line} of the merged file)" for i, line in enumerate(starts, 1)]
