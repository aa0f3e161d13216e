"""Sources on the host: a bare repository that receives packs, and worktrees that move between trees.

A host needs no internet: the client sends the pin's objects once and a patched tree's few objects each time.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

from dgxlab.agent.boot import flush, settle
from dgxlab.agent.environment import base_env
from dgxlab.errors import AGAIN, RemoteError

CUT_PACK_S = 3600.0
"""A pack that nothing was added to for so long is not on its way any more."""


class Objects:
    """The bare repository of a host."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def missing(self, commits: Sequence[str]) -> list[str]:
        """Return those of `commits` that are not here: all of them, where the repository is damaged."""
        if not self.path.exists():
            return list(commits)
        ran = self._run("cat-file", "--batch-check=%(objectname)", input="\n".join(commits))
        if re.search("^(error|fatal):", ran.stderr, re.MULTILINE) and self._set_aside():
            return list(commits)
        text = self._checked(ran)
        return [commit for commit, line in zip(commits, text.splitlines(), strict=True) if line != commit]

    def receive(self, stream: IO[bytes]) -> None:
        """Take a pack: one JSON line {"commit", "shallow"}, then the pack's bytes.

        The objects become reachable by a ref only after the commit's whole tree is seen to be here.

        Raises:
            RemoteError: if the pack is damaged or incomplete.
        """
        header = json.loads(stream.readline())
        self._make()
        for path in self.path.glob("objects/pack/tmp_*"):  # what index-pack left of a stream that was cut
            with contextlib.suppress(FileNotFoundError):
                if time.time() - path.stat().st_mtime > CUT_PACK_S:  # what another client sends now is younger
                    path.unlink()
        self._add_shallow(header["shallow"])
        with subprocess.Popen(
            self._argv("index-pack", "--stdin", "--fix-thin"),
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env=_git_env(),
        ) as git:
            assert git.stdin is not None
            assert git.stderr is not None
            try:
                while chunk := stream.read(1 << 20):
                    git.stdin.write(chunk)
                git.stdin.close()
            except BrokenPipeError:
                pass
            reason = git.stderr.read().decode(errors="replace").strip()
        if git.returncode != 0:
            self._mend()
            raise RemoteError(f"the sources did not arrive whole: {reason or 'the stream was cut'}", next=AGAIN)
        self._git("rev-list", "--quiet", "--objects", "-1", header["commit"])
        self._git("update-ref", f"refs/dgxlab/{header['commit']}", header["commit"])
        flush(self.path)

    def check_out(self, worktree: Path, index: Path, commit: str, tree: str) -> None:
        """Move a worktree to a commit, touching only what differs.

        A private index per worktree and no .git inside: cmake would reconfigure whenever it changes.

        Raises:
            RemoteError: if the tree is not the one that the plan names.
        """
        worktree.mkdir(parents=True, exist_ok=True)
        env = {"GIT_INDEX_FILE": str(index), "GIT_WORK_TREE": str(worktree)}
        self._git("read-tree", "--reset", "-u", commit, env=env, at=worktree)
        # what was changed by hand in between is put back, what was added is removed
        self._git("update-index", "-q", "--really-refresh", env=env, at=worktree, check=False)
        changed = self._git("diff-files", "--name-only", "-z", env=env, at=worktree)
        if changed:
            self._git("checkout-index", "-f", "-z", "--stdin", env=env, at=worktree, input=changed)
        self._git("clean", "-ffdxq", env=env, at=worktree)
        written = self._git("write-tree", env=env, at=worktree).strip()
        if written != tree:
            raise RemoteError(f"the host checked out tree {written[:12]}, the plan names {tree[:12]}", next=AGAIN)

    def names(self, commit: str) -> str:
        """Return every file name of a commit, a line each: cmake's globs must be run again when they change."""
        return self._git("ls-tree", "-r", "--name-only", commit)

    def copy(self, commit: str, name: str, out: Path) -> None:
        """Copy a commit's file to another place.

        Raises:
            RemoteError: if the commit or its file is not here.
        """
        with out.open("wb") as file:
            argv = self._argv("cat-file", "blob", f"{commit}:{name}")
            ran = subprocess.run(argv, stdout=file, stderr=subprocess.PIPE, env=_git_env(), check=False)
        if ran.returncode != 0:
            why = ran.stderr.decode(errors="replace").strip()
            raise RemoteError(f"{name} of {commit[:12]} cannot be read on the host: {why or 'no reason given'}")

    def _make(self) -> None:
        """Make the repository, whole or not at all: half of one would be taken for one ever after."""
        if self.path.exists():
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".in-", dir=self.path.parent) as scratch:
            repository = Path(scratch, "git")
            self._git("init", "--quiet", "--bare", "--template=", str(repository), at=self.path.parent)
            try:
                settle(repository, self.path)
            except OSError:
                if not self.path.exists():  # otherwise another client was faster
                    raise

    def _add_shallow(self, commits: Sequence[str]) -> None:
        path = self.path / "shallow"
        known = set(path.read_text().split()) if path.exists() else set()
        if set(commits) <= known:
            return
        part = path.with_name(f"shallow.{os.getpid()}")
        part.write_text("".join(f"{commit}\n" for commit in sorted(known | set(commits))))
        settle(part, path)

    def _set_aside(self) -> bool:
        """Move the repository out of the way if it is damaged, to be filled again; return whether it is gone."""
        if self._run("fsck", "--no-dangling", "--no-progress").returncode == 0:
            return False
        with contextlib.suppress(FileNotFoundError):  # another command was faster
            self.path.rename(self.path.with_name(f".broken-{time.time_ns()}"))
        return True

    def _mend(self) -> None:
        """See whether the repository is damaged, after something failed in it.

        Raises:
            RemoteError: if it was, and is gone.
        """
        if self._set_aside():
            raise RemoteError("the sources on the host were damaged, and must be sent again", next=AGAIN)

    def _argv(self, *args: str) -> list[str]:
        return ["git", "-c", "core.autocrlf=false", "-c", "gc.auto=0", f"--git-dir={self.path}", *args]

    def _git(
        self,
        *args: str,
        env: Mapping[str, str] | None = None,
        at: Path | None = None,
        input: str = "",
        check: bool = True,
    ) -> str:
        ran = self._run(*args, env=env, at=at, input=input)
        if ran.returncode != 0 and check and self.path.exists():
            self._mend()
        return self._checked(ran) if check else ran.stdout

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

    def _checked(self, ran: subprocess.CompletedProcess[str]) -> str:
        if ran.returncode != 0:
            doing = ran.args[len(self._argv())]
            raise RemoteError(f"git {doing} failed on the host: {ran.stderr.strip() or 'no reason given'}")
        return ran.stdout


def _git_env() -> dict[str, str]:
    return {**base_env(), "GIT_CONFIG_NOSYSTEM": "1", "GIT_CONFIG_GLOBAL": os.devnull, "GIT_TERMINAL_PROMPT": "0"}
