"""A pin with patches on top, built in a private index: without a working tree, and without touching the user's files.

A patch with one line of context can apply to the wrong function without an error. So a patch fits only if every file
is the blob that the patch was made on, and becomes the blob that the patch names. `merge` also accepts changed files,
by a three-way merge with that blob as the base, never by searching for context.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from dgxlab.errors import PatchError
from dgxlab.series.patchfile import MODES, NO_BLOB, Patch
from dgxlab.series.series import Series
from dgxlab.source.cache import PinCache
from dgxlab.source.git import Git, reason

_FORMAT = ("--zero-commit", "--no-signature", "--full-index", "--no-numbered", "--no-stat", "-U1")
"""How `git format-patch` writes a series, so that a patch file changes only where the patch does."""


class Stack:
    """A pin and the patches applied to it, a commit each; `commit` is the last one, at first the pin."""

    def __init__(self, cache: PinCache, pin: str, folder: Path, *, beside: bool) -> None:
        self.git = cache.git.configured(GIT_INDEX_FILE=folder / "index")
        self.pin = self.commit = pin
        self._folder, self._beside = folder, beside
        # `git apply --cached --3way` writes files all the same when both sides add one: let it, into a folder of ours
        work = folder / "work"
        work.mkdir()
        self._apply = ("-C", str(work), f"--work-tree={work}", "apply", "--cached", "--whitespace=nowarn", "-")
        self.git.run("read-tree", pin)

    @classmethod
    @contextmanager
    def on(cls, cache: PinCache, pin: str, *, beside: bool = False) -> Iterator[Stack]:
        """Yield a stack without patches on a pin that is in the cache; `beside` if other pins need the patches too."""
        with cache.scratch() as folder:
            yield cls(cache, pin, folder, beside=beside)

    def push(self, series: Series, patch: Patch) -> None:
        """Apply a patch of a series, as a commit by the patch's author; PatchError unless it fits."""
        refresh = f"dgxlab patch refresh {series.folder} --pin {self.pin}"
        if moved := _misfits(patch, self._blobs(patch.paths)):
            problem = f"does not apply to pin {self.pin[:12]}: {moved[0]}"
            raise _refused(series, patch, problem, refresh + " --beside" * self._beside, "\n".join(moved))
        ran = self.git.attempt(*self._apply, "--3way", input=patch.diff)
        if ran.rc != 0:
            raise _damaged(series, patch, ran.err)
        after = self._blobs(patch.paths)
        for change in patch.changes:
            if change.new_blob not in ("", after.get(change.new_path, NO_BLOB)):
                problem = f"does not give the {change.new_path or change.old_path} that it names: it was edited by hand"
                raise _refused(series, patch, f"{problem}; read what a refresh makes of it before you use it", refresh)
        self._commit(series, patch)

    def merge(self, series: Series, patch: Patch) -> None:
        """Apply a patch as `push` does, but merge files that are not the patch's blobs; PatchError on a conflict."""
        blobs = self._blobs(patch.paths)
        self._check_bases(series, patch, blobs)
        ran = self.git.attempt(*self._apply, "--3way", input=patch.diff)
        if ran.rc != 0:
            stages: dict[str, set[str]] = {}
            for entry, path in self._listed("-u", patch.paths):
                stages.setdefault(path, set()).add(entry.split()[2])
            # stage 1 is the common base
            places = [f"{path}: {'conflict' if '1' in has else 'both add it'}" for path, has in sorted(stages.items())]
            places = places or _misfits(patch, blobs) or [reason(ran.err)]
            below = f"pin {self.pin[:12]}" if self.commit == self.pin else f"what is on pin {self.pin[:12]} already"
            mend = f"resolve it in a checkout, then dgxlab patch export {series.folder} --tree CHECKOUT"
            raise _refused(series, patch, f"conflicts with {below}: {places[0]}", mend, "\n".join(places))
        self._commit(series, patch)

    def overlay(self, series: Series) -> None:
        """Add the overlays of a series, if any, as one commit; PatchError if one would change a file."""
        files = {overlay.dest: overlay.content for overlay in series.overlays}
        if not files:
            return
        lines = f"{series.place}/series"
        blobs = {path: self.git.run("hash-object", "-w", "--stdin", input=content) for path, content in files.items()}
        # series may share a kernel's file
        if other := sorted(path for path, blob in self._blobs(files).items() if blob != blobs.get(path)):
            problem = f"series {series.name}: its overlay {other[0]} is there already at pin {self.pin[:12]}"
            raise PatchError(problem, next=f"give the overlay another name in {lines}, or make a patch of it")
        _add(self.git, blobs)
        message = f"overlays of {series.name}\n\n" + "".join(f"{path}\n" for path in files)
        commit = self.git.run("commit-tree", self.git.run("write-tree"), "-p", self.commit, input=message)
        if gone := {path for _, path in changed_files(self.git, self.commit, commit)} - set(files):
            problem = f"an overlay makes a folder of {min(gone)}, a file at pin {self.pin[:12]}"
            raise PatchError(f"series {series.name}: {problem}", next=f"change the overlay lines of {lines}")
        self.commit = commit

    def format(self) -> bytes:
        """Return the last commit as a patch file."""
        return format_patch(self.git, self.commit)

    def tree(self) -> str:
        """Return the id of the last commit's tree."""
        return self.git.run("rev-parse", "--verify", f"{self.commit}^{{tree}}")

    def _commit(self, series: Series, patch: Patch) -> None:
        header, body = patch.message
        given = self.git.run("mailinfo", "-b", "/dev/null", "/dev/null", input=header)
        fields = dict(line.split(": ", 1) for line in given.splitlines() if ": " in line)
        if missing := [name for name in ("Author", "Email", "Date", "Subject") if not fields.get(name)]:
            raise _refused(series, patch, f"has no {missing[0].lower()}", "mend its header")
        names = {"GIT_AUTHOR_NAME": "Author", "GIT_AUTHOR_EMAIL": "Email", "GIT_AUTHOR_DATE": "Date"}
        author = {variable: fields[name] for variable, name in names.items()}
        subject = fields["Subject"].encode(errors="surrogateescape")
        message = (subject + b"\n\n" + body).strip(b"\n") + b"\n"
        tree = self.git.run("write-tree")
        ran = self.git.attempt("commit-tree", tree, "-p", self.commit, input=message, env=author)
        if ran.rc != 0:
            raise _refused(series, patch, f"makes no commit: {reason(ran.err)}", "mend its header lines")
        # The actual changes: our patch reader might miss something that git applies.
        changed = changed_files(self.git, self.commit, ran.text)
        for mode, path in changed:
            if path not in patch.paths or mode not in (*MODES, "000000"):
                raise _refused(series, patch, f"changes {path} to mode {mode}, which it does not announce")
        if not changed:
            problem = f"changes nothing at pin {self.pin[:12]}: it is in there already"
            raise _refused(series, patch, problem, f"take it out of {series.place}/series")
        self.commit = ran.text

    def _check_bases(self, series: Series, patch: Patch, blobs: Mapping[str, str]) -> None:
        """Check that a patch applies to its base blobs: otherwise git would search for its context."""
        bases = {change.old_path: change.old_blob or blobs.get(change.old_path, "") for change in patch.changes}
        bases.pop("", None)
        for path, blob in bases.items():
            if self.git.attempt("cat-file", "-e", blob or NO_BLOB).rc != 0:
                problem = f"cannot be merged: the {path} that it was made on ({blob[:12]}) is in no pin here"
                mend = f"dgxlab patch check {series.folder} --pin PIN, with the pin it was made for, then this again"
                raise _refused(series, patch, problem, mend)
        alone = self.git.configured(GIT_INDEX_FILE=self._folder / "bases")
        alone.run("read-tree", "--empty")
        _add(alone, bases)
        ran = alone.attempt(*self._apply, input=patch.diff)
        if ran.rc != 0:
            raise _damaged(series, patch, ran.err)

    def _blobs(self, paths: Iterable[str]) -> dict[str, str]:
        return {path: entry.split()[1] for entry, path in self._listed("-s", paths)}

    def _listed(self, flag: str, paths: Iterable[str]) -> Iterator[list[str]]:
        listed = self.git.run("--literal-pathspecs", "ls-files", flag, "-z", "--", *sorted(paths))
        return (row.split("\t", 1) for row in listed.split("\0") if row)


def format_patch(git: Git, commit: str) -> bytes:
    """Return a commit as the content of a patch file, the same bytes for every user."""
    return git.read("format-patch", "-1", "--stdout", *_FORMAT, commit)


def changed_files(git: Git, before: str, after: str) -> Sequence[tuple[str, str]]:
    """Return (mode after, path) of each file that differs between two commits; mode 000000 for a removed one."""
    fields = git.run("diff-tree", "-r", "-z", "--raw", "--no-renames", before, after).split("\0")
    return [(entry.split(" ")[1], path) for entry, path in zip(fields[0::2], fields[1::2], strict=False)]


def _add(git: Git, blobs: Mapping[str, str]) -> None:
    entries = "".join(f"100644 {blob}\t{path}\0" for path, blob in blobs.items())
    git.run("update-index", "--add", "-z", "--index-info", input=entries)


def _refused(series: Series, patch: Patch, problem: str, mend: str = "", details: str = "") -> PatchError:
    return PatchError(f"series {series.name}: {patch.name} {problem}", next=mend, details=details)


def _damaged(series: Series, patch: Patch, err: str) -> PatchError:
    problem = f"does not apply, not even to what it was made on: {reason(err)}"
    mend = f"mend the patch, or make it anew from a checkout: dgxlab patch export {series.folder} --tree CHECKOUT"
    return _refused(series, patch, problem, mend)


def _misfits(patch: Patch, blobs: Mapping[str, str]) -> list[str]:
    """Return files that differ from the patch's base, and new files whose path is taken."""
    problems = []
    for change in patch.changes:
        old, new, base = change.old_path, change.new_path, change.old_blob
        if old and old not in blobs:
            problems.append(f"{old} is not there")
        elif old and base not in ("", blobs[old]):
            problems.append(f"{old} moved: the patch was made on blob {base[:12]}, there it is {blobs[old][:12]}")
        elif new not in ("", old) and new in blobs:
            problems.append(f"{new} is there already")
    return problems
