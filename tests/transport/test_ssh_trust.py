"""No command and no key of ours goes to a host whose key is not trusted."""

import base64
import hashlib
import hmac
import subprocess
from pathlib import Path

import pytest

from dgxlab.transport.ssh import SshTransport, host_key
from dgxlab.transport.ssh_trust import KnownHosts, NotTrusted, private_known_hosts, trust
from tests.sshd import Sshd, make_key, sshd
from tests.transport.conftest import QUICK, Client, Keys, Reach
from tests.transport.test_ssh import run

KEY = "ssh-ed25519"
BLOBS = {name: name.encode() for name in ("mine", "other")}
LINE = {name: f"{KEY} {base64.b64encode(blob).decode()}" for name, blob in BLOBS.items()}


def hashed(name: str) -> str:
    """Return a name as `ssh-keygen -H` writes it."""
    salt = b"0123456789abcdefghij"
    digest = hmac.new(salt, name.encode(), hashlib.sha1).digest()
    return f"|1|{base64.b64encode(salt).decode()}|{base64.b64encode(digest).decode()}"


PLAIN = [
    ("", "unknown"),
    (f"other.lab,GPU.lab,10.0.0.1\t{LINE['mine']} a comment", "trusted"),
    (f"*.l?b,!gpu.lab {LINE['mine']}", "unknown"),
    (f"{hashed('gpu.lab')} {LINE['mine']}", "trusted"),
    (f"{hashed('gpu.lab')} {LINE['other']}", "changed"),
    ("*.lab ssh-rsa AAAAB3NzaC1yc2E=", "changed"),
    (f"gpu.lab {LINE['other']}\ngpu.lab {LINE['mine']}", "trusted"),
    (f"gpu.lab {LINE['mine']}\n \t@revoked * {LINE['mine']}", "revoked"),
    (f"gpu.lab {LINE['mine']}\n@revoked gpu.lab {LINE['other']}", "trusted"),
    (f"@cert-authority *.lab {LINE['mine']}", "unknown"),
    ("gpu.lab ssh-ed25519\ngpu.lab ssh-ed25519 not-base64!\n\0\xff@ @ @", "unknown"),
]
PORT = [
    (f"[gpu.lab]:2222 {LINE['mine']}", "trusted"),
    (f"gpu.lab {LINE['mine']}", "trusted"),
    (f"gpu.lab {LINE['other']}", "unknown"),
    (f"[gpu.lab]:2222 {LINE['other']}\ngpu.lab {LINE['mine']}", "changed"),
    (f"[gpu.lab]:2222 {LINE['mine']}\n@revoked gpu.lab {LINE['mine']}", "revoked"),
    (f"[*.lab]:2222 {LINE['mine']}", "trusted"),
    (f"[gpu.lab]:* {LINE['other']}", "changed"),
]
"""The line without a port can vouch for the key, as with ssh, but not against it."""


@pytest.mark.parametrize(
    ("text", "state", "names"),
    [*((*case, ("gpu.lab",)) for case in PLAIN), *((*case, ("[gpu.lab]:2222", "gpu.lab")) for case in PORT)],
)
def test_known_hosts_line(tmp_path: Path, text: str, state: str, names: tuple[str, ...]) -> None:
    """Each form of a line means what it means to ssh; a line without a key is ignored."""
    path = tmp_path / "known_hosts"
    path.write_text(text, encoding="latin-1")
    assert KnownHosts([path], names).judge("gpu", KEY, BLOBS["mine"]).state == state


def test_missing_files_hold_no_keys(tmp_path: Path) -> None:
    assert KnownHosts([tmp_path / "none", tmp_path], ["gpu.lab"]).named == []


def refused(transport: SshTransport, server: Sshd) -> NotTrusted:
    """Return the error of a connection that never got as far as signing in."""
    before = server.log.count("Accepted publickey")
    with pytest.raises(NotTrusted) as caught:
        run(transport, "true")
    assert server.log.count("Accepted publickey") == before
    assert caught.value.exit_code == 3
    return caught.value


def shown_by_ssh_keygen(server: Sshd, keytype: str = "ed25519") -> str:
    """Return a host key's fingerprint in ssh-keygen's words."""
    argv = ["ssh-keygen", "-l", "-f", str(server.folder / f"host_{keytype}.pub")]
    return subprocess.run(argv, capture_output=True, text=True, check=True).stdout.split()[1]


@pytest.mark.parametrize("lines", [(), ("StrictHostKeyChecking no",), ("StrictHostKeyChecking accept-new",)])
def test_unknown_key(client: Client, server: Sshd, reach: Reach, lines: tuple[str, ...]) -> None:
    """It is refused with its fingerprint and the way to trust it, whatever ssh's configuration would let pass."""
    client.host("box", server.port, *lines)
    error = refused(reach(), server)
    assert f"is not known: it showed ssh-ed25519 {shown_by_ssh_keygen(server)}" in error.message
    assert error.next == "dgxlab host add box"
    client.host("alias", server.port, *lines)
    assert refused(reach("alias"), server).next == "dgxlab host add alias --name box"


def test_changed_key_cannot_be_trusted_away(client: Client, server: Sshd, reach: Reach, tmp_path: Path) -> None:
    client.host("box", server.port)
    name = f"[127.0.0.1]:{server.port}"
    client.knows("# mine", f"{name} {make_key(tmp_path / 'old')}")
    key = host_key("box", QUICK)
    assert key.state == "changed"
    with pytest.raises(NotTrusted, match="has changed"):
        trust(key)
    assert not private_known_hosts().exists()
    error = refused(reach(), server)
    assert "has changed" in error.message
    assert f"{client.known_hosts}:2 has ssh-ed25519 SHA256:" in error.message
    assert error.next == f"ssh-keygen -R '{name}' -f {client.known_hosts}"
    subprocess.run(["sh", "-c", error.next], check=True, capture_output=True)
    assert "is not known" in refused(reach(), server).message


@pytest.mark.parametrize(
    ("marker", "words"),
    [("@revoked", "is revoked by {file}:2"), ("@cert-authority", "host certificates are not supported")],
)
def test_key_with_a_marker(client: Client, server: Sshd, reach: Reach, marker: str, words: str) -> None:
    client.host("box", server.port)
    client.knows(server.known_hosts_line() if marker == "@revoked" else "", f"{marker} * {server.public_key()}")
    assert words.format(file=client.known_hosts) in refused(reach(), server).message


@pytest.mark.parametrize("keytype", ["ecdsa", "rsa", "ed25519"])
def test_host_is_asked_for_the_key_that_is_known(
    client: Client, keys: Keys, tmp_path: Path, reach: Reach, keytype: str
) -> None:
    """Of a host with several keys the known one is wanted, else it would seem to have changed."""
    with sshd(tmp_path / "many", keys.authorized, keytypes=("ed25519", "ecdsa", "rsa")) as many:
        client.host("box", many.port)
        client.knows(many.known_hosts_line(keytype))
        assert run(reach(), "echo", "in") == b"in\n"
        assert host_key("box", QUICK).fingerprint == shown_by_ssh_keygen(many, keytype)
        reach().close()


@pytest.mark.parametrize("where", ["UserKnownHostsFile", "GlobalKnownHostsFile"])
def test_files_that_the_configuration_names(
    client: Client, server: Sshd, reach: Reach, tmp_path: Path, where: str
) -> None:
    (tmp_path / "second").write_text(server.known_hosts_line(name="the-box") + "\n")
    client.host("box", server.port, f"{where} {tmp_path}/first {tmp_path}/second", "HostKeyAlias the-box")
    assert run(reach(), "echo", "in") == b"in\n"


@pytest.mark.parametrize("wrong", ["is not known", "has changed"])
@pytest.mark.parametrize("hop", ["jump", "box"])
def test_every_hop_is_checked(
    client: Client, server: Sshd, jump_server: Sshd, reach: Reach, tmp_path: Path, hop: str, wrong: str
) -> None:
    client.host("jump", jump_server.port)
    client.host("box", server.port, "ProxyJump jump")
    lines = {"jump": jump_server.known_hosts_line(), "box": server.known_hosts_line()}
    changed = f"{lines.pop(hop).split()[0]} {make_key(tmp_path / 'old')}"
    client.knows(*lines.values(), *([changed] if wrong == "has changed" else []))
    error = refused(reach(), server)
    assert f"host key of {hop} (" in error.message
    assert wrong in error.message


def test_trusting_a_host(client: Client, server: Sshd, reach: Reach) -> None:
    client.host("box", server.port)
    before = server.log.count("Accepted publickey")
    key = host_key("box", QUICK)
    assert server.log.count("Accepted publickey") == before
    assert (key.state, key.destination, key.keytype) == ("unknown", "box", "ssh-ed25519")
    assert key.fingerprint == shown_by_ssh_keygen(server)
    assert key.known_hosts_line == server.known_hosts_line()
    path = trust(key)
    assert path == client.home / ".config" / "dgxlab" / "known_hosts" == private_known_hosts()
    assert (path.stat().st_mode & 0o777, path.parent.stat().st_mode & 0o777) == (0o600, 0o700)
    again = host_key("box", QUICK)
    assert again.state == "trusted"
    trust(again)
    assert path.read_text() == server.known_hosts_line() + "\n"
    assert run(reach(), "echo", "in") == b"in\n"


def test_trusting_hop_by_hop(client: Client, server: Sshd, jump_server: Sshd, reach: Reach) -> None:
    """The first hop that is not trusted is shown first: what is behind it is reached through it."""
    client.host("jump", jump_server.port)
    client.host("box", server.port, "ProxyJump jump")
    seen = []
    while (key := host_key("box", QUICK)).state != "trusted":
        seen.append((key.destination, key.fingerprint))
        trust(key)
    assert seen == [("jump", shown_by_ssh_keygen(jump_server)), ("box", shown_by_ssh_keygen(server))]
    assert run(reach(), "echo", "in") == b"in\n"


def test_line_is_added_below_a_torn_one(client: Client, server: Sshd) -> None:
    client.host("box", server.port)
    path = private_known_hosts()
    path.parent.mkdir(parents=True)
    path.write_text("elsewhere ssh-ed25519 AAAA")
    trust(host_key("box", QUICK))
    assert path.read_text() == f"elsewhere ssh-ed25519 AAAA\n{server.known_hosts_line()}\n"
