"""Commands over a real sshd: bytes in, bytes out, the status, and nothing that the login shell adds."""

import hashlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from dgxlab.errors import HostError, RemoteError, UsageError
from dgxlab.model import HostEntry
from dgxlab.transport.base import CommandFailed, HostLost
from dgxlab.transport.host import Host
from dgxlab.transport.ssh import SshTransport, quote
from tests.agent.test_child import wait_for_text
from tests.proxy import Proxy
from tests.sshd import Sshd
from tests.transport.conftest import Reach

HOSTILE = [
    "",
    " ",
    "-n",
    "two  words",
    "$HOME `id` $(id)",
    "'; touch canary; '",
    '"; touch canary; "',
    "&& touch canary",
]
HOSTILE += ["/tmp;touch${IFS}canary", "a\nb\ttouch canary\r", "\\", "!!", "*", "~root", "é€\U0001f600", "\udcff\udc80"]
HOSTILE += ["#", "--", "%s%n"]


def run(transport: SshTransport, *argv: str, **options: object) -> bytes:
    return b"".join(transport.stream(argv, **options))  # type: ignore[arg-type]


def failure(transport: SshTransport, script: str, **options: object) -> tuple[int, str]:
    with pytest.raises(CommandFailed) as caught:
        run(transport, "sh", "-c", script, **options)
    return caught.value.rc, caught.value.stderr


def denied(transport: SshTransport, why: str) -> HostError:
    """Return the error of a host that runs no command for us, which time does not mend."""
    with pytest.raises(HostError, match=why) as caught:
        run(transport, "true")
    assert not isinstance(caught.value, HostLost)
    return caught.value


def test_words_arrive_as_they_are(box: SshTransport, server: Sshd) -> None:
    printed = run(box, "printf", "%s\\0", *HOSTILE)
    assert printed.split(b"\0")[:-1] == [os.fsencode(word) for word in HOSTILE]
    assert [path.name for path in (*server.home.iterdir(), *Path.home().glob("canary"))] == []
    with pytest.raises(UsageError, match="NUL"):  # the host would cut the command line there
        quote(["printf", "a\0; id"])


@pytest.mark.parametrize(("script", "rc"), [("exit 3", 3), ("exit 300", 44), ("exit 97", 97), ("nosuchprogram", 127)])
def test_status_and_stderr_of_a_failure(box: SshTransport, script: str, rc: int) -> None:
    stream = box.stream(["sh", "-c", f"echo out; echo why >&2; {script}"])
    assert next(stream) == b"out\n"
    with pytest.raises(CommandFailed) as caught:
        next(stream)
    assert caught.value.rc == rc
    assert caught.value.stderr.startswith("why\n")


def test_killed_command_is_unknown_not_failed(box: SshTransport) -> None:
    """A signal leaves no status: that is neither success nor failure."""
    with pytest.raises(HostLost, match="without a status"):
        run(box, "sh", "-c", "echo partial; kill -KILL $$")


def test_no_standard_input_of_ours(box: SshTransport, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", None)
    assert run(box, "cat") == b""


def test_stdin_is_streamed_both_ways_at_once(box: SshTransport) -> None:
    block = os.urandom(1 << 16)
    given = (block for _ in range(300))
    assert run(box, "cat", stdin=given) == block * 300


def test_command_may_leave_stdin_unread(box: SshTransport) -> None:
    assert failure(box, "exit 97", stdin=(bytes(1 << 16) for _ in range(1000))) == (97, "")


def test_error_of_the_giver_is_raised_to_the_caller(box: SshTransport) -> None:
    def torn() -> Iterator[bytes]:
        yield b"half"
        raise FileNotFoundError("no pack")

    with pytest.raises(FileNotFoundError, match="no pack"):
        run(box, "cat", stdin=torn())
    assert run(box, "echo", "still there") == b"still there\n"


def test_much_stderr_blocks_nothing_and_is_bounded(box: SshTransport) -> None:
    _, stderr = failure(box, "head -c 5000000 /dev/zero | tr '\\0' x >&2; echo last >&2; exit 1")
    assert 200_000 < len(stderr) < 300_000
    assert stderr.endswith("xlast\n")


NOISES = ("echo Welcome", "printf 'no newline'", "echo oops >&2", "set -v", "set -x", "echo $BASH_EXECUTION_STRING")


@pytest.mark.parametrize("noise", NOISES)
def test_noise_of_the_login_shell_is_dropped(serve: Callable[..., Sshd], reach: Reach, noise: str) -> None:
    """Debian's bash reads .bashrc for commands too; what it prints is not the command's."""
    (serve().home / ".bashrc").write_text(noise + "\n")
    assert run(reach(), "echo", "clean") == b"clean\n"
    assert failure(reach(), "echo why >&2; exit 5") == (5, "why\n")
    assert failure(reach(), "exit 6") == (6, "")


def test_shell_that_ends_before_the_command(serve: Callable[..., Sshd], reach: Reach) -> None:
    (serve().home / ".bashrc").write_text("echo maintenance >&2; exit 97\n")
    assert denied(reach(), r"its login shell .* status 97").details == "maintenance"


def test_detached_programs_do_not_hold_the_command(box: SshTransport) -> None:
    pid = run(box, "sh", "-c", "setsid sh -c 'echo $$; exec sleep 60 >/dev/null' </dev/null 2>/dev/null &")
    os.kill(int(pid), signal.SIGKILL)  # it is still there


@pytest.mark.parametrize("streams", ["", ">&- 2>&-"])
def test_silent_command_runs_into_its_patience(box: SshTransport, tmp_path: Path, streams: str) -> None:
    """The wait ends, also where the streams are closed and the status does not come; the command itself goes on."""
    with pytest.raises(HostError, match=r"was silent for 0.5 s") as caught:
        run(box, "sh", "-c", f"echo $$ > {tmp_path}/pid; exec sleep 30 {streams}", patience_s=0.5)
    assert not isinstance(caught.value, HostLost)
    os.kill(int(wait_for_text(tmp_path / "pid")), signal.SIGKILL)


def test_patience_counts_any_progress(box: SshTransport) -> None:
    def trickle() -> Iterator[bytes]:
        for _ in range(4):
            time.sleep(1)
            yield b"x"

    assert run(box, "sh", "-c", "cat >/dev/null", stdin=trickle(), patience_s=3.5) == b""
    assert run(box, "sh", "-c", "for i in 1 2 3 4; do sleep 1; echo $i >&2; done", patience_s=3.5) == b""


def test_leaving_early_leaves_the_connection(box: SshTransport) -> None:
    stream = box.stream(["sh", "-c", "echo $$; exec sleep 60"])
    pid = int(next(stream))
    stream.close()  # type: ignore[attr-defined]
    assert run(box, "echo", "two") == b"two\n"
    os.kill(pid, signal.SIGKILL)  # it is still there


def test_one_connection_serves_all(proxy: Proxy, reach: Reach, tmp_path: Path) -> None:
    """Commands share it, one after the other and side by side; after close a new one is made."""
    box = reach()
    assert proxy.connections == 0
    (here := tmp_path / "here").mkdir()
    all_8 = f">{here}/$1; until [ $(ls {here} | wc -l) = 8 ]; do sleep 0.05; done; echo $1"
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda n: run(box, "sh", "-c", all_8, "sh", str(n), patience_s=60.0), range(8)))
    assert answers == [f"{n}\n".encode() for n in range(8)]
    assert proxy.connections == 1
    box.close()
    assert run(box, "echo", "again") == b"again\n"
    assert proxy.connections == 2


def test_paused_reader_holds_up_the_command(proxy: Proxy, reach: Reach) -> None:
    stream = reach().stream(["head", "-c", "50000000", "/dev/zero"])
    size = len(next(stream))
    time.sleep(0.7)
    assert proxy.down_bytes < 5_000_000
    assert size + sum(len(chunk) for chunk in stream) == 50_000_000


def test_paused_command_holds_up_stdin(box: SshTransport, tmp_path: Path) -> None:
    given = 0

    def endless() -> Iterator[bytes]:
        nonlocal given
        while given < 500:
            given += 1
            yield bytes(100_000)

    stream = box.stream(["sh", "-c", f"echo go; until [ -e {tmp_path}/now ]; do sleep 0.05; done; wc -c"], endless())
    assert next(stream) == b"go\n"
    time.sleep(0.7)
    assert given < 50
    (tmp_path / "now").touch()
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


def test_agent_is_put_on_the_host_and_answers(box: SshTransport, server: Sshd, reach: Reach) -> None:
    (server.home / "bin").mkdir()
    (server.home / "bin" / "py").symlink_to(sys.executable)
    host = Host(reach(root="~/lab space", python="~/bin/py"))
    assert host.probe().facts.hostname == socket.gethostname()
    assert host.calls == 3
    (agent,) = (server.home / "lab space" / "agent").iterdir()
    assert agent.stat().st_mode & 0o077 == 0
    assert host.jobs() == []
    assert host.calls == 4


@pytest.mark.parametrize(("python", "cause"), [("nosuchpython", "not found"), ("/etc/passwd", "Permission denied")])
def test_python_that_cannot_be_started(box: SshTransport, reach: Reach, python: str, cause: str) -> None:
    with pytest.raises(RemoteError, match=f"has no {python} that") as caught:
        Host(reach(python=python)).jobs()
    assert cause in caught.value.details


def test_settings_come_before_what_a_verb_reads(box: SshTransport, tmp_path: Path) -> None:
    content = b"\n\0\n" + os.urandom(300_000)
    host = Host(box, HostEntry("box", env={"CC": "no such compiler"}))
    assert host.probe().absent == (("CC", "no such compiler"),)
    host.send_model("tiny", hashlib.sha256(content).hexdigest(), lambda: [content])
    assert [path.read_bytes() for path in (tmp_path / "root" / "models").iterdir()] == [content]
