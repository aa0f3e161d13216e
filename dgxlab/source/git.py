"""The git program on one repository.

Commands that must give the same objects everywhere run without the user's and the system's configuration, attributes,
hooks and time zone. Commands that talk to a remote or read the user's checkout keep them: proxies, credentials, url
rewriting, ignore rules. No variable that names a repository is inherited, so dgxlab also works inside a git hook.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from dgxlab.errors import SpecError
from dgxlab.source import programs
from dgxlab.source.programs import Completed, disk_trouble

_PLACES = re.compile(
    r"GIT_(DIR|WORK_TREE|INDEX_FILE|OBJECT_DIRECTORY|ALTERNATE_OBJECT_DIRECTORIES|COMMON_DIR|NAMESPACE|PREFIX"
    r"|SHALLOW_FILE|GRAFT_FILE|QUARANTINE_PATH|REPLACE_REF_BASE|INTERNAL_SUPER_PREFIX|IMPLICIT_WORK_TREE|\w+_PATHSPECS)"
)
"""Variables that tell git where a repository is and how to read paths; never inherited."""

_NOWHERE = {
    "HOME": os.devnull,
    "XDG_CONFIG_HOME": os.devnull,
    "TZ": "UTC",
    "GIT_CONFIG_NOSYSTEM": "1",
    "GIT_CONFIG_GLOBAL": os.devnull,
    "GIT_ATTR_NOSYSTEM": "1",
    "GIT_NO_REPLACE_OBJECTS": "1",
    **{f"GIT_{role}_NAME": "dgxlab" for role in ("AUTHOR", "COMMITTER")},
    **{f"GIT_{role}_EMAIL": "dgxlab@localhost" for role in ("AUTHOR", "COMMITTER")},
    **{f"GIT_{role}_DATE": "946684800 +0000" for role in ("AUTHOR", "COMMITTER")},
}
"""An environment in which a command gives the same objects for every user; HOME too, for git before 2.32."""

_QUIET = (
    *("-c", "gc.auto=0", "-c", "maintenance.auto=false"),
    *("-c", f"core.hooksPath={os.devnull}", "-c", "core.fsmonitor=false"),
)
"""Settings against running a repository's programs, and against garbage collection of objects without a ref."""

_READ_ONLY = {"GIT_OPTIONAL_LOCKS": "0", "GIT_ALLOW_PROTOCOL": "none"}
"""Keeps git from writing an index, and from fetching missing objects with a program named in the repository."""


class GitError(SpecError):
    """A git command failed that should not: the disk is full, the cache is damaged, git is too old."""


@dataclass(frozen=True)
class Git:
    """Runs git commands on one repository."""

    dir: Path  # the git directory, or a working tree if `is_work_tree`
    settings: Mapping[str, str] = field(default_factory=dict)  # further environment variables, as GIT_INDEX_FILE
    user: bool = False  # whether git reads the user's own configuration
    is_work_tree: bool = False

    @classmethod
    def checkout(cls, dir: Path) -> Git:
        """Return git to read a working tree, with the user's configuration; no program of the repository runs."""
        return cls(dir, _READ_ONLY, user=True, is_work_tree=True)

    def configured(self, *, user: bool | None = None, **settings: str | Path) -> Git:
        """Return git on the same repository, with more environment variables or another `user`."""
        more = {name: str(value) for name, value in settings.items()}
        return replace(self, settings={**self.settings, **more}, user=self.user if user is None else user)

    def run(self, *args: str, input: str | bytes = b"", env: Mapping[str, str] | None = None) -> str:
        """Run a git command and return its stdout as text, without the last newline; GitError if it fails."""
        return self.read(*args, input=input, env=env).decode(errors="surrogateescape").removesuffix("\n")

    def read(self, *args: str, input: str | bytes = b"", env: Mapping[str, str] | None = None) -> bytes:
        """Run a git command and return its stdout as it is; GitError if it fails."""
        outcome = self.attempt(*args, input=input, env=env)
        if outcome.rc != 0:
            raise self._failed(args, outcome.err)
        return outcome.out

    def attempt(self, *args: str, input: str | bytes = b"", env: Mapping[str, str] | None = None) -> Completed:
        """Run a git command that may fail, and return its outcome."""
        given = input.encode(errors="surrogateescape") if isinstance(input, str) else input
        return programs.run(self._argv(args), input=given, env=self.env(env))

    def follow(self, *args: str, on_line: Callable[[str], None]) -> Completed:
        """Run a git command that may fail, call `on_line` with each line of its progress, and return its outcome."""
        return programs.follow(self._argv(args), on_line=on_line, env=self.env())

    def env(self, extra: Mapping[str, str] | None = None) -> dict[str, str]:
        """Return all environment variables of a command, with `extra` ones."""
        inherited = programs.environment("GIT_" if self.user else "GIT_EXEC_PATH")
        inherited = {name: value for name, value in inherited.items() if not _PLACES.fullmatch(name)}
        # git's messages are parsed, so they must be English; there is no terminal to ask for a password
        common = {"LC_ALL": "C", "LANGUAGE": "C", "GIT_TERMINAL_PROMPT": "0"}
        return {**inherited, **common, **({} if self.user else _NOWHERE), **self.settings, **(extra or {})}

    def _argv(self, args: Sequence[str]) -> list[str]:
        place = ("-C", str(self.dir)) if self.is_work_tree else (f"--git-dir={self.dir}",)
        return ["git", *place, *_QUIET, *args]

    def _failed(self, args: Sequence[str], err: str) -> GitError:
        command = next((arg for arg in args if not arg.startswith("-")), "")
        mend = "make room on that disk" if disk_trouble(err) else ""
        return GitError(f"git {command} failed in {self.dir}: {reason(err)}", next=mend, details=err.strip())


def reason(err: str) -> str:
    """Return the line of git's stderr that names the cause; if ssh failed, that is ssh's own line."""
    lines = [line.strip() for line in err.splitlines() if line.strip()]
    causes = [i for i, line in enumerate(lines) if line.startswith(("fatal:", "error:", "ERROR:"))]
    if not causes:
        return lines[-1] if lines else "it gave no reason"
    first = causes[0]
    if "Could not read from remote repository" in lines[first] and first > 0:
        return lines[first - 1]
    return lines[first].split(": ", 1)[1].removeprefix("remote error: ")
