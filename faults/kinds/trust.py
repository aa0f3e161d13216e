"""A host key that is not the known one: no user signs in, nothing runs, and the printed commands mend it."""

from __future__ import annotations

import re
import shlex
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random

from faults import moments
from faults.fault import Broken, Fault, wait_while
from faults.host import CELLS, Box, Ran, box, ended
from tests.sshd import Sshd, descendants, make_key, sshd

NOT_TRUSTED = 3
LET_IN = re.compile(r"Accepted |Failed |authenticating user|Starting session")
"""What sshd logs as soon as a client names a user."""
LEFT_S = 30.0
"""How long sshd may take, at most, to notice that a client has left, and to log it."""
COMMANDS = ("run {spec} --host box", "gate {spec} --host box", "jobs --host box", "host check box", "host clean box")
LENIENT = ("", "StrictHostKeyChecking no", "StrictHostKeyChecking accept-new")
"""Settings of ssh by which ssh would accept an unknown key; dgxlab must not."""
STEPS = 4
"""Most printed commands that a user types: two hops, each with an old line to remove and a key to trust."""


@dataclass(frozen=True)
class Way:
    """A host, a jump host, and a server that pretends to be either.

    Attributes:
        keys: Other public keys by type.
    """

    box: Box
    jump: Sshd
    impostor: Sshd
    keys: dict[str, str]

    @property
    def home(self) -> Path:
        """The client's home folder."""
        return self.box.there.here.folder / "home"

    def configure(self, *, jump: bool, lenient: str, known: dict[str, list[str]]) -> None:
        """Write the client's ssh configuration and known_hosts lines, by host; dgxlab's own known_hosts is removed."""
        hosts = {"jump": (self.jump.port, ""), "box": (self.box.proxy.port, "ProxyJump jump" if jump else "")}
        keys = self.home / ".ssh"
        text = "".join(
            f"Host {name}\n  HostName 127.0.0.1\n  Port {port}\n  HostKeyAlias the-{name}\n  {way}\n  {lenient}\n"
            f"  UserKnownHostsFile {keys / 'known_hosts'}\n  IdentityFile {keys / 'id_ed25519'}\n"
            for name, (port, way) in hosts.items()
        )
        (keys / "config").write_text(text)
        (keys / "known_hosts").write_text("".join(f"{line}\n" for lines in known.values() for line in lines))
        (self.home / ".config" / "dgxlab" / "known_hosts").unlink(missing_ok=True)


@contextmanager
def way() -> Iterator[Way]:
    """Yield a host, a jump host and an impostor."""
    with box() as host:
        folder = host.there.here.folder
        authorized = folder / "home" / ".ssh" / "authorized_keys"
        keys = {keytype: make_key(folder / f"old_{keytype}", keytype) for keytype in ("ed25519", "ecdsa", "rsa")}
        with sshd(folder / "jump", authorized) as jump, sshd(folder / "impostor", authorized) as impostor:
            yield Way(host, jump, impostor, {name: " ".join(key.split()[:2]) for name, key in keys.items()})


def trial(place: Way, random: Random) -> str:
    """Present a wrong key from the beginning, or replace the host by an impostor in the middle of a run."""
    name = f"trust{random.getrandbits(40):x}"
    spec = place.box.spec(name, ms=100)
    lenient, jump = random.choice(LENIENT), random.random() < 0.5
    wrong = random.choice(("unknown", "changed", "another type", "revoked", "impostor"))
    if wrong == "impostor":
        return _impostor(place, name, spec, jump=jump, lenient=lenient, random=random)
    hop = random.choice(("jump", "box")) if jump else "box"
    known = _right(place)
    known[hop] = _wrong(place, hop, wrong, random)
    place.configure(jump=jump, lenient=lenient, known=known)
    command = random.choice(COMMANDS).format(spec=spec).split()
    _refused(place, hop, command, name)
    if wrong != "revoked":  # out of which there is no printed way
        _mend(place, command)
    return f"{wrong} {hop if not jump or hop == 'jump' else 'behind a jump host'}"


def _right(place: Way) -> dict[str, list[str]]:
    return {
        "jump": [place.jump.known_hosts_line(name="the-jump")],
        "box": [place.box.server.known_hosts_line(name="the-box")],
    }


def _wrong(place: Way, hop: str, wrong: str, random: Random) -> list[str]:
    """Return known_hosts lines by which a hop's key is not to be trusted."""
    (right,) = _right(place)[hop]
    key = right.split(maxsplit=1)[1]
    if wrong == "unknown":
        return random.choice(([], [f"# {right}"], [f"the-{hop}s {key}"], [f"@cert-authority the-{hop} {key}"]))
    if wrong == "changed":
        return [f"the-{hop} {place.keys['ed25519']}"]
    if wrong == "another type":
        return [f"the-{hop} {place.keys[random.choice(('ecdsa', 'rsa'))]}"]
    return [right, f"@revoked {random.choice(('*', f'the-{hop}'))} {key}"]


def _refused(place: Way, hop: str, command: list[str], name: str) -> None:
    """See that a command ends at a hop's key, and that nothing went any further."""
    servers = {"jump": [place.jump, place.box.server], "box": [place.box.server]}[hop]
    before = [_let_in(server) for server in servers]
    ran = place.box.run(*command)
    if ran.rc != NOT_TRUSTED or "\nnext: " not in ran.err:
        raise Broken(f"{' '.join(command)} ended with {ran.rc} at a key that is not trusted: {ran.err}")
    if held := wait_while(lambda: [pid for server in servers for pid in descendants(server.pid)], LEFT_S):
        raise Broken(f"processes {held} of sshd serve a client that has left")
    if [_let_in(server) for server in servers] != before:
        raise Broken(f"let in: {' '.join(command)} went on after a key that is not trusted: {servers[0].log[-1000:]}")
    if place.box.folders(name) or place.box.jobs(name):
        raise Broken(f"{' '.join(command)} made a job although the host is not trusted")


def _let_in(server: Sshd) -> int:
    return len(LET_IN.findall(server.log))


def _mend(place: Way, command: list[str]) -> None:
    """Type what is printed until the host is trusted, and see that it then lets us in."""
    before, ran = _let_in(place.box.server), place.box.run(*command)
    for _ in range(STEPS):
        if ran.rc == 0:
            break
        step = shlex.split(ran.err.strip().rpartition("\nnext: ")[2])
        if step[0] == "ssh-keygen":
            subprocess.run(step, check=True, capture_output=True)
        elif (added := place.box.run(*step[1:], "--yes")).rc not in (0, NOT_TRUSTED):
            raise Broken(f"{shlex.join(step)} ended with {added.rc}: {added.err}")
        ran = place.box.run(*command)
    if ran.rc != 0 or _let_in(place.box.server) == before:
        raise Broken(f"{' '.join(command)} ended with {ran.rc} although all that was printed was typed: {ran.err}")


def _impostor(place: Way, name: str, spec: Path, *, jump: bool, lenient: str, random: Random) -> str:
    """Let another server take the host's place in the middle of a run: it hears nothing, and the run is finished."""
    place.configure(jump=jump, lenient=lenient, known=_right(place))
    proxy, before = place.box.proxy, _let_in(place.impostor)
    child = place.box.start("run", spec, "--host", "box")
    moments.wait(place.box, name, child, random)
    proxy.target = place.impostor.port
    try:
        proxy.cut()
        ran = ended(child)
    finally:
        proxy.target = place.box.server.port
    if _let_in(place.impostor) != before:
        raise Broken(f"let in: an impostor was signed in to: {place.impostor.log[-1000:]}")
    _changed(ran, recorded=bool(place.box.jobs(name)))
    again = place.box.run("run", spec, "--host", "box")
    if again.rc != 0:
        raise Broken(f"the run after an impostor had gone ended with {again.rc}: {again.err}")
    place.box.check(name, jobs=1, cells=CELLS)
    return "impostor in a run" if ran.rc else "impostor after a run"


def _changed(ran: Ran, *, recorded: bool) -> None:
    """See that a run ended because the key has changed, or before it could see that.

    A cut of the first contact itself ends it, which says so; nothing is recorded by then.
    """
    if ran.rc not in (0, NOT_TRUSTED) or (ran.rc and recorded and "has changed" not in ran.err):
        raise Broken(f"a run that met an impostor ended with {ran.rc}: {ran.err}")


UNTRUSTED = Fault(
    name="untrusted",
    what="unknown, changed, wrong-type, revoked host key, also behind a jump host; an impostor in the middle of a run",
    times=40,
    holds="0 connections; nothing runs; the printed commands mend it",
    place=way,
    trial=trial,
)
