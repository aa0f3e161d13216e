"""A llama.cpp checkout as a source, with its commits, edits and new files, and a series made from one.

The checkout is only read: its files go into the cache through an index of our own. Which files count is what the
checkout's own git says, ignore rules included.
"""

from __future__ import annotations

import email
import email.policy
import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath

from dgxlab.errors import SpecError, command
from dgxlab.model import NAME, Source
from dgxlab.series.patchfile import MODES, NO_BLOB, Patch, PatchSyntaxError
from dgxlab.series.series import Line, Overlay, Series, parse, read, read_overlay, render, write_whole
from dgxlab.series.stack import Stack, changed_files, format_patch
from dgxlab.source.cache import LLAMA_FILES, PinCache
from dgxlab.source.git import Git, reason

TREES = "refs/dgxlab/trees/"


def apply_tree(cache: PinCache, pin: str, checkout: Path) -> Source:
    """Return the tree of a checkout, committed on a pin, as a dirty source.

    Args:
        cache: Has the pin.
        pin: What the checkout is based on.
        checkout: The top folder of a git checkout of llama.cpp; it is not modified in any way.

    Raises:
        SpecError: if it is no checkout of llama.cpp, is not based on the pin, or holds what no tree can.
    """
    cache.require(pin)
    check_based(checkout, pin)
    tree = snapshot(cache, checkout)
    if tree == cache.git.run("rev-parse", f"{pin}^{{tree}}"):
        return Source(pin, tree, pin, dirty=True)
    commit = cache.git.run("commit-tree", tree, "-p", pin, input="a checkout as it was\n")
    # new links may mean nothing on another machine, and submodules would be empty there
    for mode, path in changed_files(cache.git, pin, commit):
        if mode == "160000":
            raise SpecError(f"{checkout / path} is a submodule", next="take it out: only plain files reach the host")
        if mode == "120000":
            target = PurePosixPath(cache.git.run("cat-file", "blob", f"{commit}:{path}"))
            depth = len(PurePosixPath(path).parts) - 1
            if target.is_absolute() or target.parts.count("..") > depth:
                raise SpecError(f"{checkout / path} links out of the tree, to {target}", next="put a copy in its place")
    key = hashlib.sha256(str(checkout.resolve()).encode(errors="surrogateescape")).hexdigest()[:16]
    cache.git.run("update-ref", TREES + key, commit)
    return Source(pin, tree, commit, dirty=True)


def check_based(checkout: Path, pin: str) -> Git:
    """Return git on a llama.cpp checkout that is based on the pin.

    Raises:
        SpecError: if it is no such checkout.
    """
    own = Git.checkout(checkout)
    top = own.attempt("rev-parse", "--show-toplevel") if checkout.is_dir() else None
    if top is None or top.rc != 0:
        cause = f": {reason(top.err)}" if top else ": there is no such folder"
        raise SpecError(f"{checkout} is not a git checkout{cause}", next="name the top folder of a llama.cpp checkout")
    if Path(top.text) != checkout.resolve():
        raise SpecError(f"{checkout} is inside the checkout {top.text}", next=f"name {top.text}")
    if missing := [name for name in LLAMA_FILES if not (checkout / name).exists()]:
        raise SpecError(f"{checkout} is not llama.cpp: it has no {missing[0]}", next="name a llama.cpp checkout")
    if own.attempt("merge-base", "--is-ancestor", pin, "HEAD").rc != 0:
        head = own.attempt("rev-parse", "--short=12", "HEAD").text
        raise SpecError(
            f"{checkout}, at {head}, is not based on pin {pin[:12]}: its results would be booked under the wrong pin",
            next=f"{command('git', '-C', checkout)} rebase --onto {pin[:12]} BASE, or set llama_cpp.pin to its base",
        )
    return own


def snapshot(cache: PinCache, checkout: Path) -> str:
    """Write a checkout's files into the cache and return the tree; files that are ignored and not tracked stay out.

    Raises:
        SpecError: if it holds another repository, or a file cannot be read.
    """
    own = Git.checkout(checkout)
    listed = own.read("ls-files", "-z", "--cached", "--others", "--exclude-standard")
    files = dict.fromkeys(listed.split(b"\0")[:-1])
    if nested := next((path for path in files if path.endswith(b"/")), None):
        name = nested.decode(errors="replace")
        raise SpecError(
            f"{checkout / name} is a repository of its own", next=f"move it away, or add {name} to .git/info/exclude"
        )
    paths = b"".join(path + b"\0" for path in files)
    with cache.scratch() as folder:
        git = cache.git.having(GIT_INDEX_FILE=folder / "index", GIT_WORK_TREE=checkout.resolve())
        git.run("update-index", "--add", "--remove", "--replace", "-z", "--stdin", input=paths)
        return git.run("write-tree")


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
    """Write patches/<name> anew from a checkout that is based on the pin.

    A patch keeps its file name as long as it keeps its subject; comments in the `series` file stay with their lines.

    Args:
        root: The project.
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
        # git on the cache that also sees the checkout's objects, and writes to neither
        (folder / "objects").mkdir()
        theirs = Path(own.run("rev-parse", "--path-format=absolute", "--git-path", "objects"))
        git = cache.git.having(
            GIT_INDEX_FILE=folder / "index",
            GIT_OBJECT_DIRECTORY=folder / "objects",
            GIT_ALTERNATE_OBJECT_DIRECTORIES=f'"{cache.path.resolve() / "objects"}":"{theirs}"',
        )
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
    if after == before:
        return
    if not message.strip():
        raise SpecError(f"{own.dir} has changes that are not committed", next="give them a --message, or commit them")
    ident = own.attempt("var", "GIT_AUTHOR_IDENT")
    me = re.fullmatch(r"(.*) <(.*)> (\d+ [+-]\d{4})", ident.text)
    if not me:
        raise SpecError(
            f"git knows no author for a commit: {reason(ident.err)}", next="git config user.name, user.email"
        )
    yield _commit(git, after, last, me.groups(), message)


def _commit(git: Git, tree: str, parent: str, author: Sequence[str], text: str) -> str:
    env = dict(zip(("GIT_AUTHOR_NAME", "GIT_AUTHOR_EMAIL", "GIT_AUTHOR_DATE"), author, strict=True))
    return git.run("commit-tree", tree, "-p", parent, input=text.strip("\n") + "\n", env=env)


def _without(git: Git, treeish: str, dests: Sequence[str]) -> str:
    """Return a tree without the overlays."""
    git.run("read-tree", treeish)
    git.run("update-index", "-z", "--index-info", input="".join(f"0 {NO_BLOB}\t{dest}\0" for dest in dests))
    return git.run("write-tree")


def _content(git: Git, tree: str, overlay: Overlay) -> bytes:
    """Return what a tree has of an overlay; as it was when it has no such file, or a link to somewhere else."""
    entry = git.run("ls-tree", tree, "--", overlay.dest)
    return git.read("cat-file", "blob", entry.split()[2]) if entry.startswith(MODES) else overlay.content


def _named(texts: Sequence[bytes], folder: Path, lines: Sequence[Line]) -> dict[str, bytes]:
    """Give each patch a file name: the one that its subject had, else one made of its subject."""
    present = [folder / line.name for line in lines if not line.dest and NAME.fullmatch(line.name)]
    old = {_subject(path.read_bytes()): path.name for path in present if path.is_file()}
    named: dict[str, bytes] = {}
    for text in texts:
        subject = _subject(text)
        slug = re.sub(r"[^A-Za-z0-9._]+", "-", subject).strip("-._")[:52].rstrip("-._") or "patch"
        candidates = [old.get(subject, ""), f"{slug}.patch", *(f"{slug}-{n}.patch" for n in range(2, 1000))]
        named[next(c for c in candidates if c and c not in named)] = text
    return named


def _subject(content: bytes) -> str:
    head = email.message_from_bytes(content.split(b"\n", 1)[-1], policy=email.policy.default)
    return str(head["Subject"] or "").removeprefix("[PATCH] ")


def _written_again(cache: PinCache, pin: str, name: str, named: Mapping[str, bytes], wanted: str) -> list[Patch]:
    """Apply the new patches, and take what that gives; it must be the checkout's tree."""
    patches = []
    with Stack.on(cache, pin) as stack:
        for file, text in named.items():
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
