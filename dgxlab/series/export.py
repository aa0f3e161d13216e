"""Turn a llama.cpp checkout into a series: a patch for each commit over the pin, and one for what is not committed.

Files that are overlays stay out of the patches: what the checkout made of them goes back to their home in kernels/.
The checkout is only read; its objects are borrowed, not copied.
"""

from __future__ import annotations

import email
import email.policy
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from dgxlab.errors import SpecError, command
from dgxlab.model import NAME
from dgxlab.series.checkout import check_based, snapshot
from dgxlab.series.lines import Line, parse, render, write_whole
from dgxlab.series.patchfile import MODES, NO_BLOB, Patch, PatchSyntaxError
from dgxlab.series.series import Overlay, Series, read, read_overlay
from dgxlab.series.stack import Stack, format_patch
from dgxlab.source.cache import PinCache
from dgxlab.source.git import Git, reason


@dataclass(frozen=True)
class Exported:
    """What an export did.

    Attributes:
        series: The series as it is now on disk.
        removed: Patch files that are no longer part of it.
        overlays: Files of kernels/ that were written.
    """

    series: Series
    removed: tuple[str, ...]
    overlays: tuple[str, ...]


def export(root: Path, name: str, cache: PinCache, pin: str, checkout: Path, message: str = "") -> Exported:
    """Write patches/<name> anew from a checkout that stands on the pin.

    A patch keeps its file name as long as it keeps its subject; comments in the `series` file stay with their lines.

    Args:
        root: The project.
        name: The series, new or old.
        cache: Has the pin.
        pin: What the commits are counted from.
        checkout: The top folder of a git checkout of llama.cpp.
        message: Commit message for what is not committed; needed when there is something.

    Raises:
        SpecError: if the checkout cannot become a series; nothing is written then.
    """
    if not NAME.fullmatch(name):
        raise SpecError(f"{name!r} is no name for a series", next="use letters, digits, dots and dashes")
    cache.require(pin)
    own = check_based(checkout, pin)
    lines, overlays = _present(root, name)
    dests = [overlay.dest for overlay in overlays]
    tree = snapshot(cache, checkout)
    with cache.scratch() as folder:
        git = _borrowing(cache, own, folder)
        texts = [format_patch(git, commit) for commit in _commits(git, own, pin, tree, dests, message)]
        after = [replace(overlay, content=_content(git, tree, overlay)) for overlay in overlays]
        wanted = _without(git, tree, dests)
    patches = _written_again(cache, pin, name, _named(texts, root / "patches" / name, lines), wanted)
    if not patches and not overlays:
        raise SpecError(
            f"{checkout} is pin {pin[:12]} as it is: nothing to export", next=f"change something in {checkout}"
        )
    changed = [new for new, old in zip(after, overlays, strict=True) if new.content != old.content]
    return _write(root, name, patches, changed, lines)


def _present(root: Path, name: str) -> tuple[list[Line], list[Overlay]]:
    """Return the lines and the overlays of the series as it is; its patches may be in any state."""
    path = root / "patches" / name / "series"
    try:
        if path.parent.is_symlink() or path.is_symlink():
            raise ValueError("it is a symbolic link")
        lines = parse(path.read_text()) if path.exists() else []
        return lines, [read_overlay(root, line) for line in lines if line.dest]
    except ValueError as error:
        raise SpecError(f"series {name}: {error}", next=f"mend or remove {path}") from error


def _borrowing(cache: PinCache, own: Git, folder: Path) -> Git:
    """Return git on the cache that also sees the checkout's objects, and writes to neither."""
    (folder / "objects").mkdir()
    theirs = Path(own.run("rev-parse", "--path-format=absolute", "--git-path", "objects"))
    return cache.git.having(
        GIT_INDEX_FILE=folder / "index",
        GIT_OBJECT_DIRECTORY=folder / "objects",
        GIT_ALTERNATE_OBJECT_DIRECTORIES=f'"{cache.path.resolve() / "objects"}":"{theirs}"',
    )


def _commits(git: Git, own: Git, pin: str, tree: str, dests: Sequence[str], message: str) -> Iterator[str]:
    """Yield a commit for each of the checkout's, without the overlays, and one for what is not committed."""
    if own.run("rev-list", "--min-parents=2", f"{pin}..HEAD"):
        raise SpecError(
            f"{own.dir} has merges over pin {pin[:12]}", next=command("git", "-C", own.dir, "rebase", pin[:12])
        )
    last, before = pin, _without(git, pin, dests)
    for commit in own.run("rev-list", "--reverse", f"{pin}..HEAD").split():
        after = _without(git, commit, dests)
        if after != before:
            shown = git.run("show", "--no-patch", "--date=raw", "--format=%an%x00%ae%x00%ad%x00%B", commit)
            *author, text = shown.split("\0", 3)
            last, before = _commit(git, after, last, author, text), after
            yield last
    after = _without(git, tree, dests)
    if after != before:
        if not message.strip():
            raise SpecError(
                f"{own.dir} has changes that are not committed", next="give them a --message, or commit them"
            )
        yield _commit(git, after, last, _me(own), message)


def _commit(git: Git, tree: str, parent: str, author: Sequence[str], text: str) -> str:
    env = dict(zip(("GIT_AUTHOR_NAME", "GIT_AUTHOR_EMAIL", "GIT_AUTHOR_DATE"), author, strict=True))
    return git.run("commit-tree", tree, "-p", parent, input=text.strip("\n") + "\n", env=env)


def _me(own: Git) -> list[str]:
    """Return the user's name, address and the time now, as git knows them."""
    ident = own.attempt("var", "GIT_AUTHOR_IDENT")
    match = re.fullmatch(r"(.*) <(.*)> (\d+ [+-]\d{4})", ident.text)
    if not match:
        raise SpecError(
            f"git knows no author for a commit: {reason(ident.err)}", next="git config user.name, user.email"
        )
    return list(match.groups())


def _without(git: Git, treeish: str, dests: Sequence[str]) -> str:
    """Return a tree without the overlays."""
    git.run("read-tree", treeish)
    git.run("update-index", "-z", "--index-info", input="".join(f"0 {NO_BLOB}\t{dest}\0" for dest in dests))
    return git.run("write-tree")


def _content(git: Git, tree: str, overlay: Overlay) -> bytes:
    """Return what a tree has of an overlay; as it was when it has no such file, or a link to somewhere else."""
    entry = git.run("ls-tree", tree, "--", overlay.dest)
    return git.read("cat-file", "blob", entry.split()[2]) if entry.startswith(MODES) else overlay.content


def _named(texts: Sequence[bytes], folder: Path, lines: Sequence[Line]) -> list[tuple[str, bytes]]:
    """Give each patch a file name: the one that its subject had, else one made of its subject."""
    old = {_subject((folder / line.name).read_bytes()): line.name for line in lines if _is_patch(folder, line)}
    named: dict[str, bytes] = {}
    for text in texts:
        subject = _subject(text)
        slug = re.sub(r"[^A-Za-z0-9._]+", "-", subject).strip("-._")[:52].rstrip("-._") or "patch"
        candidates = [old.get(subject, ""), f"{slug}.patch", *(f"{slug}-{n}.patch" for n in range(2, 1000))]
        named[next(c for c in candidates if c and c not in named)] = text
    return list(named.items())


def _is_patch(folder: Path, line: Line) -> bool:
    return not line.dest and bool(NAME.fullmatch(line.name)) and (folder / line.name).is_file()


def _subject(content: bytes) -> str:
    head = email.message_from_bytes(content.split(b"\n", 1)[-1], policy=email.policy.default)
    return str(head["Subject"] or "").removeprefix("[PATCH] ")


def _written_again(
    cache: PinCache, pin: str, name: str, named: Sequence[tuple[str, bytes]], wanted: str
) -> list[Patch]:
    """Apply the new patches as anybody else will, and take what that gives; it must be the checkout's tree."""
    patches = []
    with Stack.on(cache, pin) as stack:
        for file, text in named:
            try:
                stack.push(name, Patch.parse(file, text))
                patches.append(Patch.parse(file, stack.format()))
            except PatchSyntaxError as error:
                raise SpecError(
                    f"{file} cannot be a patch of a series, {error}", next="change it in the checkout"
                ) from error
        if stack.tree() != wanted:
            raise SpecError(f"the patches of {name} do not give the checkout's tree", next="commit and export again")
    return patches


def _write(
    root: Path, name: str, patches: Sequence[Patch], overlays: Sequence[Overlay], lines: Sequence[Line]
) -> Exported:
    folder = root / "patches" / name
    folder.mkdir(parents=True, exist_ok=True)
    for patch in patches:
        write_whole(folder / patch.name, patch.content)
    for overlay in overlays:
        write_whole(root / overlay.source, overlay.content)
    old = {line.name: line for line in lines if not line.dest}
    kept = [replace(old.get(patch.name, Line(patch.name)), name=patch.name) for patch in patches]
    write_whole(folder / "series", render([*kept, *(line for line in lines if line.dest)]).encode())
    removed = [line for line in old if line not in {patch.name for patch in patches}]
    for file in removed:
        (folder / file).unlink(missing_ok=True)
    return Exported(read(root, name), tuple(removed), tuple(overlay.source for overlay in overlays))
