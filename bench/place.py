"""Temporary folders to measure in: a home, a cache and a project around the tests' toy, and a host over ssh."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dgxlab.transport.host import Host
from dgxlab.transport.local import LocalTransport
from tests import toy
from tests.sshd import Sshd, make_key, sshd

SEALED = ("DGXLAB_", "GIT_", "XDG_", "SSH_", "GGML_", "CCACHE_", "PYTHONDONTWRITEBYTECODE")
"""Prefixes of variables that measured programs do not inherit."""

SETTLE_S = 10.0
"""How long a killed client's command may still write into a place."""

TOY_BENCH: Sequence[Mapping[str, Any]] = (
    {"backend-ops": {"op": "MUL_MAT", "backend": "CPU", "where": {"type_a": "q4_0", "n": [8, 512]}}},
    {"llama-bench": {"model": "m", "n_prompt": [16, 32], "n_gen": 4}},
    {"batched-bench": {"model": "m", "npp": 16, "ntg": 4, "npl": [1, 2, 4]}},
)


@dataclass(frozen=True)
class Place:
    """A folder with home/ (and .dgxlab in it), cache/, repository/ and project/.

    Attributes:
        pin: The toy's commit.
    """

    folder: Path
    pin: str

    @property
    def root(self) -> Path:
        """The agent's folder."""
        return self.folder / "home" / ".dgxlab"

    @property
    def pins(self) -> Path:
        """The pin cache."""
        return self.folder / "cache" / "dgxlab" / "llama.cpp.git"

    @property
    def project(self) -> Path:
        """The project, in which commands run."""
        return self.folder / "project"

    @property
    def env(self) -> dict[str, str]:
        """The environment of measured programs."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith(SEALED)}
        return {
            **kept,
            "HOME": str(self.folder / "home"),
            "XDG_CACHE_HOME": str(self.folder / "cache"),
            "COLUMNS": "120",
        }

    @property
    def hosts(self) -> Path:
        """The user's hosts.yaml."""
        return self.folder / "home" / ".config" / "dgxlab" / "hosts.yaml"

    def spec(
        self, name: str, bench: Sequence[Mapping[str, Any]] = TOY_BENCH, series: Sequence[str] = (), **fields: Any
    ) -> Path:
        """Write the spec of an experiment on the toy, and return its path; `fields` are further keys of the spec."""
        gate = {"op": "MUL_MAT", "backend": "CPU", "expect": "4/4", "unsupported": 1}
        spec = {
            "llama_cpp": {"pin": self.pin, "sources": [str(self.folder / "repository")]},
            "series": list(series),
            "models": {"m": {"path": str(self.project / "toy.gguf")}},
            "gates": [{"backend-ops": gate}],
            "bench": list(bench),
            **fields,
        }
        path = self.project / f"{name}.yaml"
        path.write_text(json.dumps(spec))
        return path

    def overlay(self, name: str, text: str) -> Path:
        """Write a series with one overlay, and return the path of the overlay's file, which may be edited."""
        series, kernel = self.project / "patches" / name, self.project / "kernels" / f"{name}.c"
        series.mkdir(exist_ok=True)
        kernel.parent.mkdir(exist_ok=True)
        (series / "series").write_text(f"overlay kernels/{name}.c ggml/{name}.c\n")
        kernel.write_text(text)
        return kernel

    def timed(self, argv: Sequence[str | Path]) -> float:
        """Run a program to its end, without its stdout, and return its wall time in seconds.

        Raises:
            RuntimeError: if it fails, with its stderr.
        """
        begin = time.perf_counter()
        ran = subprocess.run(
            [str(word) for word in argv],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env=self.env,
            cwd=self.project,
            check=False,
        )
        seconds = time.perf_counter() - begin
        if ran.returncode != 0:
            raise RuntimeError(f"{argv[0]} ended with {ran.returncode}: {ran.stderr.decode(errors='replace')[-2000:]}")
        return seconds

    def command(self, *args: str | Path) -> Callable[[], float]:
        """Return a function that runs `dgxlab ARGS` and returns its wall time in seconds."""
        return lambda: self.timed([sys.executable, Path(sys.executable).with_name("dgxlab"), *args])


def remove(folder: Path) -> None:
    """Remove a folder into which the command of a killed client may still write for a moment.

    Raises:
        OSError: if that takes longer than SETTLE_S.
    """
    end = time.monotonic() + SETTLE_S
    while folder.exists():
        try:
            shutil.rmtree(folder)
        except OSError:
            if time.monotonic() > end:
                raise
            time.sleep(0.1)


@contextmanager
def place(files: Mapping[str, str] = toy.FILES) -> Iterator[Place]:
    """Yield a place around a toy with these files; the place is removed afterwards."""
    folder = Path(tempfile.mkdtemp(prefix="dgxlab-bench-")).resolve()
    try:
        here = Place(folder, toy.make_repository(folder / "repository", files))
        here.hosts.parent.mkdir(parents=True)
        (here.project / "patches").mkdir(parents=True)
        (here.project / "toy.gguf").write_bytes(toy.GGUF)
        yield here
    finally:
        remove(folder)


# -- a host over ssh ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Far:
    """A place with a host `box`, which is this machine through an sshd.

    Attributes:
        here: The place; its home/.ssh has the client's key.
        server: The sshd; its home folder is the host's.
    """

    here: Place
    server: Sshd

    @property
    def config(self) -> Path:
        """The client's ssh configuration."""
        return self.here.folder / "home" / ".ssh" / "config"

    @property
    def root(self) -> Path:
        """The agent's folder on the host."""
        return self.server.home / ".dgxlab"

    def reach(self, port: int) -> None:
        """Let `box` be the host at a port of this machine."""
        known = self.config.with_name("known_hosts")
        known.write_text(self.server.known_hosts_line(name="box") + "\n")
        self.config.write_text(
            f"Host box\n  HostName 127.0.0.1\n  Port {port}\n  HostKeyAlias box\n  UserKnownHostsFile {known}\n"
            f"  IdentityFile {self.config.with_name('id_ed25519')}\n"
        )

    def ask(self) -> Host:
        """Return the host without ssh, for what is not measured."""
        return Host(LocalTransport(str(self.root)))


@contextmanager
def far(
    files: Mapping[str, str] = toy.FILES, within: Sequence[str] = (), env: Mapping[str, str] | None = None
) -> Iterator[Far]:
    """Yield a place and an sshd; `within` and `env` are as in `tests.sshd.sshd`."""
    with place(files) as here:
        keys = here.folder / "home" / ".ssh"
        keys.mkdir(mode=0o700)
        (keys / "authorized_keys").write_text(make_key(keys / "id_ed25519"))
        here.hosts.write_text(f"box: {{ssh: box, python: {sys.executable}}}\n")
        with sshd(here.folder / "sshd", keys / "authorized_keys", within=within, env=env) as server:
            remote = Far(here, server)
            remote.reach(server.port)
            yield remote
