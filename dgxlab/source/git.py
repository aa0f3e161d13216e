"""The git program on one repository.

What must give the same objects everywhere runs without the user's and the system's configuration, attributes, hooks
and time zone. What talks to a remote or reads the user's own checkout keeps them: proxies, credentials, url rewriting,
ignore rules. No variable that names a repository is inherited, so dgxlab works from inside a git hook too.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from dgxlab.errors import SpecError
from dgxlab.source import programs
from dgxlab.source.programs import Outcome, disk_trouble

PLACES = frozenset(
    {
        *("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_OBJECT_DIRECTORY", "GIT_ALTERNATE_OBJECT_DIRECTORIES"),
        *("GIT_COMMON_DIR", "GIT_NAMESPACE", "GIT_PREFIX", "GIT_SHALLOW_FILE", "GIT_GRAFT_FILE", "GIT_QUARANTINE_PATH"),
        *("GIT_REPLACE_REF_BASE", "GIT_INTERNAL_SUPER_PREFIX", "GIT_IMPLICIT_WORK_TREE"),
        *("GIT_LITERAL_PATHSPECS", "GIT_GLOB_PATHSPECS", "GIT_ICASE_PATHSPECS"),
    }
)
"""Variables that say where a repository is and how paths are read; never inherited."""

NOWHERE = {
    "HOME": os.devnull,
    "XDG_CONFIG_HOME": os.devnull,
    "GIT_CONFIG_NOSYSTEM": "1",
    "GIT_CONFIG_GLOBAL": os.devnull,
    "GIT_ATTR_NOSYSTEM": "1",
    "GIT_NO_REPLACE_OBJECTS": "1",
    "GIT_AUTHOR_NAME": "dgxlab",
    "GIT_AUTHOR_EMAIL": "dgxlab@localhost",
    "GIT_AUTHOR_DATE": "946684800 +0000",
    "GIT_COMMITTER_NAME": "dgxlab",
    "GIT_COMMITTER_EMAIL": "dgxlab@localhost",
    "GIT_COMMITTER_DATE": "946684800 +0000",
    "TZ": "UTC",
}
"""An environment in which a command gives the same objects for every user; HOME too, for git before 2.32."""

QUIET = (
    *("-c", "gc.auto=0", "-c", "maintenance.auto=false"),
    *("-c", f"core.hooksPath={os.devnull}", "-c", "core.fsmonitor=false"),
)
"""Never a program that a repository names, never housekeeping that removes what no ref names."""

READ_ONLY = {"GIT_OPTIONAL_LOCKS": "0", "GIT_ALLOW_PROTOCOL": "none"}
"""Keeps git from writing an index, and from fetching what a repository lacks with a program that it names."""


class GitError(SpecError):
    """git ended with an error that nothing above expected: a full disk, a damaged cache, a git that is too old."""


@dataclass(frozen=True)
class Git:
    """git on the repository at `dir`.

    Attributes:
        dir: A git directory, or, for `Git.checkout`, a working tree.
        settings: Environment variables on top, e.g. GIT_INDEX_FILE.
        user: Whether the user's own configuration counts.
        inside: Whether `dir` is a working tree, so that git finds its repository by itself.
    """

    dir: Path
    settings: Mapping[str, str] = field(default_factory=dict)
    user: bool = False
    inside: bool = False

    @classmethod
    def checkout(cls, dir: Path) -> Git:
        """Return git on any working tree, with the user's configuration; it writes nothing and runs nothing there."""
        return cls(dir, READ_ONLY, user=True, inside=True)

    def having(self, *, user: bool | None = None, **settings: str | Path) -> Git:
        """Return the same git with more environment variables, or another kind of configuration."""
        return replace(
            self,
            settings={**self.settings, **{name: str(value) for name, value in settings.items()}},
            user=self.user if user is None else user,
        )

    def run(self, *args: str, input: str | bytes = b"", env: Mapping[str, str] | None = None) -> str:
        """Run a git command and return its stdout as text, without the last newline.

        Raises:
            GitError: if git says no.
        """
        return self._checked(args, input, env).text

    def read(self, *args: str, input: str | bytes = b"", env: Mapping[str, str] | None = None) -> bytes:
        """Run a git command and return its stdout as it is.

        Raises:
            GitError: if git says no.
        """
        return self._checked(args, input, env).out

    def attempt(self, *args: str, input: str | bytes = b"", env: Mapping[str, str] | None = None) -> Outcome:
        """Run a git command that may fail and return how it ended."""
        text = input.encode(errors="surrogateescape") if isinstance(input, str) else input
        return programs.run(self.argv(*args), input=text, env=self.env(env))

    def stream(self, *args: str, input: str = "") -> Iterator[bytes]:
        """Run a git command and yield its stdout in pieces.

        Raises:
            GitError: after the last piece, if git says no: what was yielded is then not whole.
        """
        return programs.stream(
            self.argv(*args), input=input.encode(), env=self.env(), failed=partial(self.failed, args)
        )

    def follow(self, *args: str, on_line: Callable[[str], None], silence_s: float = 120.0) -> Outcome:
        """Run a git command that shows progress and return how it ended."""
        return programs.follow(self.argv(*args), on_line=on_line, env=self.env(), silence_s=silence_s)

    def argv(self, *args: str) -> list[str]:
        """Return the whole command line."""
        place = ("-C", str(self.dir)) if self.inside else (f"--git-dir={self.dir}",)
        return ["git", *place, *QUIET, *args]

    def env(self, extra: Mapping[str, str] | None = None) -> dict[str, str]:
        """Return the whole environment."""
        inherited = programs.surroundings("GIT_" if self.user else "GIT_EXEC_PATH")
        inherited = {name: value for name, value in inherited.items() if name not in PLACES}
        # git's messages are read, so they must be English; no terminal is there to ask for a password
        common = {"LC_ALL": "C", "LANGUAGE": "C", "GIT_TERMINAL_PROMPT": "0"}
        return {**inherited, **common, **({} if self.user else NOWHERE), **self.settings, **(extra or {})}

    def failed(self, args: Sequence[str], outcome: Outcome) -> GitError:
        """Return the error for a command that ended so."""
        command = next((arg for arg in args if not arg.startswith("-")), "")
        return GitError(
            f"git {command} failed in {self.dir}: {reason(outcome.err)}",
            next="make room on that disk" if disk_trouble(outcome.err) else "",
            details=outcome.err.strip(),
        )

    def _checked(self, args: Sequence[str], input: str | bytes, env: Mapping[str, str] | None) -> Outcome:
        outcome = self.attempt(*args, input=input, env=env)
        if outcome.rc != 0:
            raise self.failed(args, outcome)
        return outcome


def reason(err: str) -> str:
    r"""Return the one line of git's stderr that names the cause.

    >>> reason("Permission denied (publickey).\nfatal: Could not read from remote repository.\n\nPlease make sure")
    'Permission denied (publickey).'
    """
    lines = [line.strip() for line in err.splitlines() if line.strip()]
    causes = [i for i, line in enumerate(lines) if line.startswith(("fatal:", "error:", "ERROR:"))]
    if not causes:
        return lines[-1] if lines else "it gave no reason"
    first = causes[0]
    if "Could not read from remote repository" in lines[first] and first > 0:
        return lines[first - 1]
    return lines[first].split(": ", 1)[1].removeprefix("remote error: ")
