"""Figures of following a job: what the client holds meanwhile, and what the measured program feels of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from bench.far import Far, far
from bench.figure import Figure, figure, take_turns
from dgxlab import plan, series, spec
from dgxlab.model import Plan
from dgxlab.source import PinCache
from tests import toy

LOG_BYTES = 1_000_000_000
POLL_S = 0.005

TALKER = (
    toy.HEAD
    + r"""
int main(int argc, char ** argv) {
    if (argc == 2) { puts("  -m -p -n -r -ub -o"); return 0; }
    static char line[1000];
    memset(line, 'x', sizeof line); line[999] = '\n';
    for (long left = SIZE; left > 0; left -= sizeof line) { fwrite(line, sizeof line, 1, stderr); }
    printf("{\"n_prompt\": 16, \"n_gen\": 0, \"n_ubatch\": %s, \"samples_ns\": [20000000, 10000000]}\n",
           option(argc, argv, "-ub", "0"));
    return 0;
}
"""
)
"""What stands for llama-bench: a row, after SIZE bytes of log on stderr."""

WORKER = (
    toy.HEAD
    + r"""
int main(int argc, char ** argv) {
    if (argc == 2) { puts("  -m -p -n -r -ub -o"); return 0; }
    volatile double x = 1;
    int child = 0;
    for (int i = 1; i < THREADS && !child; i++) { child = !fork(); }
    for (long n = ROUNDS; n > 0; n--) { x = x * 1.000001; }
    if (child) { _exit(0); }
    while (wait(0) > 0) {}
    printf("{\"n_prompt\": 16, \"n_gen\": 0, \"n_ubatch\": %s, \"samples_ns\": [20000000, 10000000]}\n",
           option(argc, argv, "-ub", "0"));
    return 0;
}
"""
)
"""What stands for llama-bench: ROUNDS of arithmetic on THREADS processors at once, then a row."""


READ = """
import sys
from dgxlab.transport.host import Host
from dgxlab.transport.ssh import SshTransport

host = Host(SshTransport("box", "box", python=sys.executable))
host.jobs()
for line in sys.stdin:
    for piece in host.follow(line.strip(), 0):
        pass
    print(line, end="", flush=True)
"""


def memory(quick: bool) -> Figure:
    """Take the most memory that a client holds while it follows a job that writes a long log."""
    size = 10_000_000 if quick else LOG_BYTES
    talker = TALKER.replace("SIZE", f"{size}L")
    with far({**toy.FILES, "tools/llama-bench.c": talker}) as there:
        path = there.here.spec("talker", [{"llama-bench": {"model": "m", "n_prompt": 16, "repetitions": 1}}])
        peaks = [_peak_mb(there, path) for _ in range(1 if quick else 3)]
        for log in there.root.glob("jobs/*/raw/run-0.err"):
            if log.stat().st_size < size:
                raise RuntimeError(f"{log} is shorter than {size} bytes")
    return figure("memory", f"client following a job with {size / 1e6:,.0f} MB of log", peaks, "MB", 150.0)


def _peak_mb(there: Far, path: Path) -> float:
    """Run an experiment to its end and return the most memory that the client held, in MB."""
    argv = [sys.executable, "-m", "dgxlab", "run", str(path), "--host", "box", "--again"]
    with (there.here.folder / "said").open("w") as said:
        child = subprocess.Popen(argv, env=there.here.env, cwd=there.here.project, stdout=said, stderr=said)
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
    """Time a program that keeps every processor busy, followed over ssh from this very machine, and left alone.

    The first of a job's runs does not count: in it the reader starts, once a job, which takes 0.05 s of one processor.
    """
    rounds = 10_000_000 if quick else 600_000_000
    worker = WORKER.replace("ROUNDS", f"{rounds}L").replace("THREADS", str(os.cpu_count()))
    with far({**toy.FILES, "tools/llama-bench.c": worker}) as there:
        entry = {"model": "m", "n_prompt": 16, "n_ubatch": [1, 2, 3, 4], "repetitions": 1}
        path = there.here.spec("worker", [{"llama-bench": entry}])
        there.here.command("gate", path, "--host", "box")()
        experiment = spec.load(path)
        source = series.apply(PinCache(there.here.pins), experiment.pin, [])
        work = plan.make(experiment, source, job_id="", gates=())
        with _reader(there) as read:
            ours, alone = take_turns(
                2 if quick else 9, lambda: _carried_out(there, work, read), lambda: _carried_out(there, work)
            )
    ratios = [a / b for a, b in zip(ours, alone, strict=True)]
    what = "a busy tool's time, followed over ssh / left alone"
    return figure("followed", what, ratios, "x", 1 / 0.99, followed=ours, alone=alone)


@contextmanager
def _reader(there: Far) -> Iterator[Callable[[str], None]]:
    """Give a way to have a job's journal read to its end by a client that is connected already."""
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
    """Have the runs measured and return how long the programs took, by the agent's clock."""
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
