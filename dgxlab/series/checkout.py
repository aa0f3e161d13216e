"""A llama.cpp checkout as a source, with its commits, edits and new files, and a series made from one.

The checkout is only read: its files go into the cache through a separate index. git's own rules for the checkout decide
which files count: ignored files do not.
"""

from __future__ import annotations

import email
import email.policy
import hashlib
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path, PurePosixPath

from dgxlab.errors import SpecError, command
from dgxlab.model import LONGEST, NAME, UPSTREAM, Source
from dgxlab.series.patchfile import MODES, NO_BLOB, Patch, PatchSyntaxError
from dgxlab.series.series import (
    Series,
    SeriesLine,
    content_of,
    folder_for,
    parse,
    place_for,
    read,
    read_overlay,
)
from dgxlab.series.stack import Stack, changed_files, format_patch
from dgxlab.source.cache import LLAMA_FILES, PinCache
from dgxlab.source.git import Git, reason
from dgxlab.source.programs import write_whole

_TREES = "refs/dgxlab/trees/"


def apply_tree(cache: PinCache, pin: str, checkout: Path) -> Source:
    """Return the present files of a llama.cpp checkout, committed or not, as a source: one commit on the pin, dirty.

    Raises:
        SpecError: if it is not a checkout of llama.cpp, is not based on the pin, or has links out of it or submodules.
    """
    base = cache.require(pin)
    source = _source(cache, pin, base, _snapshot(cache, _based(checkout, pin), pin))
    if source.commit == pin:
        return source
    commit = source.commit
    # new links may be invalid on another machine, and submodules would be empty there
    for mode, path in changed_files(cache.git, pin, commit):
        if mode == "160000":
            raise SpecError(f"{checkout / path} is a submodule", next="take it out: only plain files reach the host")
        if mode == "120000":
            target = PurePosixPath(cache.git.run("cat-file", "blob", f"{commit}:{path}"))
            depth = len(PurePosixPath(path).parts) - 1
            if target.is_absolute() or target.parts.count("..") > depth:
                raise SpecError(f"{checkout / path} links out of the tree, to {target}", next="put a copy in its place")
    key = hashlib.sha256(str(checkout.resolve()).encode(errors="surrogateescape")).hexdigest()[:16]
    cache.git.run("update-ref", _TREES + key, commit)
    return source


def remake(cache: PinCache, pin: str, tree: str, changes: str) -> Source:
    """Return the source that a checkout was, given its tree and its `diff`.

    Raises SpecError if the diff does not give that tree: some of its text is not UTF-8, and was recorded as "?".
    """
    base = cache.require(pin)
    if cache.git.attempt("cat-file", "-e", f"{tree}^{{tree}}").rc != 0:
        with cache.scratch() as folder:
            git = cache.git.configured(GIT_INDEX_FILE=folder / "index")
            git.run("read-tree", pin)
            git.attempt("apply", "--cached", "--whitespace=nowarn", "-", input=changes)
            if git.run("write-tree") != tree:
                message = f"the recorded changes over pin {pin[:12]} do not give tree {tree[:12]}"
                raise SpecError(message, next="take another reference with --parent")
    return _source(cache, pin, base, tree)


def _source(cache: PinCache, pin: str, base: str, tree: str) -> Source:
    """Return a tree of the cache as a source: one commit on the pin, whose own tree is `base`; equal in every cache."""
    if tree == base:
        return Source(pin, tree, pin, dirty=True)
    commit = cache.git.run("commit-tree", tree, "-p", pin, input="a checkout as it was\n")
    return Source(pin, tree, commit, dirty=True)


def untracked(checkout: Path) -> list[str]:
    """Return the files of a checkout that git neither tracks nor ignores."""
    listed = Git.checkout(checkout).attempt("ls-files", "-z", "--others", "--exclude-standard")
    return [path.decode(errors="replace") for path in listed.out.split(b"\0")[:-1]]


def diff(cache: PinCache, source: Source, over: Source | None = None) -> str:
    """Return the changes of a source over its pin, or another source, as `git diff --binary` prints them; "" for none.

    Raises SpecError if they are too long to be recorded.
    """
    base, of = (over.commit, f"tree {over.tree[:12]}") if over else (source.pin, f"pin {source.pin[:12]}")
    text = cache.git.read("diff", "--binary", "--full-index", base, source.commit).decode(errors="replace")
    if len(text) > LONGEST:
        message = f"the checkout differs from {of} by {len(text) >> 20} MiB, too much to record"
        raise SpecError(message, next="set llama_cpp.pin to the checkout's own base")
    return text


def changed_lines(diff: str) -> int:
    """Return how many lines a diff adds and removes: only in hunks, as headers also begin with + and -."""
    files = re.split(r"(?m)^diff --git ", diff)
    hunks = [hunk for file in files for hunk in re.split(r"(?m)^@@ .*", file)[1:]]
    return sum(len(re.findall(r"(?m)^[+-]", hunk)) for hunk in hunks)


def export(
    root: Path, name: str, cache: PinCache, pin: str, checkout: Path, message: str = "", *, beside: bool = False
) -> Series:
    """Write the commits of a checkout since the pin as the series patches/<name> of the project `root`, and return it.

    Files of the checkout that are overlays of the series go back to kernels/. A patch file keeps its name as long as
    the commit keeps its subject; comments in the `series` file stay with their lines. Changes that are not committed
    need a `message`. With `beside` a folder for this pin is written, and patches for other pins stay as they are.
    Raises SpecError if the checkout cannot become a series, or a patch that git does not have would be removed; nothing
    is written then.
    """
    if not NAME.fullmatch(name):
        raise SpecError(f"{name!r} is no name for a series", next="use letters, digits, dots and dashes")
    cache.require(pin)
    own = _based(checkout, pin)
    place = place_for(root, name, pin)
    folder, present = folder_for(root, name, pin, beside=beside), root / place
    try:  # only the overlays are kept, so the patch files may be in any state
        is_there = present.is_symlink() or (present / "series").exists()
        lines = parse(content_of(root, f"{place}/series").decode()) if is_there else []
        overlays = [read_overlay(root, line) for line in lines if line.dest]
    except ValueError as error:
        raise SpecError(f"series {name}: {error}", next=f"mend or remove {present / 'series'}") from error
    old = {line.name: line for line in lines if not line.dest and NAME.fullmatch(line.name)}
    tree = _snapshot(cache, own, pin)
    texts, wanted = _formatted(cache, own, pin, tree, [overlay.dest for overlay in overlays], message)
    patches = _rewritten(cache, pin, name, _named(texts, [present / file for file in old]), wanted)
    if not patches and not overlays:
        raise SpecError(f"nothing to export: {checkout} is pin {pin[:12]}", next=f"change something in {checkout}")
    obsolete = [folder / file for file in sorted(old.keys() - {patch.name for patch in patches})]
    git = Git.checkout(folder)
    for path in obsolete:
        if path.exists() and git.attempt("ls-files", "--error-unmatch", "--", str(path)).rc:
            message = f"{path} would be removed, as {checkout} has no such commit, and git does not have it"
            raise SpecError(message, next=f"{command('git', 'add', path)}, or {command('rm', path)}")
    folder.mkdir(parents=True, exist_ok=True)
    for overlay in overlays:
        entry = cache.git.run("ls-tree", tree, "--", overlay.dest)
        if entry.startswith(MODES):  # not if the checkout lacks the file or has a link
            write_whole(root / overlay.source, cache.git.read("cat-file", "blob", entry.split()[2]))
    for patch in patches:
        write_whole(folder / patch.name, patch.content)
    listed = [old.get(patch.name, SeriesLine(patch.name)) for patch in patches]
    kept = [line for line in lines if line.dest]
    listed = [*kept, *listed] if kept and lines[0].dest else [*listed, *kept]  # either order means the same
    write_whole(folder / "series", "".join(f"{line}\n" for line in listed).encode())
    for path in obsolete:
        path.unlink(missing_ok=True)
    return read(root, name, pin)


def bases(checkout: Path, pins: Sequence[str]) -> list[str]:
    """Return those of `pins` that a checkout is based on, without the ancestors of others of them."""
    git = Git.checkout(checkout)

    def precedes(pin: str, commit: str) -> bool:
        return pin != commit and checkout.is_dir() and not git.attempt("merge-base", "--is-ancestor", pin, commit).rc

    under = [pin for pin in pins if precedes(pin, "HEAD")]
    return [pin for pin in under if not any(precedes(pin, other) for other in under)]


def _based(checkout: Path, pin: str) -> Git:
    own = Git.checkout(checkout)
    top = own.attempt("rev-parse", "--show-toplevel") if checkout.is_dir() else None
    if top is None or top.rc != 0:
        cause = reason(top.err) if top else "it is no folder" if checkout.exists() else "there is no such folder"
        clone = command("git", "clone", UPSTREAM, *([] if checkout.exists() else [checkout]))
        raise SpecError(f"{checkout} is not a git checkout: {cause}", next=clone)
    if Path(top.text) != checkout.resolve():
        raise SpecError(f"{checkout} is inside the checkout {top.text}", next=command("ls", top.text))
    if missing := [name for name in LLAMA_FILES if not (checkout / name).exists()]:
        clone = command("git", "clone", UPSTREAM)
        raise SpecError(f"{checkout} is not llama.cpp: it has no {missing[0]}", next=clone)
    if own.attempt("merge-base", "--is-ancestor", pin, "HEAD").rc != 0:
        git, at = command("git", "-C", checkout), own.attempt("rev-parse", "--short=12", "HEAD").text
        if not at:
            mend = f"{git} reset {pin[:12]}, which keeps its files, once it has that commit"
            raise SpecError(f"{checkout} has no commit, so it is not based on pin {pin[:12]}", next=mend)
        mend = f"{git} rebase --onto {pin[:12]} BASE, or set llama_cpp.pin to its base"
        problem = f"{checkout}, at {at}, is not based on pin {pin[:12]}"
        raise SpecError(f"{problem}: its results would be recorded under the wrong pin", next=mend)
    return own


def _snapshot(cache: PinCache, own: Git, pin: str) -> str:
    """Write a checkout's files into the cache and return the tree; files that are ignored and not tracked stay out."""
    listed = own.read("ls-files", "-z", "--cached", "--others", "--exclude-standard")
    files = dict.fromkeys(listed.split(b"\0")[:-1])
    if nested := next((path.decode(errors="replace") for path in files if path.endswith(b"/")), None):
        mend = f"move it away, or add {nested} to .git/info/exclude"
        raise SpecError(f"{own.dir / nested} is a repository of its own", next=mend)
    with cache.scratch() as folder:
        git = cache.git.configured(GIT_INDEX_FILE=folder / "index", GIT_WORK_TREE=own.dir.resolve())
        _begin_index(git, own, pin, folder / "index")
        paths = b"".join(path + b"\0" for path in files)
        git.run("update-index", "--add", "--remove", "--replace", "-z", "--stdin", input=paths)
        return git.run("write-tree")


def _begin_index(git: Git, own: Git, pin: str, index: Path) -> None:
    """Begin an index with the pin's files that the checkout's own index knows as unchanged: only others are then read.

    Nothing is written if an entry has a flag (`git update-index --assume-unchanged`), which hides changes.
    """
    with suppress(OSError):  # git compares the times of files with that of the index
        shutil.copy2(own.run("rev-parse", "--path-format=absolute", "--git-path", "index"), index)
    listed, differing = git.attempt("ls-files", "-v"), git.attempt("diff-index", "--cached", "--name-only", "-z", pin)
    if listed.rc or differing.rc or any(line[:1] != b"H" for line in listed.out.splitlines()):
        index.unlink(missing_ok=True)
    elif differing.out:
        git.run("update-index", "-z", "--force-remove", "--stdin", input=differing.out)


def _formatted(
    cache: PinCache, own: Git, pin: str, tree: str, dests: Sequence[str], message: str
) -> tuple[list[bytes], str]:
    """Return the checkout's commits as patches, and its tree, both without the overlays."""
    with cache.scratch() as folder:
        # git on the cache that also sees the checkout's objects, and writes to neither
        (folder / "objects").mkdir()
        theirs = own.run("rev-parse", "--path-format=absolute", "--git-path", "objects")
        git = cache.git.configured(
            GIT_INDEX_FILE=folder / "index",
            GIT_OBJECT_DIRECTORY=folder / "objects",
            GIT_ALTERNATE_OBJECT_DIRECTORIES=f'"{cache.path.resolve() / "objects"}":"{theirs}"',
        )
        commits = _commits(git, own, pin, tree, dests, message)
        return [format_patch(git, commit) for commit in commits], _without(git, tree, dests)


def _commits(git: Git, own: Git, pin: str, tree: str, dests: Sequence[str], message: str) -> Iterator[str]:
    """Yield each of the checkout's commits without the overlays, and one for uncommitted changes."""
    if own.run("rev-list", "--min-parents=2", f"{pin}..HEAD"):
        mend = command("git", "-C", own.dir, "rebase", pin[:12])
        raise SpecError(f"{own.dir} has merges over pin {pin[:12]}", next=mend)
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
        cause = reason(ident.err)
        raise SpecError(f"git knows no author for a commit: {cause}", next="git config --global user.email YOU@HOST")
    yield _commit(git, after, last, me.groups(), message)


def _commit(git: Git, tree: str, parent: str, author: Sequence[str], text: str) -> str:
    env = dict(zip(("GIT_AUTHOR_NAME", "GIT_AUTHOR_EMAIL", "GIT_AUTHOR_DATE"), author, strict=True))
    return git.run("commit-tree", tree, "-p", parent, input=text.strip("\n") + "\n", env=env)


def _without(git: Git, treeish: str, dests: Sequence[str]) -> str:
    git.run("read-tree", treeish)
    git.run("update-index", "-z", "--index-info", input="".join(f"0 {NO_BLOB}\t{dest}\0" for dest in dests))
    return git.run("write-tree")


def _named(texts: Sequence[bytes], present: Sequence[Path]) -> dict[str, bytes]:
    """Give each patch a file name: that of the present file with its subject, else one made of the subject."""
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


def _rewritten(cache: PinCache, pin: str, name: str, named: Mapping[str, bytes], wanted: str) -> list[Patch]:
    """Apply the new patches and return them; together they must give the tree `wanted`."""
    patches, series = [], Series(name, (), place=f"patches/{name}")
    with Stack.on(cache, pin) as stack:
        for file, text in named.items():
            try:
                stack.push(series, Patch.parse(file, text))
                patches.append(Patch.parse(file, stack.format()))
            except PatchSyntaxError as error:
                message = f"{file} cannot be a patch of a series, {error}"
                raise SpecError(message, next="change it in the checkout") from error
        if stack.tree() != wanted:
            raise SpecError(f"the patches of {name} do not give the checkout's tree", next="commit and export again")
    return patches
