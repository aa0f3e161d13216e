"""Figures of fleets and clusters: the verdict over devices, the report of a large fleet, jobs through Slurm."""

from __future__ import annotations

import json
import math
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from random import Random
from statistics import median

from bench.figure import Figure, figure, rate_error
from bench.jobs import peak_mb
from bench.place import Far, far
from dgxlab import report, stats
from dgxlab.report.ask import of_experiment
from dgxlab.store import Store
from dgxlab.tools import BackendOpsBench
from tests.journals import source
from tests.report.worlds import GPU, H200, Session, h200, numbers
from tests.slurm import Slurm, slurm

DEVICES = (4, 8, 16, 64)
BETWEEN = 0.05
"""Standard deviation of the effect between devices; smaller ones are simulated too."""
ERROR = 0.002
"""Median standard error of a device's own effect; devices differ in it by a factor of about two."""


def fleet_coverage(quick: bool) -> Figure:
    """Count how often the interval over a simulated fleet holds the true effect, which is 0."""
    fleets = 200 if quick else 20_000
    rates = {}
    for devices in DEVICES:
        for between in (BETWEEN, BETWEEN / 10, 0.0):
            random = Random(f"{devices} {between}")  # noqa: S311 - not for secrets
            wrong = sum(_judged(random, devices, between) in ("faster", "slower") for _ in range(fleets))
            rates[f"{devices} devices, {100 * between:g} % apart"] = 100 - 100 * wrong / fleets
    apart = [rate for name, rate in rates.items() if f" {100 * BETWEEN:g} % apart" in name]
    worst = max(apart, key=lambda rate: abs(rate - 99))
    what = f"99 % interval over {DEVICES[0]} to {DEVICES[-1]} devices holds the truth, {100 * BETWEEN:g} % between them"
    error = rate_error(worst, fleets)
    return Figure("fleet_coverage", what, worst, "%", fleets, error, reach=99.5, least=98.5, table={"covered": rates})


def _judged(random: Random, devices: int, between: float) -> str:
    errors = [ERROR * math.exp(random.gauss(0.0, 0.5)) for _ in range(devices)]
    effects = [(random.gauss(random.gauss(0.0, between), error), error) for error in errors]
    return stats.pool([effects], ["higher"])[0].verdict


MEMBERS = 1000
"""Devices of the fleet that is reported on, with 20 cells each."""


def fleet_report(quick: bool) -> Figure:
    """Time the report of an experiment on many devices, from the record to the text."""
    members = 20 if quick else MEMBERS
    ops = BackendOpsBench("MUL_MAT", "CUDA0", {"type_a": ("q4_0", "q4_K"), "n": tuple(range(1, 11))})
    experiment, walls = h200(name="fleet", bench=(ops,), gates=()), []
    with tempfile.TemporaryDirectory(prefix="dgxlab-bench-") as name, Store.open(Path(name) / "results.db") as store:
        store.connection.execute("PRAGMA synchronous = OFF")
        for number in range(members):
            host = replace(H200, details={**H200.details, "gpus": [{**GPU, "uuid": f"GPU-{number:05}"}]})
            job = Session(store, experiment, f"20261120-{number:06}-fleet", host=host, host_name=f"node{number:04}")
            job.build().runs(numbers(100 + number % 7, 4)).end()
        for _ in range(2 if quick else 5):
            begin = time.perf_counter()
            devices = {job.host: store.devices(job.job_id)["fleet"] for job in store.jobs()}
            ask = of_experiment(experiment, source(), next(iter(devices.values())))
            page = report.collect_fleet(store, [ask.on(host, device.id) for host, device in devices.items()])
            text = report.render_page(page)
            walls.append(time.perf_counter() - begin)
        if page.summary != f"{members} of {members} devices measured" or "node0007" not in text:
            raise RuntimeError(f"not all devices are there: {page.summary}")
    return figure("fleet_report", f"report of {members:,} devices, 20 cells each", walls, "s", 3.0)


ONE_CELL = ({"llama-bench": {"model": "m", "n_prompt": 16}},)


@contextmanager
def _login(*names: str) -> Iterator[tuple[Far, Slurm]]:
    """Yield the login node of a cluster, a host over ssh with each of these names, and the cluster."""
    with tempfile.TemporaryDirectory(prefix="dgxlab-bench-") as name, slurm(Path(name) / "slurm") as cluster:  # noqa: SIM117
        with far(env=cluster.env) as there:
            entry = f"{{ssh: box, python: {sys.executable}, slurm: {{partition: gpu}}}}"
            there.here.hosts.write_text("".join(f"{each}: {entry}\n" for each in names))
            yield there, cluster


def cluster_up_to_date(quick: bool) -> Figure:
    """Time `dgxlab run` on a cluster over ssh, of an experiment that has nothing left to measure."""
    with _login("login") as (there, _):
        again = there.here.command("run", there.here.spec("toy"), "--host", "login")
        walls = [again() for _ in range(4 if quick else 11)][2:]
    return figure("cluster_up_to_date", "dgxlab run on a cluster over ssh, everything up to date", walls, "s", 2.0)


def cluster_start(quick: bool) -> Figure:
    """Time a job from before sbatch to the agent's first step, minus what a script that only notes the time takes."""
    ours, theirs = [], []
    with _login("login") as (there, cluster):
        run = there.here.command("run", there.here.spec("toy", ONE_CELL, gates=[]), "--host", "login", "--again")
        for _ in range(2 if quick else 9):
            run()
            begin, began = time.time(), there.here.folder / "began"
            note = f"--wrap=date +%s.%N >{began}"
            cluster.tell("sbatch", "--wait", "--export=NIL", "--partition=gpu", "--output=/dev/null", note)
            theirs.append(float(began.read_text()) - begin)
        for folder in there.root.glob("jobs/*"):
            events = map(json.loads, (folder / "journal.jsonl").read_text().splitlines())
            first = next(event["t"] for event in events if event["event"] == "step")
            ours.append(first - (folder / "slurm.json").stat().st_mtime)  # which is written just before sbatch
    more = [job - median(theirs) for job in ours]
    what = "from sbatch to the agent's first step, beyond the start of any script"
    return figure("cluster_start", what, more, "s", 1.0, job=ours, script=theirs)


CROWD, AT_ONCE = 200, 20
"""Experiments of a sweep through Slurm, and how many of them one client follows at a time."""


def many_jobs(quick: bool) -> Figure:
    """Measure the largest memory of a client of many jobs at once, and count jobs that are lost or run twice.

    Each host is the same login node under another name.
    """
    experiments, hosts = (4, 2) if quick else (CROWD, AT_ONCE)
    names = [f"login{number}" for number in range(hosts)]
    with _login(*names) as (there, _):
        matrix = {"env": {"TOY_NUMBER": [str(number) for number in range(experiments)]}}
        path = there.here.spec("crowd", ONE_CELL, gates=[], matrix=matrix)
        begin = time.perf_counter()
        peak = peak_mb(there, "run", path, "--host", ",".join(names))
        minutes = (time.perf_counter() - begin) / 60
        counts = _counted(there, experiments)
    what = f"client of {experiments} experiments through Slurm, {hosts} at once, in {minutes:.1f} min"
    bad = sum(counts.values())
    return Figure("many_jobs", what, math.inf if bad else peak, "MB", experiments, None, reach=200.0, counts=counts)


def _counted(there: Far, experiments: int) -> dict[str, int]:
    """Return how many experiments have no valid run in the record, and how many ran, or were submitted, twice."""
    with Store.open(there.here.project / "results.db", create=False) as store:
        runs = Counter(row["name"] for row in store.rows("SELECT name FROM runs JOIN jobs USING (job_id)"))
        valid = store.rows("SELECT DISTINCT name FROM runs JOIN jobs USING (job_id) WHERE status = 'valid'")
    folders = len(list(there.root.glob("jobs/*")))
    return {"lost": experiments - len(valid), "twice": sum(runs.values()) - len(runs) + folders - len(runs)}
