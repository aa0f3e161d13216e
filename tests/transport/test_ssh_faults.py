"""A bad network: whatever it does, a command's outcome is whole and right, or unknown, and never a hang."""

import itertools
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from dgxlab.transport import ssh_connection
from dgxlab.transport.base import CommandFailed, HostDropped, HostLost
from dgxlab.transport.ssh import SshTransport
from dgxlab.transport.ssh_config import Limits, route
from dgxlab.transport.ssh_connection import connect
from tests.agent.test_child import wait_until
from tests.proxy import Proxy
from tests.sshd import Sshd, end_sessions, occupy
from tests.transport.conftest import QUICK, Client, Reach
from tests.transport.test_ssh import run

FOLLOW = """
import signal, sys
from dgxlab.transport.ssh import SshTransport
from dgxlab.transport.ssh_config import Limits
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs begin with it ignored
box = SshTransport("box", "box", limits=Limits(ask_s=0.2, silent_s=2.0))
try:
    for chunk in box.stream(["sh", "-c", f"echo one; sleep {sys.argv[1]}; echo two"]):
        print(chunk.decode(), end="", flush=True)
except KeyboardInterrupt:
    print("stopped")
"""
"""A client that follows a command which is silent for some seconds."""
NOTICED_S = 10.0  # a silence is noticed well within this, and before the default limits and the command end


def following(transport: SshTransport, script: str, stdin: Iterable[bytes] = ()) -> Iterator[bytes]:
    """Begin to follow a command that prints `one`."""
    stream = transport.stream(["sh", "-c", f"echo one; {script}"], stdin)
    assert next(stream) == b"one\n"
    return stream


def lost_in(stream: Iterator[bytes]) -> HostLost:
    """Read to the end, which is a loss that is noticed soon; returns the error."""
    began = time.monotonic()
    with pytest.raises(HostLost) as caught:
        for _ in stream:
            pass
    assert time.monotonic() - began < NOTICED_S
    return caught.value


def silenced(proxy: Proxy, stream: Iterator[bytes]) -> HostLost:
    """Carry nothing until the stream is lost."""
    proxy.blackhole()
    loss = lost_in(stream)
    proxy.heal()
    return loss


def test_cut_in_the_middle(proxy: Proxy, reach: Reach) -> None:
    box = reach()
    stream = following(box, "sleep 20")
    proxy.cut()
    assert "box was cut" in lost_in(stream).message
    assert run(box, "echo", "two") == b"two\n"
    assert proxy.connections == 2


def test_cut_after_any_number_of_bytes(proxy: Proxy, reach: Reach) -> None:
    """Wherever the cut comes: all of the output and the right status, or unknown; never part of it for the whole."""
    box = reach()
    right = {0: b"the answer is 42\n [0]", 5: b"the answer is 42\n [5, why]"}
    whole = 0
    for n, allowed in enumerate(range(0, 1100, 37)):
        rc = n % 2 * 5
        while outcome(box, "printf 'the answer is 42\\n'") == b"unknown":
            pass  # the cut came a moment after the answer before, and took this one
        proxy.cut_after = allowed + 1
        printed = outcome(box, f"printf 'the answer is 42\\n'; printf why >&2; exit {rc}")
        proxy.cut_after = None
        assert printed in (b"unknown", right[rc])
        whole += printed != b"unknown"
    assert 0 < whole < 28


def outcome(box: SshTransport, script: str) -> bytes:
    """Return all that is known of a command, or that it is not known."""
    printed = b""
    try:
        for chunk in box.stream(["sh", "-c", script]):
            printed += chunk
    except HostLost:
        assert b"the answer is 42\n".startswith(printed)
        return b"unknown"
    except CommandFailed as failure:
        return printed + f" [{failure.rc}, {failure.stderr}]".encode()
    return printed + b" [0]"


def test_cut_while_connecting(proxy: Proxy, reach: Reach) -> None:
    for allowed in (60, 400, 1100, 1500, 1700, 1900, 2100):
        proxy.cut_after = allowed
        box = reach()
        with pytest.raises(HostLost):
            run(box, "true")
        box.close()
    assert run(reach(), "echo", "at last") == b"at last\n"


def test_host_that_hangs_up(proxy: Proxy, reach: Reach, monkeypatch: pytest.MonkeyPatch) -> None:
    """A port that hangs up at once is tried again, but for a later connection, which the caller tries again."""
    monkeypatch.setattr(ssh_connection, "DROPPED_PAUSES_S", (0.01, 0.02))
    proxy.refuse = True
    with pytest.raises(HostDropped, match=r"MaxStartups"):
        run(reach(), "true")
    assert proxy.connections == 3
    proxy.refuse = False
    box = reach()
    run(box, "true")
    proxy.refuse = True
    proxy.cut()
    with pytest.raises(HostDropped):
        run(box, "true")
    assert proxy.connections == 5


def test_first_contact_waits_above_max_startups(serve: Callable[..., Sshd], reach: Reach) -> None:
    busy = serve("MaxStartups 1:100:1\n")
    with occupy(busy) as other, ThreadPoolExecutor(1) as pool:
        before = busy.log.count("drop connection")

        def leave() -> None:
            wait_until(lambda: busy.log.count("drop connection") > before)
            other.shutdown(socket.SHUT_RDWR)

        left = pool.submit(leave)
        assert run(reach(), "echo", "in") == b"in\n"
        left.result()


def test_a_command_waits_for_the_only_session(serve: Callable[..., Sshd], reach: Reach) -> None:
    server, box = serve("MaxSessions 1\n"), reach()
    following(box, "sleep 0.5").close()  # type: ignore[attr-defined]
    assert run(box, "echo", "two") == b"two\n"
    assert server.log.count("Connection from") == 2  # the first one is the server's own test


@pytest.mark.parametrize("destination", ["box", "behind-a-jump", "behind-box"])
def test_silence_while_following(
    client: Client, server: Sshd, jump_server: Sshd, proxy: Proxy, reach: Reach, destination: str
) -> None:
    client.add("jump", jump_server)
    client.host("behind-a-jump", proxy.port, "HostKeyAlias box", "ProxyJump jump")
    client.host("behind-box", server.port, "HostKeyAlias box", "ProxyJump box")
    error = silenced(proxy, following(reach(destination, limits=QUICK), "sleep 20"))
    assert error.message.endswith(" for 3 s")


def test_default_limits_notice_a_silence_within_20_s() -> None:
    limits = Limits()
    assert limits.silent_s * 21 / 20 + 0.5 < 20
    assert limits.ask_s * 3 < limits.silent_s


def test_silence_while_sending(proxy: Proxy, reach: Reach) -> None:
    """All send buffers are full, so that even the question whether the host is there cannot leave."""
    sending = following(reach(limits=QUICK), "exec cat >/dev/null", itertools.repeat(bytes(1 << 16)))
    assert silenced(proxy, sending).message.endswith(" for 3 s")


@pytest.mark.parametrize("where", ["connect", "session"])
def test_silence_before_anything_runs(proxy: Proxy, reach: Reach, where: str) -> None:
    box = reach(limits=QUICK)
    if where == "session":
        run(box, "true")
    assert silenced(proxy, box.stream(["true"]))


def test_silence_while_connecting_and_signing_in(proxy: Proxy, reach: Reach) -> None:
    limits = Limits(connect_s=2.0, auth_s=2.0, ask_s=0.3, silent_s=60.0)
    printed = set()
    for allowed in range(1520, 2000, 80):
        proxy.silent_after = allowed
        error = lost_in(reach(limits=limits).stream(["true"]))
        assert error.next == "ssh -o BatchMode=yes box true"
        printed.add(error.message)
        proxy.heal()
    assert any(re.fullmatch(r"box .* to \S+/id_ed25519 for 2 s", sentence) for sentence in printed)


def test_silence_is_told_before_the_next_attempt(proxy: Proxy, reach: Reach) -> None:
    """A command on a connection that has fallen silent does not try another one, which may be as silent, unheard."""
    box = reach(limits=Limits(connect_s=3.0, auth_s=3.0, ask_s=20.0, silent_s=15.0))
    run(box, "true")
    error = silenced(proxy, box.stream(["true"]))
    assert error.message.endswith(" for 3 s")
    assert proxy.connections == 1
    assert run(box, "echo", "back") == b"back\n"


def test_dead_network_is_noticed_by_the_kernel(client: Client) -> None:
    """While we sign in the host itself may be silent for long: probes of TCP are not."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        client.host("box", server.getsockname()[1])
        with connect(route("box")[0], Limits()) as sock:
            assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
            assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) == 1
            probes = (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL)
            idle_s, pause_s = (sock.getsockopt(socket.IPPROTO_TCP, option) for option in probes)
            dead_ms = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)
    assert idle_s + pause_s + dead_ms / 1000 < 24


def test_short_outage_is_survived(proxy: Proxy, reach: Reach) -> None:
    stream = reach(limits=QUICK).stream(["sh", "-c", "for i in 1 2 3 4 5 6; do echo $i; sleep 0.2; done"])
    printed = next(stream)
    proxy.blackhole()
    time.sleep(QUICK.ask_s * 2)
    proxy.heal()
    assert printed + b"".join(stream) == b"1\n2\n3\n4\n5\n6\n"


@pytest.mark.usefixtures("box")
def test_quiet_command_is_no_silence(reach: Reach) -> None:
    assert run(reach(limits=QUICK), "sh", "-c", f"sleep {QUICK.silent_s * 1.5}; echo done") == b"done\n"


def test_stopped_client_does_not_blame_the_host(box: SshTransport) -> None:
    with subprocess.Popen([sys.executable, "-c", FOLLOW, "4"], stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "one\n"
        os.kill(child.pid, signal.SIGSTOP)
        time.sleep(2.6)
        os.kill(child.pid, signal.SIGCONT)
        assert child.stdout.read() == "two\n"
    assert child.returncode == 0


def test_ctrl_c_ends_the_client_at_once(box: SshTransport) -> None:
    argv, pipe = [sys.executable, "-c", FOLLOW, "60"], subprocess.PIPE
    with subprocess.Popen(argv, stdout=pipe, stderr=pipe, text=True) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "one\n"
        time.sleep(0.2)  # until it waits: Python drops an interrupt that meets the callback of a weak reference
        child.send_signal(signal.SIGINT)
        printed, errors = child.communicate(timeout=30)
    assert (printed, errors, child.returncode) == ("stopped\n", "", 0)


def test_connection_that_died_unnoticed(server: Sshd, box: SshTransport) -> None:
    run(box, "true")
    end_sessions(server)
    assert run(box, "echo", "two") == b"two\n"


def test_slow_link(proxy: Proxy, reach: Reach) -> None:
    """100 ms of round trip: a command on an open connection takes three of them."""
    box = reach()
    run(box, "true")
    proxy.delay_s = 0.05
    turns = proxy.turns
    assert run(box, "echo", "far") == b"far\n"
    assert proxy.turns - turns <= 5
