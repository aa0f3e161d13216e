"""Figures of the way to a host: a command over ssh, over a network, and what it takes to bring the pin there."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace

from bench.far import Far, far
from bench.figure import Figure, figure, take_turns
from dgxlab.source import PinCache, default_path
from tests.proxy import Proxy

PIN = "e3a74b299085cd00013804f7fca2e03441b2da20"
SOURCES = ("https://github.com/ggml-org/llama.cpp", "pypi:llama-cpp-python==0.3.30")
ADDED_RTT_S = 0.05

SEND = """
import sys
from pathlib import Path
from dgxlab.source import PinCache
from dgxlab.transport.host import Host
from dgxlab.transport.ssh import SshTransport

cache, pin = PinCache(Path(sys.argv[1])), sys.argv[2]
Host(SshTransport("box", "box", python=sys.executable)).send_objects(pin, [pin], lambda: cache.pack([pin], []))
"""


def over_ssh(quick: bool) -> Figure:
    """Time `dgxlab run` of an experiment that is up to date on a host over the loopback."""
    with far() as there:
        again = there.here.command("run", there.here.spec("toy"), "--host", "box")
        take_turns(2, again)
        (walls,) = take_turns(2 if quick else 9, again)
    return figure("ssh", "dgxlab run over ssh, everything up to date", walls, "s", 1.5)


def over_distance(quick: bool) -> Figure:
    """Time the same with a network of 50 ms in between, and count how often one side waits for the other."""
    turns = []
    with far() as there, Proxy(there.server.port, delay_s=ADDED_RTT_S / 2) as proxy:
        again = there.here.command("run", there.here.spec("toy"), "--host", "box")
        again()
        there.reach(proxy.port)

        def counted() -> float:
            before = proxy.turns
            seconds = again()
            turns.append(proxy.turns - before)
            return seconds

        (walls,) = take_turns(2 if quick else 7, counted)
    made = figure("distance", "dgxlab run over ssh and 50 ms, everything up to date", walls, "s", 4.0)
    return replace(made, counts={"round trips": max(turns)})


def stage(quick: bool) -> Figure:
    """Time the first staging of the pin against `git fetch` of the same commit over the same sshd."""
    with far() as there:
        cache = PinCache(there.here.pins if quick else default_path())
        pin = there.here.pin if quick else PIN
        cache.ensure(pin, [str(there.here.folder / "repository")] if quick else SOURCES, lambda note: None)
        size = sum(len(piece) for piece in cache.pack([pin], []))
        sides = _staging(there, cache, pin), _fetching(there, cache, pin)
        ours, git = take_turns(1 if quick else 5, *sides)
    ratios = [a / b for a, b in zip(ours, git, strict=True)]
    made = figure("stage", "first staging of the pin / git fetch of it", ratios, "x", 1.5, dgxlab=ours, git=git)
    return replace(made, counts={"MB": round(size / 1e6)})


def _staging(there: Far, cache: PinCache, pin: str) -> Callable[[], float]:
    """Return a side that sends the pin to a host that has nothing of it; a process of its own, as git's is."""
    argv = [sys.executable, "-c", SEND, str(cache.path), pin]
    there.ask().probe()  # the agent is there before the first turn

    def send() -> float:
        shutil.rmtree(there.root / "src", ignore_errors=True)
        return there.here.timed(argv)

    return send


def _fetching(there: Far, cache: PinCache, pin: str) -> Callable[[], float]:
    clone = there.here.folder / "clone.git"
    ssh = f"ssh -F {there.config} -o BatchMode=yes"
    upload = "git -c uploadpack.allowAnySHA1InWant=true -c safe.directory=* upload-pack"
    fetch = ["fetch", "--quiet", "--depth=1", f"--upload-pack={upload}", f"box:{cache.path}", pin]

    def run() -> float:
        shutil.rmtree(clone, ignore_errors=True)
        subprocess.run(["git", "init", "--quiet", "--bare", clone], check=True)
        return there.here.timed(["env", f"GIT_SSH_COMMAND={ssh}", "git", f"--git-dir={clone}", *fetch])

    return run
