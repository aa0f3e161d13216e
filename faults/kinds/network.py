"""The network resets or refuses connections, or drops everything: a run must end as if nothing had happened."""

from __future__ import annotations

import re
import subprocess
import threading
import time
from pathlib import Path
from random import Random

from faults import moments
from faults.fault import Broken, Fault
from faults.host import CELLS, Box, Ran, box, ended
from tests.proxy import Proxy

UNREACHABLE = 3
"""Exit code of a run whose host never answered before the fault; it says what to type next."""
RUNS = 6
"""How often a user types the same command before giving up."""
DOWN_BYTES, UP_BYTES = 20_000, 9_000
"""About how many bytes a run receives and sends."""
FRESH_BYTES = 390_000
"""What it sends to an empty host: mostly the agent."""
REFUSED_SHARE, REFUSED_S = 0.2, 1.5
"""Share of resets after which new connections are refused, and for how long at most."""
SIGNING_IN_BYTES = 2_500
"""What it receives until the first command runs. Before that, a host may take longer to answer."""

LONGEST_S = 60.0
NOTICED_S = 20.0
NOTICE = re.compile(r"did not answer|cannot be reached|was cut|ended without a status")


def reset(place: Box, random: Random) -> str:
    """Reset the connections of a run one or more times, and refuse new ones for a while after some resets."""
    name, spec = place.new(random, "reset", (0, 100, 300))
    sent = UP_BYTES if place.keep_or_empty(random) else FRESH_BYTES
    with place.start("run", spec, "--host", "box") as child:
        try:
            met = [_reset(place, name, child, sent, random) for _ in range(random.choice((1, 1, 2, 3)))]
            _disarm(place.proxy)
            ran = ended(child)
        finally:
            _disarm(place.proxy)
            child.kill()
    _finish(place, spec, ran)
    place.check(name, jobs=1, cells=CELLS)
    return met[0]


def _reset(place: Box, name: str, child: subprocess.Popen[str], sent: int, random: Random) -> str:
    """Reset at a moment, or after some bytes of one direction; return what the run was at."""
    proxy, before = place.proxy, place.proxy.resets
    how = random.choice(("moment", "down", "up"))
    if how == "moment":
        moments.wait(place, name, child, random)
    elif how == "down":
        proxy.cut_after = random.randint(1, DOWN_BYTES)
    else:
        proxy.cut_after_up = random.randint(1, sent)
    while proxy.resets == before and child.poll() is None:
        if how == "moment":  # which may come before the run has connected
            proxy.cut()
        time.sleep(moments.POLL_S)
    met = moments.phase(place, name) if proxy.resets > before else "after"
    if random.random() < REFUSED_SHARE:
        proxy.refuse = True
        time.sleep(random.uniform(0, REFUSED_S))
        proxy.refuse = False
    return met


def _disarm(proxy: Proxy) -> None:
    proxy.cut_after = proxy.cut_after_up = None
    proxy.refuse = False


def _finish(place: Box, spec: Path, ran: Ran) -> None:
    """Type the same again as long as the program says that it could not reach the host."""
    for _ in range(RUNS):
        if ran.rc == 0:
            return
        if ran.rc != UNREACHABLE or "\nnext: " not in ran.err:
            raise Broken(f"a run over a bad network ended with {ran.rc}: {ran.err}")
        ran = place.run("run", spec, "--host", "box")
    raise Broken(f"{RUNS} runs over a good network did not reach the host: {ran.err}")


def blackhole(place: Box, random: Random) -> str:
    """Drop everything for up to a minute, with dgxlab's normal deadlines."""
    name, spec = place.new(random, "hole", (100, 1000, 5000))
    dark_s, before = random.uniform(1, LONGEST_S), place.proxy.down_bytes
    with place.start("run", spec, "--host", "box") as child:
        try:
            heard = _Listener(child)
            began = _go_dark(place, name, child, random)
            signing_in = place.proxy.down_bytes - before < SIGNING_IN_BYTES
            met = "sign-in" if signing_in else moments.phase(place, name) if began else "after"
            time.sleep(dark_s if began else 0)
            place.proxy.heal()
            ran = heard.ended()
        finally:
            place.proxy.heal()
            child.kill()
    noticed_s = heard.noticed(began) - began if began else 0.0
    if noticed_s > NOTICED_S and dark_s > NOTICED_S and not signing_in:
        raise Broken(f"a silence of {dark_s:.0f} s was noticed after {noticed_s:.1f} s (in {met}): {ran.err}")
    _finish(place, spec, ran)
    place.check(name, jobs=1, cells=CELLS)
    return met


def _go_dark(place: Box, name: str, child: subprocess.Popen[str], random: Random) -> float | None:
    """Begin the silence at a moment, or after some bytes; return when it began, None where the run ended before."""
    proxy = place.proxy
    if random.random() < 0.5:
        moments.wait(place, name, child, random)
        if child.poll() is None:
            proxy.blackhole()
    else:
        proxy.silent_after = random.choice((random.randint(1, SIGNING_IN_BYTES), random.randint(1, DOWN_BYTES)))
        while proxy.silent_since is None and child.poll() is None:
            time.sleep(moments.POLL_S)
    return proxy.silent_since


class _Listener:
    """Reads what a command says on stderr, with the moment of each line."""

    def __init__(self, child: subprocess.Popen[str]) -> None:
        self._child = child
        self._lines: list[tuple[float, str]] = []
        self._end = float("inf")
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        assert self._child.stderr is not None
        for line in self._child.stderr:
            self._lines.append((time.monotonic(), line))
        self._child.wait()
        self._end = time.monotonic()

    def ended(self) -> Ran:
        """Wait for the end."""
        assert self._child.stdout is not None
        out = self._child.stdout.read()
        self._thread.join()
        err = "".join(line for _, line in self._lines)
        if "Traceback" in err:
            raise Broken(err)
        return Ran(self._child.returncode, out, err)

    def noticed(self, began: float) -> float:
        """Return when a loss was told, or the command ended."""
        return next((at for at, line in self._lines if at > began and NOTICE.search(line)), self._end)


RESET = Fault(
    name="reset",
    what="connection reset at random moments, or after n bytes",
    times=200,
    holds="0 lost, 0 wrong, 0 run twice; `run` finishes all",
    place=box,
    trial=reset,
)
BLACKHOLE = Fault(
    name="blackhole",
    what="silent blackhole of 1 to 60 s",
    times=30,
    holds="noticed in 20 s once signed in; 0 lost, 0 wrong, 0 run twice",
    place=box,
    trial=blackhole,
)
