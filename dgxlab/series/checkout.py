"""Somebody's llama.cpp checkout as a source, as it lies on the disk: commits, edits and new files.

The checkout is only read: its files go into the cache through an index of our own, kept for each checkout so that only
files that changed are read again. Which files count is what the checkout's own git says, ignore rules included.
"""

from __future__ import annotations

import hashlib
from pathlib import Path, PurePosixPath

from dgxlab.errors import SpecError, command
from dgxlab.model import Source
from dgxlab.series.stack import changed_files
from dgxlab.source.cache import LLAMA_FILES, PinCache
from dgxlab.source.disk import locked, writing
from dgxlab.source.git import Git, GitError, reason

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
    _check_links(cache.git, pin, commit, checkout)
    cache.git.run("update-ref", TREES + _key(checkout), commit)
    return Source(pin, tree, commit, dirty=True)


def check_based(checkout: Path, pin: str) -> Git:
    """Return git on a llama.cpp checkout that stands on the pin.

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
    with writing(cache.path):
        (cache.path / "trees").mkdir(exist_ok=True)
    index = cache.path / "trees" / f"{_key(checkout)}.index"
    with locked(index.with_suffix(".lock")):
        index.with_name(f"{index.name}.lock").unlink(missing_ok=True)
        git = cache.git.having(GIT_INDEX_FILE=index, GIT_WORK_TREE=checkout.resolve())
        try:
            return _update(git, files)
        except GitError:
            # an index that a crash has damaged: from scratch, once
            index.unlink(missing_ok=True)
            return _update(git, files)


def _update(git: Git, files: dict[bytes, None]) -> str:
    """Bring our index to these files and return its tree."""
    before = git.read("ls-files", "-z").split(b"\0")[:-1]
    if gone := [path for path in before if path not in files]:
        git.run("update-index", "--force-remove", "-z", "--stdin", input=b"\0".join(gone) + b"\0")
    paths = b"".join(path + b"\0" for path in files)
    git.run("update-index", "--add", "--remove", "--replace", "-z", "--stdin", input=paths)
    return git.run("write-tree")


def _check_links(git: Git, pin: str, commit: str, checkout: Path) -> None:
    """Refuse new links that mean nothing on another machine, and submodules, which would be empty there."""
    for mode, path in changed_files(git, pin, commit):
        if mode == "160000":
            raise SpecError(f"{checkout / path} is a submodule", next="take it out: only plain files reach the host")
        if mode == "120000":
            target = PurePosixPath(git.run("cat-file", "blob", f"{commit}:{path}"))
            depth = len(PurePosixPath(path).parts) - 1
            if target.is_absolute() or target.parts.count("..") > depth:
                raise SpecError(f"{checkout / path} links out of the tree, to {target}", next="put a copy in its place")


def _key(checkout: Path) -> str:
    return hashlib.sha256(str(checkout.resolve()).encode(errors="surrogateescape")).hexdigest()[:16]
