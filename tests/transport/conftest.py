"""One sshd for the session, and for each test a client with a ~/.ssh of its own."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from dgxlab.transport.ssh import SshTransport
from dgxlab.transport.ssh_config import Limits
from tests.proxy import Proxy
from tests.sshd import Sshd, make_key, sshd

QUICK = Limits(connect_s=5.0, auth_s=10.0, ask_s=0.5, silent_s=3.0)
"""Deadlines for tests of a silence, which is noticed in three seconds: no busy machine holds an sshd up for so long."""


Reach = Callable[..., SshTransport]


@dataclass(frozen=True)
class Keys:
    private: Path
    authorized: Path


@pytest.fixture(scope="session")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Keys:
    folder = tmp_path_factory.mktemp("keys")
    (folder / "authorized_keys").write_text(make_key(folder / "id_ed25519"))
    return Keys(folder / "id_ed25519", folder / "authorized_keys")


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory, keys: Keys) -> Iterator[Sshd]:
    with sshd(tmp_path_factory.mktemp("sshd") / "box", keys.authorized) as running:
        yield running


@pytest.fixture(scope="session")
def jump_server(tmp_path_factory: pytest.TempPathFactory, keys: Keys) -> Iterator[Sshd]:
    with sshd(tmp_path_factory.mktemp("sshd") / "jump", keys.authorized) as running:
        yield running


@dataclass(frozen=True)
class Client:
    """A user's ~/.ssh: a key, known_hosts and config."""

    home: Path

    @property
    def known_hosts(self) -> Path:
        return self.home / ".ssh" / "known_hosts"

    def knows(self, *lines: str) -> None:
        self.known_hosts.write_text("".join(f"{line}\n" for line in lines))

    def add(self, name: str, server: Sshd, *lines: str) -> None:
        """Configure a server under a name, and make its key known."""
        self.host(name, server.port, *lines)
        with self.known_hosts.open("a") as file:
            file.write(f"{server.known_hosts_line()}\n")

    def host(self, name: str, port: int, *lines: str) -> None:
        with (self.home / ".ssh" / "config").open("a") as config:
            config.write(f"Host {name}\n  HostName 127.0.0.1\n  Port {port}\n")
            config.writelines(f"  {line}\n" for line in lines)


@pytest.fixture
def client(tmp_path: Path, keys: Keys, hermetic_seal: None) -> Client:
    """Give the test's home a ~/.ssh with the key that is let in."""
    new = Client(tmp_path / "home")
    (new.home / ".ssh").mkdir(mode=0o700)
    for path in (keys.private, keys.private.with_name("id_ed25519.pub")):
        shutil.copy(path, new.home / ".ssh")
    return new


@pytest.fixture
def reach(tmp_path: Path) -> Iterator[Reach]:
    """Make transports to a destination; each is closed in the end."""
    new: list[SshTransport] = []

    def make(destination: str = "box", **options: Any) -> SshTransport:
        given = {"root": str(tmp_path / "root"), "python": sys.executable, **options}
        new.append(SshTransport("box", destination, **given))
        return new[-1]

    yield make
    for transport in new:
        transport.close()


@pytest.fixture
def box(client: Client, server: Sshd, reach: Reach) -> SshTransport:
    """Reach the shared server, which is known, under the name `box`."""
    client.add("box", server)
    return reach()


@pytest.fixture
def proxy(client: Client, server: Sshd) -> Iterator[Proxy]:
    """Put a proxy before the shared server, which is `box` by way of it."""
    with Proxy(server.port) as new:
        client.host("box", new.port, "HostKeyAlias box")
        client.knows(server.known_hosts_line(name="box"))
        yield new


@pytest.fixture
def serve(client: Client, keys: Keys, tmp_path: Path) -> Iterator[Callable[..., Sshd]]:
    """Run a server of the test's own, with lines of configuration; it is `box`, and known."""
    with ExitStack() as stack:

        def run(config: str = "", authorized: Path = keys.authorized, lines: tuple[str, ...] = ()) -> Sshd:
            server = stack.enter_context(sshd(tmp_path / "sshd", authorized, config=config))
            client.add("box", server, *lines)
            return server

        yield run


def dgxlab(project: Path, *args: str) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "dgxlab", *args]
    return subprocess.run(argv, cwd=project, env=os.environ, capture_output=True, text=True, check=False, timeout=120)
