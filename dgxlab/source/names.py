"""Commits by the names that people use: a tag, a branch, or the beginning of an id."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from dgxlab.errors import HostError, SpecError, command
from dgxlab.model import COMMIT, UPSTREAM
from dgxlab.source.cache import URL, PinCache, without_secrets
from dgxlab.source.git import Git, reason
from dgxlab.source.packages import Progress, SourceError

_START = re.compile(r"[0-9a-f]{7,39}")  # of an id; shorter ones are rarely unique


class _NoSuchName(SourceError):
    """The source answered, and does not have the name."""


class _NoAnswer(SourceError):
    """The source cannot be reached or read."""


def full_id(name: str, sources: Sequence[str], cache: PinCache, on_progress: Progress) -> str:
    """Return the full id of the commit that a tag, a branch or the beginning of an id names; a full id is returned.

    A tag goes before a branch. Beginnings of ids are looked up among the pins of the cache, in clones on this machine,
    and among the tags and branches of git URLs, which do not tell other commits.

    Of the `sources`, as in `PinCache.ensure`, the first one that knows the name decides; `on_progress` is called with a
    line for each that is asked.

    Raises:
        SpecError: if none knows the name, or more than one commit begins so; `details` has each source's cause.
        HostError: if no source answered that has names of commits.
    """
    if COMMIT.fullmatch(name):
        return name
    if _START.fullmatch(name) and (known := _beginning(name, {pin: pin for pin in cache.pins()})):
        return known
    causes: dict[str, SourceError] = {}
    for source in sources:
        shown = without_secrets(source)
        on_progress(f"asking {shown} for {name}")
        try:
            return _look_up(name, source, cache)
        except SourceError as error:
            causes[shown] = error
    details = {shown: f"{shown}: {error}" for shown, error in causes.items()}
    answered = [shown for shown, error in causes.items() if isinstance(error, _NoSuchName)]
    silent = [shown for shown, error in causes.items() if isinstance(error, _NoAnswer)]
    look = command("git", "ls-remote", "--heads", "--tags", [*answered, *silent, UPSTREAM][0])
    if silent and not answered:
        message = f"{name!r} could not be looked up: {details[silent[0]]}"
        instead = f"a clone here can be asked instead: {command('dgxlab', 'pin', 'id', name)} --source FOLDER"
        raise HostError(message, next=look, details="\n".join([*details.values(), instead]))
    message = f"no source has a tag, a branch or a commit {name!r}"
    raise SpecError(message, next=look, details="\n".join(details.values()))


def _look_up(name: str, source: str, cache: PinCache) -> str:
    """Return the full id that a source has for a name; SourceError with the cause if it has none."""
    local = Path(source).expanduser()
    if local.is_dir():
        resolved = Git.checkout(local).attempt("rev-parse", "--verify", "--end-of-options", f"{name}^{{commit}}")
        if resolved.rc != 0:
            raise _NoSuchName("the clone has no such tag, branch or commit")
        return resolved.text
    if not URL.fullmatch(source):
        raise SourceError("a package has one commit, and no names of commits")
    refs = dict(_remote_refs(name, source, cache.git))
    for ref in (f"refs/tags/{name}^{{}}", f"refs/tags/{name}", f"refs/heads/{name}"):  # ^{}: what a tag object names
        if ref in refs:
            return refs[ref]
    if commit := _beginning(name, refs):
        return commit
    raise _NoSuchName(f"it has no tag or branch {name}")


def _remote_refs(name: str, url: str, git: Git) -> Iterator[tuple[str, str]]:
    """Yield the tags and branches of a URL with their commits: those of that name, all for the beginning of an id."""
    wanted = [] if _START.fullmatch(name) else [f"refs/tags/{name}", f"refs/tags/{name}^{{}}", f"refs/heads/{name}"]
    lines: list[str] = []
    ran = git.configured(user=True).follow("ls-remote", "--heads", "--tags", "--", url, *wanted, on_line=lines.append)
    if ran.rc != 0:
        raise _NoAnswer(reason(ran.err).replace(url, without_secrets(url)))
    for line in lines:
        commit, _, ref = line.partition("\t")
        if COMMIT.fullmatch(commit):
            yield ref, commit


def _beginning(name: str, refs: Mapping[str, str]) -> str:
    """Return the only commit whose id begins with `name`, "" if none does; SpecError if several do."""
    begin = sorted({commit for commit in refs.values() if commit.startswith(name)})
    if len(begin) > 1:
        raise SpecError(f"{len(begin)} commits begin with {name}", next=command("dgxlab", "pin", begin[0]))
    return "".join(begin)
