"""The way to a host is ssh's own: whatever its configuration says, read by ssh itself."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from dgxlab.errors import HostError
from dgxlab.transport.base import HostLost
from dgxlab.transport.ssh import SshTransport
from dgxlab.transport.ssh_config import route
from tests.machines import script
from tests.sshd import Sshd, sshd
from tests.transport.conftest import Client, Keys, Reach
from tests.transport.test_ssh import denied, run


def config(client: Client, text: str) -> None:
    (client.home / ".ssh" / "config").write_text(text)


def test_fields(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each keyword lands in its field, with Include, Match, defaults and tokens as ssh has them."""
    monkeypatch.setenv("MY_AGENT", "/run/mine")
    (client.home / ".ssh" / "more").write_text("Host dgx\n  Port 2222\n")
    config(
        client,
        f"Include {client.home}/.ssh/more\n"
        'Host dgx\n  HostName GPU.example.org\n  User kim\n  IdentityFile ~/.ssh/%r@%h\n  IdentityFile "~/a b"\n'
        "  IdentitiesOnly yes\n  IdentityAgent $MY_AGENT\n"
        f"Match user kim\n  UserKnownHostsFile {client.home}/k1 {client.home}/k2\n",
    )
    (hop,) = route("dgx")
    assert (hop.destination, hop.hostname, hop.port, hop.user) == ("dgx", "gpu.example.org", 2222, "kim")
    assert hop.key_names == ("[gpu.example.org]:2222", "gpu.example.org")
    assert hop.known_hosts[:2] == (client.home / "k1", client.home / "k2")
    assert Path("/etc/ssh/ssh_known_hosts") in hop.known_hosts
    assert hop.identities == (client.home / ".ssh" / "kim@gpu.example.org", client.home / "a b")
    assert (hop.identities_only, hop.agent, hop.proxy_command) == (True, "/run/mine", "")


def test_defaults(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SSH_AUTH_SOCK", "/run/agent")
    (hop,) = route("kim@gpu.example.org")
    assert (hop.hostname, hop.port, hop.user, hop.key_names) == ("gpu.example.org", 22, "kim", ("gpu.example.org",))
    assert client.home / ".ssh" / "known_hosts" in hop.known_hosts
    assert client.home / ".ssh" / "id_ed25519" in hop.identities
    assert (hop.identities_only, hop.agent) == (False, "/run/agent")


def test_algorithms(serve: Callable[..., Sshd], reach: Reach) -> None:
    lines = ("Ciphers aes256-ctr,aes128-ctr", "MACs hmac-sha2-512", "KexAlgorithms curve25519-sha256")
    server = serve("LogLevel DEBUG\n", lines=lines)
    run(reach(), "true")
    assert "kex: algorithm: curve25519-sha256@libssh.org" in server.log
    assert "kex: server->client cipher: aes256-ctr MAC: hmac-sha2-512" in server.log


def test_weak_algorithms(client: Client, serve: Callable[..., Sshd], reach: Reach) -> None:
    server = serve("Ciphers aes128-cbc\nMACs hmac-md5\n")
    client.host("old", server.port, "Ciphers aes128-cbc", "MACs hmac-md5")
    denied(reach(), "share no way")
    denied(reach("old"), r"no Ciphers for old .*: aes128-cbc")


def test_agent_may_be_none(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SSH_AUTH_SOCK", "/run/agent")
    agents = {"a": "none", "b": "$NOT_SET", "c": "/run/sock"}
    config(client, "".join(f"Host {name}\n  IdentityAgent {path}\n" for name, path in agents.items()))
    assert [route(name)[0].agent for name in agents] == ["", "", "/run/sock"]


def test_jumps(client: Client) -> None:
    """In order; the first jump host's own jump applies, as with ssh, the later ones' do not; `none` is none."""
    config(
        client,
        "Host far\n  ProxyJump first,kim@second:2222\n"
        "Host first\n  ProxyJump gate\n"
        "Host second\n  ProxyJump nowhere\n  User lee\n"
        "Host plain\n  ProxyJump none\n"
        "Host *\n  ProxyCommand none\n",
    )
    assert [hop.destination for hop in route("far")] == ["gate", "first", "ssh://kim@second:2222", "far"]
    assert [(hop.user, hop.port) for hop in route("far")][2] == ("kim", 2222)
    assert [hop.destination for hop in route("plain")] == ["plain"]


@pytest.mark.parametrize("destination", ["-oProxyCommand=touch canary", "a b", "", "$(touch canary)", "x;touch canary"])
def test_destination_that_is_none(client: Client, destination: str) -> None:
    with pytest.raises(HostError):
        run(SshTransport("box", destination), "true")
    assert not Path("canary").exists()


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("Host a\n  ProxyJump b\nHost b\n  ProxyJump a\n", "more than 8 jump hosts"),
        ("Host a\n  Nonsense yes\n", r"(?s)does not understand 'a'.*[Nn]onsense"),
        ("Host a\n  RevokedHostKeys /etc/ssh/revoked\n", "RevokedHostKeys"),
    ],
)
def test_configuration_that_is_refused(client: Client, text: str, why: str) -> None:
    config(client, text)
    with pytest.raises(HostError, match=why):
        route("a")


def test_no_ssh_here(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(HostError, match="not installed"):
        route("a")


def test_command_through_jump_hosts(client: Client, server: Sshd, jump_server: Sshd, reach: Reach) -> None:
    client.add("jump", jump_server)
    client.add("box", server, "ProxyJump jump,jump")
    before = jump_server.log.count("Accepted publickey")
    block = os.urandom(1 << 20)
    assert run(reach(), "cat", stdin=[block] * 5) == block * 5
    assert jump_server.log.count("Accepted publickey") == before + 2


def test_jump_host_that_does_not_forward(
    client: Client, server: Sshd, keys: Keys, reach: Reach, tmp_path: Path
) -> None:
    with sshd(tmp_path / "closed", keys.authorized, config="AllowTcpForwarding no\n") as closed:
        client.add("jump", closed)
        client.add("box", server, "ProxyJump jump")
        denied(reach(), r"127.0.0.1 does not forward to 127.0.0.1:")


def test_host_behind_the_jump_is_down(client: Client, jump_server: Sshd, reach: Reach) -> None:
    client.add("jump", jump_server)
    client.host("box", 1, "ProxyJump jump")
    with pytest.raises(HostLost, match=r"box \(127.0.0.1:1\) .* through 127.0.0.1: Connect"):
        run(reach(), "true")


def test_proxy_command(client: Client, server: Sshd, jump_server: Sshd, reach: Reach) -> None:
    """It is run as ssh runs it, with tokens; here ssh itself is the jump. It ends with the connection."""
    shared = f"-F {client.home}/.ssh/config -o UserKnownHostsFile={client.known_hosts}"
    client.add("jump", jump_server, f"IdentityFile {client.home}/.ssh/id_ed25519")
    client.add("box", server, f"ProxyCommand ssh {shared} -W [%h]:%p jump")
    box = reach()
    assert run(box, "echo", "through") == b"through\n"
    child = box._connection._program._child  # type: ignore[union-attr]
    box.close()
    assert child.returncode is not None


def test_proxy_command_that_fails(client: Client, server: Sshd, reach: Reach) -> None:
    client.host("box", server.port, "ProxyCommand sh -c 'echo no way there >&2; exit 1'")
    with pytest.raises(HostLost, match="ProxyCommand: no way there"):
        run(reach(), "true")


@pytest.mark.parametrize("host", ["127.0.0.1", "nosuchhost.invalid"])
def test_host_that_is_not_there(client: Client, reach: Reach, host: str) -> None:
    config(client, f"Host box\n  HostName {host}\n  Port 1\n")
    with pytest.raises(HostLost, match=rf"box \({host}:1\) cannot be reached: \w+") as caught:
        run(reach(), "true")
    assert caught.value.next == "ssh -o BatchMode=yes box true"


@pytest.mark.parametrize("name", ["a;b", "$(b)", "`b`", "-b", "a|b", "a b"])
def test_no_shell_reads_a_hosts_name(
    client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """An older ssh takes any name, and a ProxyCommand with the name in it is read by a shell."""
    says = 'echo "hostname $word"; echo "user me"; echo "port 22"; echo "proxycommand nc %h %p"'
    stub = script(tmp_path / "bin" / "ssh", f"#!/bin/sh\nfor word; do :; done\n{says}\n")
    monkeypatch.setenv("PATH", str(stub.parent), prepend=":")
    (hop,) = route("box")
    assert hop.proxy_command == "nc box 22"
    with pytest.raises(HostError, match="would read"):
        route(name)
