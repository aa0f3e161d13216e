"""An sshd with narrow limits: one session a connection, few new connections at once, slow checks of keys."""

from __future__ import annotations

import getpass
import os
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from random import Random

from faults import moments
from faults.fault import Fault, wait_while
from faults.host import CELLS, Box, box, ended

SLOW_SHARE = 0.2
SLOW_S = (5.0, 25.0)
"""How long a slow host checks a key, twice for each that it accepts; after sign-in, 15 s would count as a loss."""
HELD_S = 6.0
"""Longest time for which sshd is at its MaxStartups after it dropped a connection."""


def _trial(place: Box, random: Random) -> str:
    """Run under some limits; at the first contact, or after a cut, sshd may have all the connections that it takes."""
    name, spec = place.new(random, "sshd", (0, 100))
    place.keep_or_empty(random)
    sessions, startups = random.choice((1, 1, 2, 20)), random.choice((0, 0, 1, 3))
    slow_s = random.uniform(*SLOW_S) if random.random() < SLOW_SHARE else 0.0
    after_cut = startups > 0 and random.random() < 0.5
    with ExitStack() as stack:
        stack.enter_context(_limited(place, sessions, startups, slow_s))
        logged = full = len(place.server.log)
        held = [] if after_cut else _occupied(place, startups, stack)
        child = place.start("run", spec, "--host", "box")
        if after_cut:
            moments.wait(place, name, child, random)
            held = _occupied(place, startups, stack)
            full = len(place.server.log)
            place.proxy.cut()
        while held and "drop connection" not in place.server.log[full:] and child.poll() is None:
            time.sleep(moments.POLL_S)
        for connection in held:
            time.sleep(random.uniform(0, HELD_S / startups))
            connection.close()
        ran = ended(child)
        log = place.server.log
    # a cut of the first contact itself ends the command, which says so
    if ran.rc == 3 and after_cut and not place.jobs(name):
        ran = place.run("run", spec, "--host", "box")
    ran.good(f"a run with MaxSessions {sessions}, MaxStartups {startups or 50}")
    place.check(name, jobs=1, cells=CELLS)
    met = ["session refused"] * ("no more sessions" in log[logged:])
    met += ["connection dropped"] * ("drop connection" in log[full:]) + ["slow sign-in"] * (slow_s > 0)
    return ", ".join(met) or "within limits"


@contextmanager
def _limited(place: Box, sessions: int, startups: int, slow_s: float) -> Iterator[None]:
    """Let sshd read another configuration until the block ends."""
    config = place.server.folder / "config"
    usual = config.read_text()
    lines = f"MaxSessions {sessions}\n"
    if slow_s:
        (keys,) = (line.split()[1] for line in usual.splitlines() if line.startswith("AuthorizedKeysFile"))
        lines += f'AuthorizedKeysFile none\nAuthorizedKeysCommand /bin/sh -c "sleep {slow_s:.1f}; cat {keys}"\n'
        lines += f"AuthorizedKeysCommandUser {getpass.getuser()}\n"
    last = f"MaxStartups {startups}:100:{startups}\n" if startups else ""  # of this keyword alone the last line wins
    try:
        _configure(place, lines + usual + last)
        yield
    finally:
        _configure(place, usual)


def _configure(place: Box, text: str) -> None:
    """Replace sshd's configuration, and wait until it listens with the new one; open connections stay."""
    restarts = place.server.log.count("Server listening")
    (place.server.folder / "config").write_text(text)
    os.kill(place.server.pid, signal.SIGHUP)
    if wait_while(lambda: place.server.log.count("Server listening") == restarts, 10.0):
        raise RuntimeError(f"sshd did not start again: {place.server.log[-1000:]}")


def _occupied(place: Box, connections: int, stack: ExitStack) -> list[socket.socket]:
    """Take all the connections that sshd lets sign in at once, but for one with which the client still signs in."""
    held: list[socket.socket] = []
    while len(held) < connections:
        peer = stack.enter_context(socket.create_connection(("127.0.0.1", place.server.port)))
        if peer.recv(4) != b"SSH-":
            break
        held.append(peer)
    return held


SSHD = Fault(
    name="sshd",
    what="sshd's limits: MaxSessions 1, MaxStartups reached at the first contact or after a cut, a slow look at a key",
    times=100,
    holds="`run` waits and finishes; 0 lost, 0 wrong, 0 run twice",
    place=box,
    trial=_trial,
)
