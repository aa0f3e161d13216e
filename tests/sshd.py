"""A real sshd on the loopback, with its own keys, config and port, and a private ~/.ssh for its clients.

It runs as whoever runs the tests and lets that account in, or, when that is root, as an ordinary user that exists for
it alone. Ended by its own pid, never by name.
"""

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.ports import kept_port

PROGRAM = shutil.which("sshd") or "/usr/sbin/sshd"
START_S = 60.0

ORDINARY, ORDINARY_UID = "tester", 64321
AS_ORDINARY = (
    'mount --bind "$1" /etc/passwd && shift && '
    f'exec setpriv --reuid {ORDINARY_UID} --regid {ORDINARY_UID} --clear-groups "$@"'
)
"""Becomes a user that this one program and its children see in /etc/passwd, and no other program."""

CONFIG = """ListenAddress 127.0.0.1
Port {port}
PidFile {folder}/pid
AuthorizedKeysFile {authorized}
PasswordAuthentication no
KbdInteractiveAuthentication no
PermitRootLogin prohibit-password
UsePAM no
StrictModes no
MaxSessions 20
LogLevel VERBOSE
SetEnv HOME={folder}/home DGXLAB_LOCKS={folder}/locks PATH={path}{more}
"""


@dataclass(frozen=True)
class Sshd:
    """A running server; `home` is $HOME for the commands run on it, empty at first."""

    folder: Path
    port: int
    pid: int

    @property
    def home(self) -> Path:
        return self.folder / "home"

    @property
    def locks(self) -> Path:
        """Where jobs that run on it lock their devices: it is a machine of its own."""
        return self.folder / "locks"

    @property
    def log(self) -> str:
        return (self.folder / "log").read_text(errors="replace")

    def public_key(self, keytype: str = "ed25519") -> str:
        return " ".join((self.folder / f"host_{keytype}.pub").read_text().split()[:2])

    def known_hosts_line(self, keytype: str = "ed25519", name: str = "") -> str:
        return f"{name or f'[127.0.0.1]:{self.port}'} {self.public_key(keytype)}"


def make_key(path: Path, keytype: str = "ed25519", passphrase: str = "") -> str:
    """Make a key pair without asking; returns the public line."""
    argv = ["ssh-keygen", "-q", "-t", keytype, "-N", passphrase, "-C", path.name, "-f", str(path)]
    subprocess.run([*argv, *(["-b", "2048"] if keytype == "rsa" else [])], check=True)
    return path.with_name(path.name + ".pub").read_text()


@contextmanager
def sshd(
    folder: Path,
    authorized: Path,
    *,
    keytypes: Sequence[str] = ("ed25519",),
    config: str = "",
    ordinary: bool = False,
    within: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
) -> Iterator[Sshd]:
    """Run a server until the block ends.

    Args:
        folder: Made for it.
        authorized: The authorized_keys file.
        keytypes: Of its host keys.
        config: Lines that come first in its configuration, so that they win.
        ordinary: As root, run it as the user ORDINARY, who must be able to reach `folder`.
        within: The beginning of a command line that runs a program in namespaces of its own.
        env: Further variables of the commands run on it.
    """
    if not Path(PROGRAM).exists():
        pytest.skip("there is no sshd here: apt-get install openssh-server")
    (folder / "home").mkdir(parents=True)
    (folder / "locks").mkdir()
    (folder / "locks").chmod(0o1777)
    # the ordinary user may not be able to run what is beside the interpreter
    path = os.environ["PATH"] if ordinary else f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    for keytype in keytypes:
        make_key(folder / f"host_{keytype}", keytype)
    probe, port = kept_port()
    more = "".join(f" {name}={value}" for name, value in (env or {}).items())
    text = config + CONFIG.format(port=port, folder=folder, authorized=authorized, path=path, more=more)
    if "MaxStartups" not in config:  # the only keyword here of which the last line wins
        text += "MaxStartups 50:30:100\n"
    text += "".join(f"HostKey {folder}/host_{keytype}\n" for keytype in keytypes)
    (folder / "config").write_text(text)
    if ordinary and os.getuid() == 0:
        within = [*within, *_become_ordinary(folder)]
    with probe, serving(folder, port, within) as server:
        yield server


@contextmanager
def serving(folder: Path, port: int, within: Sequence[str] = ()) -> Iterator[Sshd]:
    """Run a server in a folder that `sshd` made, until the block ends; again, where one has ended there before."""
    if os.getuid() == 0:
        Path("/run/sshd").mkdir(exist_ok=True)
    with (folder / "log").open("a") as log:
        argv = [*within, PROGRAM, "-D", "-e", "-f", str(folder / "config")]
        child = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stderr=log)
    try:
        _wait(folder, port, child)
        yield Sshd(folder, port, child.pid)
    finally:
        end_sessions(Sshd(folder, port, child.pid))
        child.terminate()
        child.wait()


def occupy(server: Sshd) -> socket.socket:
    """Return a connection that never signs in: sshd counts it against its MaxStartups until it is closed."""
    for _ in range(int(START_S / 0.01)):
        peer = socket.create_connection(("127.0.0.1", server.port))
        if peer.recv(4) == b"SSH-":
            return peer
        peer.close()
        time.sleep(0.01)
    raise AssertionError(f"sshd takes no connection: {server.log}")


def end_sessions(server: Sshd) -> None:
    """Kill the processes that serve connections, and what runs in them; the server itself stays."""
    for pid in descendants(server.pid):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


@contextmanager
def agent(folder: Path, *keys: Path) -> Iterator[Path]:
    """Run an ssh-agent that holds keys; yields its socket."""
    path = folder / "agent.sock"
    child = subprocess.Popen(["ssh-agent", "-D", "-a", str(path)], stdout=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + START_S
        env = {**os.environ, "SSH_AUTH_SOCK": str(path)}
        while time.monotonic() < deadline:  # the socket is there before it answers: 2 is for no agent, 1 for no keys
            if subprocess.run(["ssh-add", "-l"], env=env, capture_output=True, check=False).returncode < 2:
                break
            time.sleep(0.01)
        for key in keys:
            subprocess.run(["ssh-add", "-q", str(key)], env=env, check=True, stdin=subprocess.DEVNULL)
        yield path
    finally:
        child.terminate()
        child.wait()


def _become_ordinary(folder: Path) -> list[str]:
    passwd = folder / "passwd"
    line = f"{ORDINARY}:x:{ORDINARY_UID}:{ORDINARY_UID}::{folder}/home:/bin/sh\n"
    passwd.write_text(Path("/etc/passwd").read_text() + line)
    for path in (folder, *folder.rglob("*")):
        os.chown(path, ORDINARY_UID, ORDINARY_UID)
    return ["unshare", "--mount", "sh", "-c", AS_ORDINARY, "sh", str(passwd)]


def _wait(folder: Path, port: int, child: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline and child.poll() is None:
        try:
            with socket.create_connection(("127.0.0.1", port), timeout=1) as peer:
                if peer.recv(4) == b"SSH-" and (folder / "pid").exists():
                    return
        except OSError:
            time.sleep(0.01)
    raise AssertionError(f"sshd did not start: {(folder / 'log').read_text()}")


def descendants(pid: int) -> list[int]:
    parents: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError, IndexError):
            parents.setdefault(int(stat.read_text().rpartition(")")[2].split()[1]), []).append(int(stat.parent.name))
    pids = [pid]
    for each in pids:
        pids += parents.get(each, [])
    return pids[1:]
