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
from dgxlab.series.conflict import fits, how_moved, merge_conflicts, trials
from dgxlab.series.patchfile import MODES, NO_BLOB, Change, Patch
from dgxlab.source.cache import PinCache
from dgxlab.source.git import Git, reason

FORMAT = ("--zero-commit", "--no-signature", "--full-index", "--no-numbered", "--no-stat", "-U1")
"""How `git format-patch` writes a series, so that a patch file changes only where the patch does."""

APPLY = ("apply", "--cached", "--whitespace=nowarn", "-")


class Stack:
    """Commits on a pin; made by `Stack.on`.

    Attributes:
        pin: What it stands on.
        commit: The last commit, at first the pin.
    """

    def __init__(self, cache: PinCache, pin: str, folder: Path) -> None:
        self.git = cache.git.having(GIT_INDEX_FILE=folder / "index")
        self.pin = self.commit = pin
        self._folder = folder
        # `git apply --cached --3way` writes files all the same when both sides add one: let it, into a folder of ours
        (folder / "work").mkdir()
        self._apply = ("-C", str(folder / "work"), f"--work-tree={folder / 'work'}", *APPLY)
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
        if moved := [change for change in patch.changes if not fits(change, blobs)]:
            raise self._moved(series, patch, moved, blobs)
        ran = self.git.attempt(*self._apply, "--3way", input=patch.diff)
        if ran.rc != 0:
            raise self._damaged(series, patch, trials(self.git, self._folder, patch, blobs), reason(ran.err))
        after = self._blobs(patch.paths)
        for change in patch.changes:
            if change.new_blob not in ("", after.get(change.new_path, NO_BLOB)):
                raise self._edited(series, patch, change)
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
            places = merge_conflicts(self.git, self._folder, patch)
            places = places or [how_moved(change, blobs) for change in patch.changes if not fits(change, blobs)]
            places = places or [reason(ran.err)]
            raise PatchError(
                f"{_where(series, patch)} conflicts with {self._ground()}: {places[0]}",
                next=f"resolve it in a checkout, then dgxlab patch export {series} --tree CHECKOUT",
                details="\n".join(places),
            )
        self._commit(series, patch)

    def overlay(self, series: str, files: Mapping[str, bytes]) -> None:
        """Put new files, content by path, into the tree as one commit.

        Raises:
            PatchError: if the tree has one of them already: nobody would see what upstream changed in it.
        """
        if there := sorted(self._blobs(files)):
            raise PatchError(
                f"series {series}: its overlay {there[0]} is there already at pin {self.pin[:12]}",
                next=f"give the overlay another name in patches/{series}/series, or make a patch of it",
            )
        blobs = {path: self.git.run("hash-object", "-w", "--stdin", input=files[path]) for path in files}
        entries = "".join(f"100644 {blob}\t{path}\0" for path, blob in blobs.items())
        self.git.run("update-index", "--add", "-z", "--index-info", input=entries)
        message = f"overlays of {series}\n\n" + "".join(f"{path}\n" for path in files)
        commit = self.git.run("commit-tree", self._write_tree(), "-p", self.commit, input=message)
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
        """Return the tree that it all gives."""
        return self.git.run("rev-parse", "--verify", f"{self.commit}^{{tree}}")

    def _commit(self, series: str, patch: Patch) -> None:
        author, message = self._message(series, patch)
        made = self.git.attempt("commit-tree", self._write_tree(), "-p", self.commit, input=message, env=author)
        if made.rc != 0:
            raise PatchError(
                f"{_where(series, patch)} makes no commit: {reason(made.err)}", next="mend its header lines"
            )
        self._check_touched(series, patch, made.text)
        self.commit = made.text

    def _message(self, series: str, patch: Patch) -> tuple[dict[str, str], bytes]:
        """Return the author as environment variables, and the commit message."""
        given = self.git.run("mailinfo", "-b", "/dev/null", "/dev/null", input=patch.header)
        fields = dict(line.split(": ", 1) for line in given.splitlines() if ": " in line)
        if missing := [name for name in ("Author", "Email", "Date", "Subject") if not fields.get(name)]:
            raise PatchError(f"{_where(series, patch)} has no {missing[0].lower()}", next="mend its header")
        author = {f"GIT_AUTHOR_{name}": fields[f] for name, f in zip(_AUTHOR, ("Author", "Email", "Date"), strict=True)}
        subject = fields["Subject"].encode(errors="surrogateescape")
        return author, (subject + b"\n\n" + patch.body).strip(b"\n") + b"\n"

    def _check_touched(self, series: str, patch: Patch, commit: str) -> None:
        """Look at what really changed: our reader of patches is not trusted to see all that git sees."""
        touched = changed_files(self.git, self.commit, commit)
        for mode, path in touched:
            if path not in patch.paths or mode not in (*MODES, "000000"):
                raise PatchError(f"{_where(series, patch)} changes {path} to mode {mode}, which it does not announce")
        if not touched:
            raise PatchError(
                f"{_where(series, patch)} changes nothing at pin {self.pin[:12]}: it is in there already",
                next=f"take it out of patches/{series}/series",
            )

    def _check_bases(self, series: str, patch: Patch, blobs: Mapping[str, str]) -> None:
        """Make sure that a patch applies to what it was made on: else git would search for its context after all."""
        bases = {change.old_path: change.old_blob or blobs.get(change.old_path, "") for change in patch.changes}
        bases = {path: blob for path, blob in bases.items() if path}
        for path, blob in bases.items():
            if self.git.attempt("cat-file", "-e", blob or NO_BLOB).rc != 0:
                raise PatchError(
                    f"{_where(series, patch)} cannot be merged: the {path} that it was made on ({blob[:12]}) is in no "
                    "pin here",
                    next=f"dgxlab patch check {series} --pin PIN, with the pin that it was made for, then this again",
                )
        alone = self.git.having(GIT_INDEX_FILE=self._folder / "bases")
        alone.run("read-tree", "--empty")
        entries = "".join(f"100644 {blob}\t{path}\0" for path, blob in bases.items())
        alone.run("update-index", "--add", "-z", "--index-info", input=entries)
        ran = alone.attempt(*self._apply, input=patch.diff)
        if ran.rc != 0:
            raise self._damaged(series, patch, trials(self.git, self._folder, patch, bases), reason(ran.err))

    def _blobs(self, paths: Iterable[str]) -> dict[str, str]:
        """Return blob ids by path for what the tree has at these paths, or below them."""
        listed = self.git.run("--literal-pathspecs", "ls-files", "-s", "-z", "--", *sorted(paths))
        rows = (row.split("\t", 1) for row in listed.split("\0") if row)
        return {path: entry.split(" ")[1] for entry, path in rows}

    def _write_tree(self) -> str:
        return self.git.run("write-tree")

    def _ground(self) -> str:
        pin = f"pin {self.pin[:12]}"
        return pin if self.commit == self.pin else f"what is on {pin} already"

    def _moved(self, series: str, patch: Patch, moved: Sequence[Change], blobs: Mapping[str, str]) -> PatchError:
        causes = [how_moved(change, blobs) for change in moved]
        return PatchError(
            f"{_where(series, patch)} does not apply to pin {self.pin[:12]}: {causes[0]}",
            next=f"dgxlab patch refresh {series} --pin {self.pin}",
            details="\n".join(causes + trials(self.git, self._folder, patch, blobs)),
        )

    def _damaged(self, series: str, patch: Patch, places: Sequence[str], cause: str) -> PatchError:
        first = next((place for place in places if place.endswith("does not apply")), cause)
        return PatchError(
            f"{_where(series, patch)} does not apply, not even to what it was made on: {first}",
            next=f"mend the patch, or make it anew from a checkout: dgxlab patch export {series} --tree CHECKOUT",
            details="\n".join(places or [cause]),
        )

    def _edited(self, series: str, patch: Patch, change: Change) -> PatchError:
        return PatchError(
            f"{_where(series, patch)} does not give the {change.path} that it names: it was edited by hand; read "
            "what a refresh makes of it before you use it",
            next=f"dgxlab patch refresh {series} --pin {self.pin}",
        )


_AUTHOR = ("NAME", "EMAIL", "DATE")


def format_patch(git: Git, commit: str) -> bytes:
    """Return one commit as a patch file, the same bytes for everybody."""
    return git.read("format-patch", "-1", "--stdout", *FORMAT, commit)


def changed_files(git: Git, before: str, after: str) -> list[tuple[str, str]]:
    """Return (mode after, path) of each file that differs between two commits; mode 000000 for a removed one."""
    fields = git.run("diff-tree", "-r", "-z", "--raw", "--no-renames", before, after).split("\0")
    return [(entry.split(" ")[1], path) for entry, path in zip(fields[0::2], fields[1::2], strict=False)]


def _where(series: str, patch: Patch) -> str:
    return f"series {series}: {patch.name}"
