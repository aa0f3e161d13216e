"""Signing in with keys, as ssh does it without prompts."""

import getpass
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from dgxlab.transport.base import HostLost
from dgxlab.transport.ssh import SshTransport
from dgxlab.transport.ssh_config import Limits
from tests.sshd import Sshd, agent, make_key
from tests.transport.conftest import QUICK, Client, Keys, Reach
from tests.transport.test_ssh import denied, run

Offer = Callable[..., Path]


@pytest.fixture
def known(client: Client, server: Sshd) -> Client:
    """A client that knows the server, with no keys in ~/.ssh."""
    client.knows(server.known_hosts_line())
    for path in (client.home / ".ssh").glob("id_*"):
        path.unlink()
    return client


@pytest.fixture
def offer(known: Client, server: Sshd, tmp_path: Path) -> Iterator[Offer]:
    """Configure box with an agent that holds keys; returns its socket."""
    with ExitStack() as stack:

        def run_agent(*keys: Path, lines: tuple[str, ...] = ()) -> Path:
            path = stack.enter_context(agent(tmp_path, *keys))
            known.host("box", server.port, f"IdentityAgent {path}", *lines)
            return path

        yield run_agent


def refused(transport: SshTransport) -> str:
    error = denied(transport, "does not let")
    assert error.next == "ssh -o BatchMode=yes box true"
    return error.message


@pytest.mark.parametrize("keytype", ["rsa", "ecdsa"])
def test_key_file_that_the_configuration_names(
    known: Client, serve: Callable[..., Sshd], reach: Reach, tmp_path: Path, keytype: str
) -> None:
    (tmp_path / "authorized").write_text(make_key(tmp_path / "special", keytype))
    serve("", tmp_path / "authorized", (f"IdentityFile {tmp_path}/special",))
    assert run(reach(), "echo", "in") == b"in\n"


@pytest.mark.parametrize("lines", [(), ("IdentitiesOnly yes", "IdentityFile ~/.ssh/card.pub")])
def test_agent_key(known: Client, keys: Keys, offer: Offer, reach: Reach, lines: tuple[str, ...]) -> None:
    shutil.copy(keys.private.with_name("id_ed25519.pub"), known.home / ".ssh" / "card.pub")
    offer(keys.private, lines=lines)
    assert run(reach(), "echo", "in") == b"in\n"


def test_identities_only_keeps_the_agents_other_keys_back(
    known: Client, keys: Keys, offer: Offer, reach: Reach
) -> None:
    """As with ssh: the right key in the agent is not offered when another one is wanted."""
    offer(keys.private, lines=("IdentitiesOnly yes", "IdentityFile ~/.ssh/none"))
    assert f" {known.home}/.ssh/none" in refused(reach())


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
    """A host that waits for a signature has nothing to answer: that is no silence of its."""
    with agent(tmp_path, keys.private) as path, asking(tmp_path / "asking", path, QUICK.silent_s * 1.6):
        known.host("box", server.port, f"IdentityAgent {tmp_path}/asking")
        assert run(reach(limits=QUICK), "echo", "in") == b"in\n"


def test_host_that_looks_a_key_up_slowly(keys: Keys, serve: Callable[..., Sshd], reach: Reach, tmp_path: Path) -> None:
    command = f'AuthorizedKeysCommand /bin/sh -c "sleep 0.7; cat {keys.authorized}"\n'
    serve(f"{command}AuthorizedKeysCommandUser {getpass.getuser()}\n", tmp_path / "none")
    box = reach(limits=Limits(connect_s=5.0, auth_s=10.0, ask_s=0.1, silent_s=0.3))
    assert run(box, "echo", "in") == b"in\n"


def test_agent_is_never_forwarded(keys: Keys, offer: Offer, reach: Reach) -> None:
    offer(keys.private, lines=("ForwardAgent yes",))
    assert run(reach(), "sh", "-c", 'echo "${SSH_AUTH_SOCK-none}"') == b"none\n"


def test_the_files_that_could_have_been_keys_are_named(known: Client, server: Sshd, reach: Reach) -> None:
    known.host("box", server.port)
    message = refused(reach())
    assert ": it takes publickey (tried nothing: " in message
    assert f"{known.home}/.ssh/id_ed25519" in message


def test_wrong_keys_are_named(known: Client, offer: Offer, reach: Reach, tmp_path: Path) -> None:
    folder = known.home / ".ssh"
    make_key(tmp_path / "agents")
    make_key(folder / "wrong")
    make_key(folder / "locked", passphrase="secret")  # noqa: S106
    make_key(folder / "open")
    (folder / "open").chmod(0o644)
    (folder / "broken").write_text("no key\n")
    (folder / "broken").chmod(0o600)
    names = ("wrong", "locked", "open", "broken", "absent")
    offer(tmp_path / "agents", lines=tuple(f"IdentityFile ~/.ssh/{name}" for name in names))
    message = refused(reach())
    for words in ("agent key ssh-ed25519 SHA256:", f" chmod 600 {folder}/open", f"{folder}/broken: "):
        assert words in message
    assert f"{folder}/wrong: refused" in message
    assert f"{folder}/locked: it wants " in message
    assert "absent" not in message


def test_agent_that_does_not_answer_is_named(known: Client, server: Sshd, reach: Reach) -> None:
    known.host("box", server.port, "IdentityAgent /nonexistent/agent")
    assert " at /nonexistent/agent: " in refused(reach())


def test_a_host_that_hangs_up_after_some_keys(offer: Offer, reach: Reach, tmp_path: Path) -> None:
    names = [tmp_path / f"k{n}" for n in range(8)]
    for name in names:
        make_key(name)
    offer(*names)
    message = refused(reach())
    assert "ended the connection" in message
    assert message.count("refused") >= 5


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
    [
        ("ForceCommand internal-sftp\n", "did not run the command"),
        ("MaxSessions 0\n", "refuses another session"),
        ("AuthenticationMethods publickey,password\nPasswordAuthentication yes\n", "does not let .* wants password"),
    ],
)
def test_account_without_commands_or_with_a_second_factor(
    serve: Callable[..., Sshd], reach: Reach, config: str, cause: str
) -> None:
    serve(config)
    denied(reach(), cause)
