"""The figure of what the agent adds to the programs that it runs."""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench.figure import Figure, figure, take_turns
from bench.place import Place, place
from dgxlab import plan, series, spec
from dgxlab.model import Plan
from dgxlab.source import PinCache
from dgxlab.transport.host import Host
from dgxlab.transport.local import LocalTransport
from tests import toy

RUNS = 200

PROGRAM = (
    toy.HEAD
    + r"""
int main(int argc, char ** argv) {
    if (argc == 2) { puts("  -m -p -n -r -ub -o"); return 0; }
    usleep(100000);
    printf("{\"n_prompt\": 16, \"n_gen\": 0, \"n_ubatch\": %s, \"samples_ns\": [20000000, 10000000]}\n",
           option(argc, argv, "-ub", "0"));
    return 0;
}
"""
)
"""What stands for llama-bench: 0.1 s, and a row for the size and the setting that it is asked for."""


def agent(quick: bool) -> Figure:
    """Time a job of many short runs, from handing it in to its end, against a shell loop over the same command."""
    runs = 10 if quick else RUNS
    entry = {"model": "m", "n_prompt": 16, "n_ubatch": list(range(1, runs + 1)), "repetitions": 1}
    with place({**toy.FILES, "tools/llama-bench.c": PROGRAM}) as here:
        path = here.spec("short", [{"llama-bench": entry}])
        here.command("gate", path)()  # brings pin, build and agent there
        work = _plan(here, path)
        host = Host(LocalTransport(str(here.root)))
        loop = _loop(here, runs)
        jobs, loops = take_turns(1 if quick else 3, lambda: _carry_out(host, work, runs), lambda: here.timed(loop))
    ratios = [a / b for a, b in zip(jobs, loops, strict=True)]
    return figure("agent", f"{runs} runs of 0.1 s / a shell loop", ratios, "x", 1.1, agent=jobs, loop=loops)


def _plan(here: Place, path: Path) -> Plan:
    """Return the plan of the runs alone, on what is built there already."""
    experiment = spec.load(path)
    source = series.apply(PinCache(here.pins), experiment.pin, [])
    return plan.make(experiment, source, job_id="", gates=())


def _carry_out(host: Host, work: Plan, runs: int) -> float:
    """Hand a plan in, follow it to its end, and return the seconds that took."""
    job = replace(work, job_id=plan.new_job_id("bench"))
    begin = time.perf_counter()
    host.submit(job)
    journal = b"".join(host.follow(job.job_id, 0))
    seconds = time.perf_counter() - begin
    events = [json.loads(line) for line in journal.splitlines()]
    valid = sum(event["event"] == "run" and event["status"] == "valid" for event in events)
    if valid != runs:
        raise RuntimeError(f"{valid} of {runs} runs are valid: {events[-3:]}")
    return seconds - _waited(events)


def _waited(events: Sequence[Mapping[str, Any]]) -> float:
    """Return the seconds that the job waited for the device: somebody else's time."""
    taken = {event["state"]: float(event["t"]) for event in events if event["event"] == "lock"}
    return taken["held"] - taken.get("waiting", taken["held"])


def _loop(here: Place, runs: int) -> list[str]:
    """Return a shell's loop over the same program, its output kept as the agent keeps it."""
    (program,) = here.root.glob("builds/*/bin/llama-bench")
    model = here.project / "toy.gguf"
    argv = f"{shlex.quote(str(program))} -m {shlex.quote(str(model))} -p 16 -n 0 -ub 1 -r 2 -o jsonl"
    out = shlex.quote(str(here.folder / "loop"))
    return ["sh", "-c", f"i=0; while [ $i -lt {runs} ]; do {argv} >{out}-$i.out 2>{out}-$i.err; i=$((i+1)); done"]
