"""Commands over a real sshd: bytes in, bytes out, the status, and nothing that the login shell adds."""

from __future__ import annotations

import ast
import hashlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import dgxlab.transport
from dgxlab.errors import HostError, RemoteError, UsageError
from dgxlab.model import HostEntry
from dgxlab.transport.base import CommandFailed
from dgxlab.transport.host import Host
from dgxlab.transport.lost import HostLost
from dgxlab.transport.ssh import SshTransport
from dgxlab.transport.ssh_command import quote
from tests.proxy import Proxy
from tests.sshd import Sshd, sshd
from tests.transport.conftest import Client, Keys

HOSTILE = [
    "",
    " ",
    "-n",
    "two  words",
    "$HOME `id` $(id)",
    "'; touch canary; '",
    '"; touch canary; "',
    "&& touch canary",
    "/tmp;touch${IFS}canary",
    "a\nb\ttouch canary\r",
    "\\",
    "!!",
    "*",
    "~root",
    "é€\U0001f600",
    "\udcff\udc80",
    "#",
    "--",
    "%s%n",
]


def run(transport: SshTransport, *argv: str, **options: object) -> bytes:
    """Run a command and return its stdout."""
    return b"".join(transport.stream(argv, **options))  # type: ignore[arg-type]


def test_words_arrive_as_they_are(box: SshTransport, server: Sshd) -> None:
    """Nothing in an argument is read by a shell on the way, and none of it runs."""
    said = run(box, "printf", "%s\\0", *HOSTILE)
    assert said.split(b"\0")[:-1] == [os.fsencode(word) for word in HOSTILE]
    assert [path.name for path in (*server.home.iterdir(), *Path.home().glob("canary"))] == []


@settings(deadline=None, max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(words=st.lists(st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=20)))
def test_any_words_arrive_as_they_are(box: SshTransport, words: list[str]) -> None:
    """Whatever the words are."""
    assert run(box, "printf", "%s\\0", "-", *words).split(b"\0")[1:-1] == [os.fsencode(word) for word in words]


def test_nul_byte_is_refused_before_anything_is_sent() -> None:
    """The host would cut the command line there."""
    with pytest.raises(UsageError, match="NUL"):
        quote(["printf", "a\0; id"])


def test_environment_and_folder_take_no_text_from_us(box: SshTransport) -> None:
    """The transport has no way to set either; a command sees the account's own."""
    assert run(box, "sh", "-c", 'echo "${X-unset}"') == b"unset\n"
    with pytest.raises(TypeError):
        box.stream(["env"], env={"X": "a; touch canary"})  # type: ignore[call-arg]


def test_characters_split_between_packets_stay_whole(box: SshTransport) -> None:
    """Chunks are bytes: a euro sign in two pieces is the same three bytes."""
    chunks = list(box.stream(["sh", "-c", r"printf '\342\202'; sleep 0.2; printf '\254\377'"]))
    assert b"".join(chunks) == b"\xe2\x82\xac\xff"
    assert len(chunks) == 2


@pytest.mark.parametrize(("script", "rc"), [("exit 3", 3), ("exit 300", 44), ("exit 97", 97), ("nosuchprogram", 127)])
def test_status_and_stderr_of_a_failure(box: SshTransport, script: str, rc: int) -> None:
    """Stdout comes whole before the failure is raised, stderr with it."""
    stream = box.stream(["sh", "-c", f"echo out; echo why >&2; {script}"])
    assert next(stream) == b"out\n"
    with pytest.raises(CommandFailed) as caught:
        next(stream)
    assert caught.value.rc == rc
    assert caught.value.stderr.startswith("why\n")


def test_killed_command_is_unknown_not_failed(box: SshTransport) -> None:
    """A signal leaves no status: that is neither success nor failure."""
    with pytest.raises(HostLost, match="ended without a status: it was killed"):
        run(box, "sh", "-c", "echo partial; kill -KILL $$")


def test_no_standard_input_of_ours(box: SshTransport, monkeypatch: pytest.MonkeyPatch) -> None:
    """A command without stdin sees its end at once; the client's own is never read."""
    monkeypatch.setattr(sys, "stdin", None)
    assert run(box, "cat") == b""


def test_stdin_is_streamed_both_ways_at_once(box: SshTransport) -> None:
    """Far more than any buffer goes through cat: neither side waits for the other for ever."""
    block = os.urandom(1 << 16)
    given = (block for _ in range(300))
    assert run(box, "cat", stdin=given) == block * 300


def test_command_may_leave_stdin_unread(box: SshTransport) -> None:
    """Its status counts, and what was still to be sent is dropped."""
    with pytest.raises(CommandFailed) as caught:
        run(box, "sh", "-c", "exit 97", stdin=(bytes(1 << 16) for _ in range(1000)))
    assert caught.value.rc == 97


def test_error_of_the_giver_is_raised_to_the_caller(box: SshTransport) -> None:
    """A stdin that cannot be produced ends the command, with the cause."""

    def torn() -> Iterator[bytes]:
        yield b"half"
        raise FileNotFoundError("the pack is gone")

    with pytest.raises(FileNotFoundError, match="the pack is gone"):
        run(box, "cat", stdin=torn())
    assert run(box, "echo", "still there") == b"still there\n"


def test_much_stderr_blocks_nothing_and_is_bounded(box: SshTransport) -> None:
    """Stderr shares the window with stdout; the end of it is kept."""
    with pytest.raises(CommandFailed) as caught:
        run(box, "sh", "-c", "head -c 5000000 /dev/zero | tr '\\0' x >&2; echo last >&2; exit 1")
    assert 200_000 < len(caught.value.stderr) < 300_000
    assert caught.value.stderr.endswith("xlast\n")


@pytest.mark.parametrize(
    "noise",
    [
        "echo Welcome to the box",
        "printf 'no newline'",
        "echo oops >&2",
        "set -v",
        "set -x",
        "echo $BASH_EXECUTION_STRING",
    ],
)
def test_noise_of_the_login_shell_is_dropped(
    tmp_path: Path, client: Client, keys: Keys, reach: Callable[..., SshTransport], noise: str
) -> None:
    """Debian's bash reads .bashrc for commands too; what it prints is not the command's."""
    with sshd(tmp_path / "noisy", keys.authorized) as noisy:
        (noisy.home / ".bashrc").write_text(noise + "\n")
        client.host("box", noisy.port)
        client.knows(noisy.known_hosts_line())
        assert run(reach(), "echo", "clean") == b"clean\n"
        with pytest.raises(CommandFailed) as caught:
            run(reach(), "sh", "-c", "echo why >&2; exit 5")
        with pytest.raises(CommandFailed) as silent:
            run(reach(), "sh", "-c", "exit 6")
    assert (caught.value.rc, caught.value.stderr) == (5, "why\n")
    assert (silent.value.rc, silent.value.stderr) == (6, "")


def test_shell_that_ends_before_the_command(
    tmp_path: Path, client: Client, keys: Keys, reach: Callable[..., SshTransport]
) -> None:
    """Its status is not the command's: nothing ran, and the error says so."""
    with sshd(tmp_path / "closed", keys.authorized) as closed:
        (closed.home / ".bashrc").write_text("echo maintenance >&2; exit 97\n")
        client.host("box", closed.port)
        client.knows(closed.known_hosts_line())
        with pytest.raises(
            HostError, match="did not run the command: its login shell ended first, with status 97"
        ) as caught:
            run(reach(), "true")
    assert caught.value.details == "maintenance"
    assert not isinstance(caught.value, HostLost)


def test_detached_programs_do_not_hold_the_command(box: SshTransport) -> None:
    """With its streams elsewhere a program in the background lets the command end."""
    began = time.monotonic()
    pid = run(box, "sh", "-c", "setsid sh -c 'echo $$; exec sleep 30 >/dev/null' </dev/null 2>/dev/null &")
    assert time.monotonic() - began < 2
    os.kill(int(pid), signal.SIGKILL)


def test_silent_command_runs_into_its_patience(box: SshTransport, tmp_path: Path) -> None:
    """The wait ends with a sentence; the command itself goes on, and the sentence says that too."""
    with pytest.raises(HostError, match=r"was silent for 0.5 s; it may still run there") as caught:
        run(box, "sh", "-c", f"echo $$ > {tmp_path}/pid; exec sleep 30", patience_s=0.5)
    assert not isinstance(caught.value, HostLost)
    os.kill(int((tmp_path / "pid").read_text()), signal.SIGKILL)


def test_status_that_never_comes_runs_into_patience_too(box: SshTransport, tmp_path: Path) -> None:
    """A command that closed its streams and stays is waited for no longer."""
    with pytest.raises(HostError, match="was silent"):
        run(box, "sh", "-c", f"echo $$ > {tmp_path}/pid; exec sleep 30 >&- 2>&-", patience_s=0.5)
    os.kill(int((tmp_path / "pid").read_text()), signal.SIGKILL)


def test_patience_counts_any_progress(box: SshTransport) -> None:
    """Slow is not silent: stdin that trickles, stdout and stderr that trickle."""

    def trickle() -> Iterator[bytes]:
        for _ in range(4):
            time.sleep(0.2)
            yield b"x"

    assert run(box, "cat", stdin=trickle(), patience_s=0.6) == b"xxxx"
    assert run(box, "sh", "-c", "for i in 1 2 3 4; do sleep 0.2; echo $i >&2; done", patience_s=0.6) == b""


def test_leaving_early_leaves_the_connection(box: SshTransport) -> None:
    """Ctrl-C while following: no wait, and the next command is served."""
    stream = box.stream(["sh", "-c", "echo one; exec sleep 3"])
    assert next(stream) == b"one\n"
    began = time.monotonic()
    stream.close()  # type: ignore[attr-defined]
    assert time.monotonic() - began < 1
    assert run(box, "echo", "two") == b"two\n"


def test_one_connection_serves_all(client: Client, server: Sshd, reach: Callable[..., SshTransport]) -> None:
    """Commands share it, one after the other and side by side; after close a new one is made."""
    with Proxy(server.port) as proxy:
        client.host("box", proxy.port, "HostKeyAlias box")
        client.knows(server.known_hosts_line(name="box"))
        box = reach()
        assert proxy.connections == 0
        answers: dict[int, bytes] = {}
        threads = [
            threading.Thread(target=lambda n=n: answers.update({n: run(box, "sh", "-c", f"sleep 0.3; echo {n}")}))
            for n in range(8)
        ]
        began = time.monotonic()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert answers == {n: f"{n}\n".encode() for n in range(8)}
        assert time.monotonic() - began < 2
        assert proxy.connections == 1
        box.close()
        assert run(box, "echo", "again") == b"again\n"
        assert proxy.connections == 2


def test_commands_do_not_wait_for_delayed_acks(box: SshTransport) -> None:
    """The socket sends at once, keeps itself alive and gives up on bytes that nobody acknowledges."""
    run(box, "true")
    assert box._connection is not None
    sock = box._connection._opened[0].transport.sock
    assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) == 1
    assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
    assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 1500


def test_paused_reader_holds_up_the_command(client: Client, server: Sshd, reach: Callable[..., SshTransport]) -> None:
    """Only a window's worth travels while nobody reads."""
    with Proxy(server.port) as proxy:
        client.host("box", proxy.port, "HostKeyAlias box")
        client.knows(server.known_hosts_line(name="box"))
        stream = reach().stream(["head", "-c", "50000000", "/dev/zero"])
        size = len(next(stream))
        time.sleep(0.7)
        assert proxy.down_bytes < 5_000_000
        assert size + sum(len(chunk) for chunk in stream) == 50_000_000


def test_paused_command_holds_up_stdin(client: Client, server: Sshd, reach: Callable[..., SshTransport]) -> None:
    """No more of stdin is asked for than the command and the window take."""
    given = 0

    def endless() -> Iterator[bytes]:
        nonlocal given
        while given < 500:
            given += 1
            yield bytes(100_000)

    client.host("box", server.port)
    client.knows(server.known_hosts_line())
    stream = reach().stream(["sh", "-c", "echo go; sleep 0.7; echo now; wc -c"], endless())
    assert next(stream) == b"go\n"
    assert next(stream) == b"now\n"
    assert given < 50
    assert b"".join(stream) == b"50000000\n"


MEASURE = """
import re, time
from pathlib import Path
from dgxlab.transport.ssh import SshTransport
def peak_mib():  # of this program alone: getrusage counts what the process that started it held
    return int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) // 1024
box = SshTransport("box", "box")
b"".join(box.stream(["true"]))
before = peak_mib()
size = 0
for n, chunk in enumerate(box.stream(["head", "-c", "200000000", "/dev/zero"])):
    size += len(chunk)
    if n % 100 == 0:
        time.sleep(0.01)
back = b"".join(box.stream(["wc", "-c"], (bytes(1 << 20) for _ in range(200))))
print(size, back.decode().strip(), before, peak_mib())
box.close()
"""


def test_memory_stays_bounded(box: SshTransport) -> None:
    """200 MB down and 200 MB up cost the client a few MB."""
    ran = subprocess.run([sys.executable, "-c", MEASURE], capture_output=True, text=True, check=True)
    down, up, before, after = (int(word) for word in ran.stdout.split())
    assert (down, up) == (200_000_000, 200 << 20)
    assert after - before < 40
    assert after < 150
    assert ran.stderr == ""


def test_nothing_heavy_is_imported_for_a_name() -> None:
    """`dgxlab --help` does not pay for fabric."""
    script = "import sys, dgxlab.transport.ssh; print({'fabric', 'paramiko', 'cryptography'} & set(sys.modules))"
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert ran.stdout == "set()\n"


def test_what_fabric_gets_wrong_is_not_used() -> None:
    """Its unquoted ways to set a folder or an environment, its runners, and every policy that accepts a key unseen."""
    banned = {"cd", "prefix", "sudo", "run_command", "AutoAddPolicy", "WarningPolicy", "invoke_shell", "get_pty"}
    for path in Path(dgxlab.transport.__file__).parent.glob("ssh*.py"):
        nodes = list(ast.walk(ast.parse(path.read_text())))
        assert not banned & {node.attr for node in nodes if isinstance(node, ast.Attribute)}
        runs = [node.value for node in nodes if isinstance(node, ast.Attribute) and node.attr == "run"]
        assert {ast.unparse(value) for value in runs} <= {"subprocess", "command"}


def test_agent_is_put_on_the_host_and_answers(box: SshTransport, tmp_path: Path) -> None:
    """The same bootstrap as on this machine: one look, one upload, one answer, and one call from then on."""
    host = Host(box)
    assert host.probe().facts.hostname == socket.gethostname()
    assert host.calls == 3
    (agent,) = (tmp_path / "root" / "agent").iterdir()
    assert agent.stat().st_mode & 0o077 == 0
    assert host.jobs() == []
    assert host.calls == 4


def test_home_is_the_hosts(box: SshTransport, server: Sshd, reach: Callable[..., SshTransport]) -> None:
    """A root under ~ means the account's home there."""
    Host(reach(root="~/lab space")).jobs()
    assert (server.home / "lab space" / "agent").is_dir()


def test_python_that_is_not_there(box: SshTransport, reach: Callable[..., SshTransport]) -> None:
    """The error carries what the host's shell said."""
    with pytest.raises(RemoteError, match="host box has no nosuchpython that can be started") as caught:
        Host(reach(python="nosuchpython")).jobs()
    assert "nosuchpython: not found" in caught.value.details


def test_python_that_may_not_be_run(box: SshTransport, reach: Callable[..., SshTransport], tmp_path: Path) -> None:
    """The same sentence; what the shell said tells the two apart."""
    (tmp_path / "python").write_text("")
    with pytest.raises(RemoteError, match="that can be started") as caught:
        Host(reach(python=str(tmp_path / "python"))).jobs()
    assert "Permission denied" in caught.value.details


def test_settings_come_before_what_a_verb_reads(box: SshTransport, tmp_path: Path) -> None:
    """Both in stdin: the shell takes the one line, and the agent every byte after it."""
    content = b"\n\0\n" + os.urandom(300_000)
    host = Host(box, HostEntry("box", env={"CC": "no such compiler"}))
    assert host.probe().absent == (("CC", "no such compiler"),)
    host.send_model("tiny", hashlib.sha256(content).hexdigest(), lambda: [content])
    assert [path.read_bytes() for path in (tmp_path / "root" / "models").iterdir()] == [content]


def test_interpreter_under_the_hosts_home(box: SshTransport, server: Sshd, reach: Callable[..., SshTransport]) -> None:
    """As a root under ~: the account's home there."""
    (server.home / "bin").mkdir()
    (server.home / "bin" / "py").symlink_to(sys.executable)
    assert Host(reach(python="~/bin/py")).jobs() == []
