"""A pin with patches on top, built in a private index: no working tree, nothing of the user's is touched.

A patch with one line of context can land in the wrong function without a word. So a patch goes on only when every file
is the very blob that the patch was made on, and must give the very blobs that it names; then there is nothing to guess.
`merge`, for refreshing a series, takes a file that moved as well, by a three-way merge over the blob that the patch
was made on, never by searching for its context.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from dgxlab.errors import PatchError
from dgxlab.series.patchfile import MODES, NO_BLOB, Change, Patch
from dgxlab.source.cache import PinCache
from dgxlab.source.git import Git, reason

FORMAT = ("--zero-commit", "--no-signature", "--full-index", "--no-numbered", "--no-stat", "-U1")
"""How `git format-patch` writes a series, so that a patch file changes only where the patch does."""


class Stack:
    """Commits on a pin; made by `Stack.on`.

    Attributes:
        pin: The commit below all patches.
        commit: The last commit, at first the pin.
    """

    def __init__(self, cache: PinCache, pin: str, folder: Path) -> None:
        self.git = cache.git.having(GIT_INDEX_FILE=folder / "index")
        self.pin = self.commit = pin
        self._folder = folder
        # `git apply --cached --3way` writes files all the same when both sides add one: let it, into a folder of ours
        work = folder / "work"
        work.mkdir()
        self._apply = ("-C", str(work), f"--work-tree={work}", "apply", "--cached", "--whitespace=nowarn", "-")
        self.git.run("read-tree", pin)

    @classmethod
    @contextmanager
    def on(cls, cache: PinCache, pin: str) -> Iterator[Stack]:
        """Give an empty stack on a pin that the cache has."""
        with cache.scratch() as folder:
            yield cls(cache, pin, folder)

    def push(self, series: str, patch: Patch) -> None:
        """Put one patch on top as a commit with the patch's own author, date and message.

        Raises:
            PatchError: if a file moved, a hunk does not apply, or the outcome is not what the patch names.
        """
        blobs = self._blobs(patch.paths)
        refresh = f"dgxlab patch refresh {series} --pin {self.pin}"
        if moved := [cause for change in patch.changes if (cause := _misfit(change, blobs))]:
            raise PatchError(
                f"series {series}: {patch.name} does not apply to pin {self.pin[:12]}: {moved[0]}",
                next=refresh,
                details="\n".join(moved),
            )
        ran = self.git.attempt(*self._apply, "--3way", input=patch.diff)
        if ran.rc != 0:
            raise _damaged(series, patch, ran.err)
        after = self._blobs(patch.paths)
        for change in patch.changes:
            if change.new_blob not in ("", after.get(change.new_path, NO_BLOB)):
                raise PatchError(
                    f"series {series}: {patch.name} does not give the {change.path} that it names: it was edited by "
                    "hand; read what a refresh makes of it before you use it",
                    next=refresh,
                )
        self._commit(series, patch)

    def merge(self, series: str, patch: Patch) -> None:
        """Put one patch on top, merging where a file is not the one that it was made on.

        Raises:
            PatchError: if it conflicts, if it changes nothing any more, or if what it was made on is not in the cache.
        """
        blobs = self._blobs(patch.paths)
        self._check_bases(series, patch, blobs)
        ran = self.git.attempt(*self._apply, "--3way", input=patch.diff)
        if ran.rc != 0:
            stages: dict[str, set[str]] = {}
            for entry, path in self._listed("-u", patch.paths):
                stages.setdefault(path, set()).add(entry.split()[2])
            # stage 1 is what both sides started from
            places = [f"{path}: {'conflict' if '1' in has else 'both add it'}" for path, has in sorted(stages.items())]
            places = places or [cause for change in patch.changes if (cause := _misfit(change, blobs))]
            places = places or [reason(ran.err)]
            below = f"pin {self.pin[:12]}" if self.commit == self.pin else f"what is on pin {self.pin[:12]} already"
            raise PatchError(
                f"series {series}: {patch.name} conflicts with {below}: {places[0]}",
                next=f"resolve it in a checkout, then dgxlab patch export {series} --tree CHECKOUT",
                details="\n".join(places),
            )
        self._commit(series, patch)

    def overlay(self, series: str, files: Mapping[str, bytes]) -> None:
        """Put new files, content by path, into the tree as one commit.

        Raises:
            PatchError: if the tree has one of them already: what upstream changes in it would be hidden.
        """
        if there := sorted(self._blobs(files)):
            raise PatchError(
                f"series {series}: its overlay {there[0]} is there already at pin {self.pin[:12]}",
                next=f"give the overlay another name in patches/{series}/series, or make a patch of it",
            )
        _add(self.git, {path: self.git.run("hash-object", "-w", "--stdin", input=files[path]) for path in files})
        message = f"overlays of {series}\n\n" + "".join(f"{path}\n" for path in files)
        commit = self.git.run("commit-tree", self.git.run("write-tree"), "-p", self.commit, input=message)
        if gone := {path for _, path in changed_files(self.git, self.commit, commit)} - set(files):
            raise PatchError(
                f"series {series}: an overlay makes a folder of {min(gone)}, a file at pin {self.pin[:12]}",
                next=f"change the overlay lines of patches/{series}/series",
            )
        self.commit = commit

    def format(self) -> bytes:
        """Return the last commit as a patch file."""
        return format_patch(self.git, self.commit)

    def touches(self, paths: Iterable[str]) -> bool:
        """Tell whether what is on top of the pin has changed one of these paths."""
        return bool({path for _, path in changed_files(self.git, self.pin, self.commit)} & set(paths))

    def tree(self) -> str:
        """Return the tree of the last commit."""
        return self.git.run("rev-parse", "--verify", f"{self.commit}^{{tree}}")

    def _commit(self, series: str, patch: Patch) -> None:
        given = self.git.run("mailinfo", "-b", "/dev/null", "/dev/null", input=patch.header)
        fields = dict(line.split(": ", 1) for line in given.splitlines() if ": " in line)
        if missing := [name for name in ("Author", "Email", "Date", "Subject") if not fields.get(name)]:
            raise PatchError(f"series {series}: {patch.name} has no {missing[0].lower()}", next="mend its header")
        names = {"GIT_AUTHOR_NAME": "Author", "GIT_AUTHOR_EMAIL": "Email", "GIT_AUTHOR_DATE": "Date"}
        author = {variable: fields[name] for variable, name in names.items()}
        subject = fields["Subject"].encode(errors="surrogateescape")
        message = (subject + b"\n\n" + patch.body).strip(b"\n") + b"\n"
        tree = self.git.run("write-tree")
        ran = self.git.attempt("commit-tree", tree, "-p", self.commit, input=message, env=author)
        if ran.rc != 0:
            raise PatchError(
                f"series {series}: {patch.name} makes no commit: {reason(ran.err)}", next="mend its header lines"
            )
        # What really changed: our reader of patches is not trusted to see all that git sees.
        changed = changed_files(self.git, self.commit, ran.text)
        for mode, path in changed:
            if path not in patch.paths or mode not in (*MODES, "000000"):
                raise PatchError(
                    f"series {series}: {patch.name} changes {path} to mode {mode}, which it does not announce"
                )
        if not changed:
            raise PatchError(
                f"series {series}: {patch.name} changes nothing at pin {self.pin[:12]}: it is in there already",
                next=f"take it out of patches/{series}/series",
            )
        self.commit = ran.text

    def _check_bases(self, series: str, patch: Patch, blobs: Mapping[str, str]) -> None:
        """Make sure that a patch applies to what it was made on: else git would search for its context after all."""
        bases = {change.old_path: change.old_blob or blobs.get(change.old_path, "") for change in patch.changes}
        bases.pop("", None)
        for path, blob in bases.items():
            if self.git.attempt("cat-file", "-e", blob or NO_BLOB).rc != 0:
                raise PatchError(
                    f"series {series}: {patch.name} cannot be merged: the {path} that it was made on ({blob[:12]}) is "
                    "in no pin here",
                    next=f"dgxlab patch check {series} --pin PIN, with the pin that it was made for, then this again",
                )
        alone = self.git.having(GIT_INDEX_FILE=self._folder / "bases")
        alone.run("read-tree", "--empty")
        _add(alone, bases)
        ran = alone.attempt(*self._apply, input=patch.diff)
        if ran.rc != 0:
            raise _damaged(series, patch, ran.err)

    def _blobs(self, paths: Iterable[str]) -> dict[str, str]:
        """Return blob ids by path for what the tree has at these paths, or below them."""
        return {path: entry.split()[1] for entry, path in self._listed("-s", paths)}

    def _listed(self, flag: str, paths: Iterable[str]) -> Iterator[list[str]]:
        listed = self.git.run("--literal-pathspecs", "ls-files", flag, "-z", "--", *sorted(paths))
        return (row.split("\t", 1) for row in listed.split("\0") if row)


def format_patch(git: Git, commit: str) -> bytes:
    """Return one commit as a patch file, the same bytes for every user."""
    return git.read("format-patch", "-1", "--stdout", *FORMAT, commit)


def changed_files(git: Git, before: str, after: str) -> Sequence[tuple[str, str]]:
    """Return (mode after, path) of each file that differs between two commits; mode 000000 for a removed one."""
    fields = git.run("diff-tree", "-r", "-z", "--raw", "--no-renames", before, after).split("\0")
    return [(entry.split(" ")[1], path) for entry, path in zip(fields[0::2], fields[1::2], strict=False)]


def _add(git: Git, blobs: Mapping[str, str]) -> None:
    """Put files, blob ids by path, into git's index."""
    entries = "".join(f"100644 {blob}\t{path}\0" for path, blob in blobs.items())
    git.run("update-index", "--add", "-z", "--index-info", input=entries)


def _damaged(series: str, patch: Patch, err: str) -> PatchError:
    return PatchError(
        f"series {series}: {patch.name} does not apply, not even to what it was made on: {reason(err)}",
        next=f"mend the patch, or make it anew from a checkout: dgxlab patch export {series} --tree CHECKOUT",
        details=err.strip(),
    )


def _misfit(change: Change, blobs: Mapping[str, str]) -> str:
    """Say why a file is not the very one that the patch was made on, or that its new place is taken; else ""."""
    old, new, base = change.old_path, change.new_path, change.old_blob
    if old and old not in blobs:
        return f"{old} is not there"
    if old and base not in ("", blobs[old]):
        return f"{old} moved: the patch was made on blob {base[:12]}, there it is {blobs[old][:12]}"
    return f"{new} is there already" if new not in ("", old) and new in blobs else ""
