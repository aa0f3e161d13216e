"""Source code on the host: a bare git repository that receives packs, and worktrees that switch between commits.

A host needs no internet: the client sends the objects of a pin once, and the few objects of a patched tree each time.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from dgxlab.agent.boot import flush, me, settle
from dgxlab.agent.environment import base_env
from dgxlab.errors import AGAIN, RemoteError

CUT_PACK_S = 3600.0  # a partial pack that has not grown for this long was left by a cut connection


@dataclass(frozen=True)
class Objects:
    """The bare repository of a host, at `path`."""

    path: Path

    def missing(self, commits: Sequence[str]) -> list[str]:
        """Return those commits that the repository lacks: all if it is damaged, and then it is renamed."""
        if not self.path.exists():
            return list(commits)
        ran = self._run("cat-file", "--batch-check=%(objectname)", input="\n".join(commits))
        if re.search("^(error|fatal):", ran.stderr, re.MULTILINE) and self._set_aside():
            return list(commits)
        if ran.returncode != 0:
            raise RemoteError(f"git cat-file failed on the host: {ran.stderr.strip() or 'no reason given'}")
        return [commit for commit, line in zip(commits, ran.stdout.splitlines(), strict=True) if line != commit]

    def receive(self, stream: IO[bytes]) -> None:
        """Store a commit's objects from a stream: a JSON line, then a git pack.

        The line has `commit`, and `shallow`: the commits whose parents are not sent. Raises RemoteError if the pack or
        the commit's tree is incomplete, as after a cut connection.
        """
        header = json.loads(stream.readline())
        self._make()
        for path in self.path.glob("objects/pack/tmp_*"):  # left by index-pack when a stream was cut
            with contextlib.suppress(FileNotFoundError):
                if time.time() - path.stat().st_mtime > CUT_PACK_S:  # another client may be sending a younger one
                    path.unlink()
        self._add_shallow(header["shallow"])
        argv, pipe, null = self._argv("index-pack", "--stdin", "--fix-thin"), subprocess.PIPE, subprocess.DEVNULL
        with subprocess.Popen(argv, stdin=pipe, stdout=null, stderr=pipe, env=_git_env()) as git:
            assert git.stdin is not None
            assert git.stderr is not None
            with contextlib.suppress(BrokenPipeError):
                shutil.copyfileobj(stream, git.stdin, 1 << 20)
                git.stdin.close()
            reason = git.stderr.read().decode(errors="replace").strip()
        if git.returncode != 0:
            raise self._failure(f"the sources did not arrive whole: {reason or 'the stream was cut'}", next=AGAIN)
        self._git("rev-list", "--quiet", "--objects", "-1", header["commit"])
        self._git("update-ref", f"refs/dgxlab/{header['commit']}", header["commit"])
        flush(self.path)

    def check_out(self, worktree: Path, index: Path, commit: str, tree: str) -> None:
        """Switch a worktree to a commit, and write only files that differ; `index` is the path of its git index.

        Raises RemoteError if the hash of the resulting tree is not `tree`.
        """
        # the index is outside the worktree, which has no .git: cmake would reconfigure whenever it changes
        worktree.mkdir(parents=True, exist_ok=True)
        env = {"GIT_INDEX_FILE": str(index), "GIT_WORK_TREE": str(worktree)}
        self._git("read-tree", "--reset", "-u", commit, env=env, at=worktree)
        # files that were changed by hand are restored, added ones are removed
        self._run("update-index", "-q", "--really-refresh", env=env, at=worktree)
        changed = self._git("diff-files", "--name-only", "-z", env=env, at=worktree)
        if changed:
            self._git("checkout-index", "-f", "-z", "--stdin", env=env, at=worktree, input=changed)
        self._git("clean", "-ffdxq", env=env, at=worktree)
        written = self._git("write-tree", env=env, at=worktree).strip()
        if written != tree:
            raise RemoteError(f"the host checked out tree {written[:12]}, the plan names {tree[:12]}", next=AGAIN)

    def names(self, commit: str) -> str:
        """Return the paths of all files in a commit, one per line."""
        return self._git("ls-tree", "-r", "--name-only", commit)

    def copy(self, commit: str, name: str, out: Path) -> None:
        """Copy the file `name` of a commit to the path `out`; raises RemoteError if the repository lacks it."""
        with out.open("wb") as file:
            argv = self._argv("cat-file", "blob", f"{commit}:{name}")
            ran = subprocess.run(argv, stdout=file, stderr=subprocess.PIPE, env=_git_env(), check=False)
        if ran.returncode != 0:
            why = ran.stderr.decode(errors="replace").strip()
            raise RemoteError(f"{name} of {commit[:12]} cannot be read on the host: {why or 'no reason given'}")

    def _make(self) -> None:
        """Create the repository, completely or not at all: later commands would accept a partial one."""
        if self.path.exists():
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".in-", dir=self.path.parent) as scratch:
            repository = Path(scratch, "git")
            self._git("init", "--quiet", "--bare", "--template=", str(repository), at=self.path.parent)
            try:
                settle(repository, self.path)
            except OSError:
                if not self.path.exists():  # otherwise another client created it
                    raise

    def _add_shallow(self, commits: Sequence[str]) -> None:
        path = self.path / "shallow"
        known = set(path.read_text().split()) if path.exists() else set()
        if not set(commits) <= known:
            part = path.with_name(f"shallow.{me()}")
            part.write_text("".join(f"{commit}\n" for commit in sorted(known | set(commits))))
            settle(part, path)

    def _set_aside(self) -> bool:
        """Rename the repository if it is damaged, so that it is filled again; return whether it is gone."""
        if not self.path.exists() or self._run("fsck", "--no-dangling", "--no-progress").returncode == 0:
            return False
        with contextlib.suppress(FileNotFoundError):  # another command was faster
            self.path.rename(self.path.with_name(f".broken-{time.time_ns()}"))
        return True

    def _failure(self, cause: str, next: str = "") -> RemoteError:
        """Return the error for a failed git command: a damaged repository, else git's own cause."""
        if self._set_aside():
            return RemoteError("the sources on the host were damaged, and must be sent again", next=AGAIN)
        return RemoteError(cause, next=next)

    def _argv(self, *args: str) -> list[str]:
        return ["git", "-c", "core.autocrlf=false", "-c", "gc.auto=0", f"--git-dir={self.path}", *args]

    def _git(self, *args: str, env: Mapping[str, str] | None = None, at: Path | None = None, input: str = "") -> str:
        ran = self._run(*args, env=env, at=at, input=input)
        if ran.returncode != 0:
            raise self._failure(f"git {args[0]} failed on the host: {ran.stderr.strip() or 'no reason given'}")
        return ran.stdout

    def _run(
        self, *args: str, env: Mapping[str, str] | None = None, at: Path | None = None, input: str = ""
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self._argv(*args),
            capture_output=True,
            text=True,
            input=input,
            env={**_git_env(), **(env or {})},
            cwd=at or self.path,
            check=False,
        )


def _git_env() -> dict[str, str]:
    return {**base_env(), "GIT_CONFIG_NOSYSTEM": "1", "GIT_CONFIG_GLOBAL": os.devnull, "GIT_TERMINAL_PROMPT": "0"}
