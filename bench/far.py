"""A host over ssh to measure on: a real sshd on the loopback, and a client that knows it."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from bench.place import Place, place
from dgxlab.transport.host import Host
from dgxlab.transport.local import LocalTransport
from tests import toy
from tests.sshd import Sshd, make_key, sshd


@dataclass(frozen=True)
class Far:
    """A place whose user knows a host `box`: this machine, by way of an sshd.

    Attributes:
        here: The place; home/.ssh in it lets the client in.
        server: The sshd; its home is the host's.
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
        """Let `box` stand for a port of this machine."""
        known = self.config.with_name("known_hosts")
        known.write_text(self.server.known_hosts_line(name="box") + "\n")
        self.config.write_text(
            f"Host box\n  HostName 127.0.0.1\n  Port {port}\n  HostKeyAlias box\n  UserKnownHostsFile {known}\n"
            f"  IdentityFile {self.config.with_name('id_ed25519')}\n"
        )

    def ask(self) -> Host:
        """Return the host without a network in between, for what is not measured."""
        return Host(LocalTransport(str(self.root)))


@contextmanager
def far(files: Mapping[str, str] = toy.FILES, within: Sequence[str] = ()) -> Iterator[Far]:
    """Give a place and an sshd, `within` what `tests.sshd.sshd` says."""
    with place(files) as here:
        keys = here.folder / "home" / ".ssh"
        keys.mkdir(mode=0o700)
        (keys / "authorized_keys").write_text(make_key(keys / "id_ed25519"))
        here.hosts.write_text(f"box: {{ssh: box, python: {sys.executable}}}\n")
        with sshd(here.folder / "sshd", keys / "authorized_keys", within=within) as server:
            made = Far(here, server)
            made.reach(server.port)
            yield made
