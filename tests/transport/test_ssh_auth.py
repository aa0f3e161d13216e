"""Signing in with keys, as ssh does it without prompts."""

from __future__ import annotations

import getpass
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from dgxlab.errors import HostError
from dgxlab.transport.base import HostLost
from dgxlab.transport.ssh import SshTransport
from dgxlab.transport.ssh_config import Limits
from tests.sshd import Sshd, agent, make_key
from tests.transport.conftest import QUICK, Client, Keys, Reach
from tests.transport.test_ssh import run


@pytest.fixture
def known(client: Client, server: Sshd) -> Client:
    """A client that knows the server, with no keys in ~/.ssh."""
    client.knows(server.known_hosts_line())
    for path in (client.home / ".ssh").glob("id_*"):
        path.unlink()
    return client


def refused(transport: SshTransport) -> HostError:
    """Return the error of a connection that is not let in; it is no matter of waiting."""
    with pytest.raises(HostError, match="does not let") as caught:
        run(transport, "true")
    assert not isinstance(caught.value, HostLost)
    assert caught.value.next == "ssh -o BatchMode=yes box true"
    return caught.value


@pytest.mark.parametrize("keytype", ["rsa", "ecdsa"])
def test_key_file_that_the_configuration_names(
    known: Client, serve: Callable[..., Sshd], reach: Reach, tmp_path: Path, keytype: str
) -> None:
    """Of any type."""
    (tmp_path / "authorized").write_text(make_key(tmp_path / "special", keytype))
    serve("", tmp_path / "authorized", (f"IdentityFile {tmp_path}/special",))
    assert run(reach(), "echo", "in") == b"in\n"


@pytest.mark.parametrize("lines", [(), ("IdentitiesOnly yes", "IdentityFile ~/.ssh/card.pub")])
def test_agent_key(
    known: Client, server: Sshd, keys: Keys, reach: Reach, tmp_path: Path, lines: tuple[str, ...]
) -> None:
    """The agent's key opens the door; with IdentitiesOnly when its public half is named."""
    shutil.copy(keys.private.with_name("id_ed25519.pub"), known.home / ".ssh" / "card.pub")
    with agent(tmp_path, keys.private) as path:
        known.host("box", server.port, f"IdentityAgent {path}", *lines)
        assert run(reach(), "echo", "in") == b"in\n"


def test_identities_only_keeps_the_agents_other_keys_back(
    known: Client, server: Sshd, keys: Keys, reach: Reach, tmp_path: Path
) -> None:
    """As with ssh: the right key in the agent is not offered when another one is wanted."""
    with agent(tmp_path, keys.private) as path:
        known.host("box", server.port, f"IdentityAgent {path}", "IdentitiesOnly yes", "IdentityFile ~/.ssh/none")
        assert f" {known.home}/.ssh/none" in refused(reach()).message


def test_a_connection_that_ends_while_a_key_is_offered(box: SshTransport, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is lost, also where paramiko's sender finds out before its reader does."""

    def cut(_: object) -> None:
        raise EOFError

    monkeypatch.setattr("paramiko.auth_handler.AuthHandler._request_auth", cut)
    with pytest.raises(HostLost, match=r"^box ended .*: end of file$"):
        run(box, "true")


SIGN_REQUEST = 13


@contextmanager
def asking(path: Path, agent_socket: Path, seconds: float) -> Iterator[None]:
    """Put a proxy before an agent that takes so long to sign, as if it asked a person."""

    def serve() -> None:
        client, _ = listener.accept()
        with client, socket.socket(socket.AF_UNIX) as behind:
            behind.connect(str(agent_socket))
            while request := client.recv(1 << 16):
                if request[4] == SIGN_REQUEST:
                    time.sleep(seconds)
                behind.sendall(request)
                client.sendall(behind.recv(1 << 16))

    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield
        thread.join()


def test_key_that_waits_for_a_person(known: Client, server: Sshd, keys: Keys, reach: Reach, tmp_path: Path) -> None:
    """The host hears nothing while a key waits for a touch, and has nothing to answer: that is no silence of its."""
    with agent(tmp_path, keys.private) as path, asking(tmp_path / "asking", path, QUICK.silent_s * 1.6):
        known.host("box", server.port, f"IdentityAgent {tmp_path}/asking")
        assert run(reach(), "echo", "in") == b"in\n"


def test_host_that_looks_a_key_up_slowly(keys: Keys, serve: Callable[..., Sshd], reach: Reach, tmp_path: Path) -> None:
    """It asks a directory for longer than a silence may last, and says nothing meanwhile."""
    command = f'AuthorizedKeysCommand /bin/sh -c "sleep 0.7; cat {keys.authorized}"\n'
    serve(f"{command}AuthorizedKeysCommandUser {getpass.getuser()}\n", tmp_path / "none")
    box = reach(limits=Limits(connect_s=5.0, auth_s=10.0, ask_s=0.1, silent_s=0.3))
    assert run(box, "echo", "in") == b"in\n"


def test_agent_is_never_forwarded(known: Client, server: Sshd, keys: Keys, reach: Reach, tmp_path: Path) -> None:
    """Not even where the configuration wants it."""
    with agent(tmp_path, keys.private) as path:
        known.host("box", server.port, f"IdentityAgent {path}", "ForwardAgent yes")
        assert run(reach(), "sh", "-c", 'echo "${SSH_AUTH_SOCK-none}"') == b"none\n"


def test_no_keys_at_all(known: Client, server: Sshd, reach: Reach) -> None:
    """The error names the files that could have been, and what the host takes."""
    known.host("box", server.port)
    error = refused(reach())
    assert ": it takes publickey (tried nothing: " in error.message
    assert f"{known.home}/.ssh/id_ed25519" in error.message


def test_wrong_keys_are_named(known: Client, server: Sshd, reach: Reach, tmp_path: Path) -> None:
    """Every key that was tried, from the agent and from files, and why each did not do."""
    folder = known.home / ".ssh"
    make_key(tmp_path / "agents")
    make_key(folder / "wrong")
    make_key(folder / "locked", passphrase="secret")  # noqa: S106
    make_key(folder / "open")
    (folder / "open").chmod(0o644)
    (folder / "broken").write_text("no key\n")
    (folder / "broken").chmod(0o600)
    with agent(tmp_path, tmp_path / "agents") as path:
        files = (f"IdentityFile ~/.ssh/{name}" for name in ("wrong", "locked", "open", "broken", "absent"))
        known.host("box", server.port, f"IdentityAgent {path}", *files)
        message = refused(reach()).message
    assert "agent key ssh-ed25519 SHA256:" in message
    assert f"{folder}/wrong: refused" in message
    assert f"{folder}/locked: it wants " in message
    assert f" chmod 600 {folder}/open" in message
    assert f"{folder}/broken: " in message
    assert "absent" not in message


def test_agent_that_does_not_answer(known: Client, server: Sshd, reach: Reach) -> None:
    """It is named, and the files are still tried."""
    known.host("box", server.port, "IdentityAgent /nonexistent/agent")
    assert " at /nonexistent/agent: " in refused(reach()).message


def test_too_many_keys(known: Client, server: Sshd, reach: Reach, tmp_path: Path) -> None:
    """The host hangs up after some; the error says after which."""
    names = [tmp_path / f"k{n}" for n in range(8)]
    for name in names:
        make_key(name)
    with agent(tmp_path, *names) as path:
        known.host("box", server.port, f"IdentityAgent {path}")
        message = refused(reach()).message
    assert "ended the connection" in message
    assert message.count("refused") >= 5


def test_second_factor(serve: Callable[..., Sshd], reach: Reach) -> None:
    """A host that wants a password as well is named for that."""
    serve("AuthenticationMethods publickey,password\nPasswordAuthentication yes\n")
    assert "wants password" in refused(reach()).message


def test_user_certificate(known: Client, serve: Callable[..., Sshd], reach: Reach, tmp_path: Path) -> None:
    """A certificate beside the key file signs in where the plain key would not."""
    make_key(tmp_path / "ca")
    make_key(known.home / ".ssh" / "id_ed25519")
    signed = known.home / ".ssh" / "id_ed25519.pub"
    argv = ["ssh-keygen", "-q", "-s", str(tmp_path / "ca"), "-I", "test", "-n", getpass.getuser(), str(signed)]
    subprocess.run(argv, check=True)
    (tmp_path / "empty").write_text("")
    serve(f"TrustedUserCAKeys {tmp_path}/ca.pub\n", tmp_path / "empty")
    assert run(reach(), "echo", "in") == b"in\n"


@pytest.mark.parametrize(
    ("config", "cause"),
    [("ForceCommand internal-sftp\n", "did not run the command"), ("MaxSessions 0\n", "refuses another session")],
)
def test_account_without_commands(serve: Callable[..., Sshd], reach: Reach, config: str, cause: str) -> None:
    """A forced command never prints our mark: nothing ran, and the error says so."""
    serve(config)
    with pytest.raises(HostError, match=cause) as caught:
        run(reach(), "true")
    assert not isinstance(caught.value, HostLost)
