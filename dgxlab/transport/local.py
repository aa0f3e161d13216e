"""This machine as a host, with the same agent and job folders, without a network."""

from __future__ import annotations

import os
import select
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from dgxlab.errors import AGAIN, HostError
from dgxlab.transport.base import CommandFailed


class LocalTransport:
    """Runs commands as children of this process; jobs detach themselves in the agent."""

    def __init__(self, root: str = "~/.dgxlab", name: str = "local", python: str = "") -> None:
        self.root, self.name, self.python = root, name, python or sys.executable

    def stream(
        self, argv: Sequence[str], stdin: Iterable[bytes] = (), *, patience_s: float | None = None
    ) -> Iterator[bytes]:
        """Run `argv` on this machine; see Transport."""
        with tempfile.TemporaryFile() as errors, tempfile.TemporaryFile() as given:
            given.writelines(stdin)
            given.seek(0)
            env = {**os.environ, "PATH": _search_path()}
            child = subprocess.Popen(argv, stdin=given, stdout=subprocess.PIPE, stderr=errors, env=env)
            assert child.stdout is not None
            chunk = b"-"
            try:
                while chunk:
                    if not select.select([child.stdout], [], [], patience_s)[0]:
                        raise HostError(
                            f"a command on host {self.name} was silent for {patience_s:g} s, and was ended; "
                            "does a dead network disk keep it?",
                            next=AGAIN,
                        )
                    if chunk := os.read(child.stdout.fileno(), 1 << 16):
                        yield chunk
            finally:
                child.stdout.close()
                if chunk:  # the reader left early
                    child.kill()
                    with suppress(subprocess.TimeoutExpired):  # a dead disk keeps it
                        child.wait(5)
            rc = child.wait()
            errors.seek(0)
            if rc != 0:
                raise CommandFailed(rc, errors.read().decode(errors="replace"))


def _search_path() -> str:
    """Return PATH with the interpreter's own folder, where cmake and ninja from PyPI are, as its last.

    Also where a virtual environment is activated, and has it first: with another cmake all would be built anew.
    """
    folders, own = os.environ.get("PATH", "/usr/bin:/bin").split(":"), Path(sys.executable).parent
    if sys.prefix != sys.base_prefix:
        folders = [folder for folder in folders if Path(folder) != own]
    return ":".join([*folders, str(own)])
