"""Figures of jobs: the time that agent, client and network add to the measured programs."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench.figure import Figure, figure, ratios, take_turns
from bench.place import Far, Place, far, place
from dgxlab import plan, series, spec
from dgxlab.model import Plan
from dgxlab.source import PinCache, cache_path
from dgxlab.transport.host import Host
from dgxlab.transport.local import LocalTransport
from tests import toy
from tests.journals import PIN
from tests.proxy import Proxy

# -- the agent ---------------------------------------------------------------------------------------------------------

RUNS = 200


def files(work: str) -> Mapping[str, str]:
    """Return the files of a toy whose llama-bench first executes `work`, which is C, and then prints its row."""
    main = r"""
int main(int argc, char ** argv) {
    if (argc == 2) { puts("  -m -p -n -r -ub -o"); return 0; }
    WORK
    printf("{\"n_prompt\": 16, \"n_gen\": 0, \"n_ubatch\": %s, \"samples_ns\": [20000000, 10000000]}\n",
           option(argc, argv, "-ub", "0"));
    return 0;
}
"""
    return {**toy.FILES, "tools/llama-bench.c": toy.HEAD + main.replace("WORK", work)}


def agent(quick: bool) -> Figure:
    """Time a job of many short runs, from its submission to its end, against a shell loop over the same command."""
    runs = 10 if quick else RUNS
    entry = {"model": "m", "n_prompt": 16, "n_ubatch": list(range(1, runs + 1)), "repetitions": 1}
    with place(files("usleep(100000);")) as here:
        path = here.spec("short", [{"llama-bench": entry}])
        here.command("gate", path)()  # brings pin, build and agent there
        work = _plan(here.pins, path)
        host = Host(LocalTransport(str(here.root)))
        loop = _loop(here, runs)
        jobs, loops = take_turns(1 if quick else 3, lambda: _carry_out(host, work, runs), lambda: here.timed(loop))
    return ratios("agent", f"{runs} runs of 0.1 s / a shell loop", 1.1, agent=jobs, loop=loops)


def _plan(pins: Path, path: Path) -> Plan:
    """Return the plan of an experiment's runs alone, whose build exists already."""
    experiment = spec.load(path)
    source = series.apply(PinCache(pins), experiment.pin, [])
    return plan.make(experiment, source, job_id="", gates=())


def _carry_out(host: Host, work: Plan, runs: int) -> float:
    """Submit a plan, follow the job to its end, and return the seconds that this took."""
    job = replace(work, job_id=plan.new_job_id("bench"))
    begin = time.perf_counter()
    host.submit(job)
    journal = bytearray()
    host.follow(job.job_id, 0, journal.extend)
    seconds = time.perf_counter() - begin
    events = [json.loads(line) for line in journal.splitlines()]
    valid = sum(event["event"] == "run" and event["status"] == "valid" for event in events)
    if valid != runs:
        raise RuntimeError(f"{valid} of {runs} runs are valid: {events[-3:]}")
    return seconds - _waited(events)


def _waited(events: Sequence[Mapping[str, Any]]) -> float:
    """Return the seconds that the job waited while other jobs had the device."""
    taken = {event["state"]: float(event["t"]) for event in events if event["event"] == "lock"}
    return taken["held"] - taken.get("waiting", taken["held"])


def _loop(here: Place, runs: int) -> list[str]:
    """Return a shell loop over the same program, which keeps all output, as the agent does."""
    (program,) = here.root.glob("builds/*/bin/llama-bench")
    model = here.project / "toy.gguf"
    argv = f"{shlex.quote(str(program))} -m {shlex.quote(str(model))} -p 16 -n 0 -ub 1 -r 2 -o jsonl"
    out = shlex.quote(str(here.folder / "loop"))
    return ["sh", "-c", f"i=0; while [ $i -lt {runs} ]; do {argv} >{out}-$i.out 2>{out}-$i.err; i=$((i+1)); done"]


# -- following a job ---------------------------------------------------------------------------------------------------

LOG_BYTES = 1_000_000_000
POLL_S = 0.005

LOG = """static char line[1000];
    memset(line, 'x', sizeof line); line[999] = '\\n';
    for (long left = SIZE; left > 0; left -= sizeof line) { fwrite(line, sizeof line, 1, stderr); }"""
"""SIZE bytes of log on stderr."""

ARITHMETIC = """volatile double x = 1;
    int child = 0;
    for (int i = 1; i < THREADS && !child; i++) { child = !fork(); }
    for (long n = ROUNDS; n > 0; n--) { x = x * 1.000001; }
    if (child) { _exit(0); }
    while (wait(0) > 0) {}"""
"""ROUNDS of arithmetic on THREADS processors at once."""

READ = """
import sys
from dgxlab.transport.host import Host
from dgxlab.transport.ssh import SshTransport

host = Host(SshTransport("box", "box", python=sys.executable))
host.jobs()
for line in sys.stdin:
    host.follow(line.strip(), 0, len)
    print(line, end="", flush=True)
"""


def memory(quick: bool) -> Figure:
    """Measure the largest memory of a client that follows a job with a long log."""
    size = 10_000_000 if quick else LOG_BYTES
    with far(files(LOG.replace("SIZE", f"{size}L"))) as there:
        path = there.here.spec("talker", [{"llama-bench": {"model": "m", "n_prompt": 16, "repetitions": 1}}])
        argv = ("run", path, "--host", "box", "--again")
        peaks = [peak_mb(there, *argv) for _ in range(1 if quick else 3)]
        for log in there.root.glob("jobs/*/raw/run-0.err"):
            if log.stat().st_size < size:
                raise RuntimeError(f"{log} is shorter than {size} bytes")
    return figure("memory", f"client following a job with {size / 1e6:,.0f} MB of log", peaks, "MB", 150.0)


def peak_mb(there: Far, *args: str | Path) -> float:
    """Run `dgxlab ARGS` and return the largest memory of the client, in MB."""
    argv = [sys.executable, "-m", "dgxlab", *args]
    with (there.here.folder / "said").open("w") as log:
        child = subprocess.Popen(argv, env=there.here.env, cwd=there.here.project, stdout=log, stderr=log)
        peak = 0.0
        while child.poll() is None:
            for line in Path(f"/proc/{child.pid}/status").read_text().splitlines():
                if line.startswith("VmHWM:"):  # the kernel's own high-water mark: nothing is missed between two looks
                    peak = int(line.split()[1]) * 1024 / 1e6
            time.sleep(POLL_S)
    if child.returncode != 0:
        raise RuntimeError((there.here.folder / "said").read_text()[-2000:])
    return peak


def followed(quick: bool) -> Figure:
    """Time a program that uses every processor while its job is followed over ssh from this machine, and while not.

    The first run of a job does not count: in it the follower starts, which takes 0.05 s of one processor.
    """
    rounds = 10_000_000 if quick else 600_000_000
    with far(files(ARITHMETIC.replace("ROUNDS", f"{rounds}L").replace("THREADS", str(os.cpu_count())))) as there:
        entry = {"model": "m", "n_prompt": 16, "n_ubatch": [1, 2, 3, 4], "repetitions": 1}
        path = there.here.spec("worker", [{"llama-bench": entry}])
        there.here.command("gate", path, "--host", "box")()
        work = _plan(there.here.pins, path)
        with _reader(there) as read:
            ours, alone = take_turns(
                2 if quick else 9, lambda: _carried_out(there, work, read), lambda: _carried_out(there, work)
            )
    what = "a busy tool's time, followed over ssh / left alone"
    return ratios("followed", what, 1 / 0.99, followed=ours, alone=alone)


@contextmanager
def _reader(there: Far) -> Iterator[Callable[[str], None]]:
    """Yield a function that lets a connected client in another process read a job's journal to its end."""
    argv = [sys.executable, "-c", READ]
    pipe = subprocess.PIPE
    with subprocess.Popen(argv, stdin=pipe, stdout=pipe, env=there.here.env, text=True) as client:
        assert client.stdin is not None
        assert client.stdout is not None
        asks, answers = client.stdin, client.stdout

        def read(job_id: str) -> None:
            asks.write(f"{job_id}\n")
            asks.flush()
            if answers.readline().strip() != job_id:
                raise RuntimeError(f"job {job_id} could not be followed")

        yield read
        asks.close()


def _carried_out(there: Far, work: Plan, read: Callable[[str], None] | None = None) -> float:
    """Run a plan as a job, and return the seconds that its programs took, by the agent's clock."""
    host, job = there.ask(), replace(work, job_id=plan.new_job_id("bench"))
    host.submit(job)
    if read:
        read(job.job_id)
    folder = there.root / "jobs" / job.job_id
    while not (folder / "rc").exists():  # a look at a file: nothing that the host would feel
        time.sleep(0.05)
    events = [json.loads(line) for line in (folder / "journal.jsonl").read_text().splitlines()]
    # the first attempt of each: one that had to share the processors is repeated
    runs = list({event["id"]: event for event in reversed(events) if event["event"] == "run"}.values())[::-1]
    if [run["status"] for run in runs] != ["valid"] * 4:
        raise RuntimeError(f"not every run is valid: {runs}")
    return sum(float(run["seconds"]) for run in runs[1:])


# -- over ssh ----------------------------------------------------------------------------------------------------------

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
    """Time the same with 50 ms of network latency, and count the round trips."""
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
    measured = figure("distance", "dgxlab run over ssh and 50 ms, everything up to date", walls, "s", 4.0)
    return replace(measured, counts={"round trips": max(turns)})


def stage(quick: bool) -> Figure:
    """Time sending the pin to an empty host against `git fetch` of the same commit over the same sshd."""
    with far() as there:
        cache = PinCache(there.here.pins if quick else cache_path())
        pin = there.here.pin if quick else PIN
        cache.ensure(pin, [str(there.here.folder / "repository")] if quick else SOURCES, lambda note: None)
        size = sum(len(piece) for piece in cache.pack([pin], []))
        sides = _staging(there, cache, pin), _fetching(there, cache, pin)
        ours, git = take_turns(1 if quick else 5, *sides)
    measured = ratios("stage", "first staging of the pin / git fetch of it", 1.5, dgxlab=ours, git=git)
    return replace(measured, counts={"MB": round(size / 1e6)})


def _staging(there: Far, cache: PinCache, pin: str) -> Callable[[], float]:
    """Return a function that times sending the pin to an empty host, in another process, as git's is."""
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
