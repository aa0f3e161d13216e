"""Journals and replies with one value changed or removed: they must be refused in a sentence, or read and shown."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

from dgxlab import report
from dgxlab.cli._display import display
from dgxlab.cli._out import Format, Out
from dgxlab.errors import DgxlabError, RemoteError
from dgxlab.ingest import impossible_runs, ingest
from dgxlab.lab.doctor import check_facts
from dgxlab.model import Device, HostEntry, canonical, events, to_json
from dgxlab.replies import Item
from dgxlab.store import Store
from dgxlab.transport.host import Host
from dgxlab.transport.local import LocalTransport
from faults.fault import Broken, Fault
from tests.journals import CAPPED, CLOCK, PIN, TOOLCHAIN, Journal, chain_step, experiment, intend, plan, session_plan

ODD: Sequence[Any] = (
    *(
        None,
        True,
        False,
        0,
        -1,
        1,
        255,
        2**31,
        2**63,
        2**80,
        0.0,
        -0.5,
        1e-320,
        1e30,
        1e308,
        float("nan"),
        float("inf"),
    ),
    *("", "x", "0", "-1", "1e999", "\0", "\n", "\ud800", "\x1b[2J", "../../x", "x" * 5000, "9" * 5000, "passed"),
    *([], [[]], [None], ["x"], [1, 2], {}, {"": {}}, {"x": None}, [[[[[]]]]]),
)
DEEP = "[" * 3000 + "]" * 3000

DETAILS = {
    "user": "me",
    "kernel": "6.1.0",
    "os": "Debian",
    "glibc": "2.36",
    "python": "3.11.2",
    "cpu": "a real one",
    "cpus": 8,
    "memory_mib": 1 << 16,
    "mem_available_mib": 1 << 15,
    "nvidia_devices": 1,
    "lock_folder": "/tmp",
    "disk": {"path": "/", "total_mib": 1 << 20, "free_mib": 1 << 19},
    "driver": {"version": "580.1", "cuda": "13.0"},
    "gpus": [
        {
            "index": "0",
            "uuid": "GPU-1",
            "name": "NVIDIA H200",
            "driver_version": "580.1",
            "compute_cap": "9.0",
            "memory.total": "143771",
        }
    ],
    "gpu_processes": [{"gpu_uuid": "GPU-1", "pid": 7, "program": "train", "user": "other", "used_mib": 512}],
    "versions": {"git": "git version 2.39.5", "ccache": ""},
    "tools": {name: f"/usr/bin/{name}" for name in ("git", "cmake", "ninja", "ccache", "nvcc", "nvidia-smi")},
}
FACTS = {
    "host_id": "host-a",
    "hostname": "box",
    "boot_id": "boot",
    "details": DETAILS,
    "toolchain": to_json(replace(TOOLCHAIN, nvcc="Build cuda_13.0.r13.0/compiler.1")),
}
RC = {"exit_code": 5, "status": "failed", "message": "a gate failed", "next": "dgxlab jobs", "journal_sha256": "0" * 64}
STATUS = {"job_id": "job-1", "state": "done", "journal_bytes": 100, "rc": RC, "cause": ""}
ITEM = {"kind": "jobs", "name": "job-1", "used": 1.7e9, "bytes": 10, "state": "done", "journal_bytes": 10}
MODEL = {"model_id": "file-1", "path": "/m.gguf", "size": 7, "digest": "spots:0"}


def _told(journal: Journal) -> Journal:
    """Add what tells how a job goes on, and ends."""
    journal.add("lock", state="waiting", path="/var/lock/x", owner="job x")
    journal.add("step", id="run:1", kind="run", state="started")
    journal.add("progress", id="run:1", done=1, total=2, note="pp512")
    journal.add("error", exit_code=5, message="a gate failed", next="dgxlab jobs", details="a\nb")
    return journal.end("failed", 5).add("unheard", of={"any": ["thing"]})


STEP = chain_step(cycles=2)
JOURNALS = (
    _told(Journal(plan("job-1")).built().gate().gate(1102).check().run(telemetry=[CLOCK], flags=[CAPPED])),
    _told(Journal(session_plan("job-2", STEP)).built().gates().chain(STEP, [9.0, 9.5, 9.25], [10.0, 10.5])),
)

REPLIES: Mapping[str, tuple[Any, Callable[[Host], Any]]] = {
    "probe": (
        {
            "facts": FACTS,
            "missing": [PIN],
            "models": {"/m.gguf": MODEL},
            "running": {"job-1": "0" * 64},
            "to_send": [],
            "absent": [["lock", "/nowhere"]],
        },
        lambda host: host.probe([PIN], ["/m.gguf"]),
    ),
    "status": (STATUS, lambda host: host.status("job-1")),
    "cancel": (STATUS, lambda host: host.cancel("job-1")),
    "submit": ({**STATUS, "rc": None}, lambda host: host.submit(plan("job-1"))),
    "jobs": ([{**STATUS, "name": "toy", "kind": "run", "experiment": "0", "age_s": 2.5}], lambda host: host.jobs()),
    "plan": (
        to_json(replace(session_plan("job-1", STEP), specs=(experiment().spec,))),
        lambda host: host.plan("job-1"),
    ),
    "raw": ({"size": 100, "files": 2}, lambda host: host.raw("job-1", 10, lambda piece: None)),
    "inventory": ([ITEM], lambda host: host.inventory()),
    "clean": (
        {"removed": [["jobs", "a"]], "kept": [["jobs", "b", "it runs"]], "busy": False},
        lambda host: host.remove([Item("jobs", "a", 1.0, 0.0)]),
    ),
}


class Saying(LocalTransport):
    """A transport whose host always gives the same reply."""

    def __init__(self, reply: bytes) -> None:
        super().__init__("/nowhere")
        self.reply = reply

    def stream(
        self, argv: Sequence[str], stdin: Iterable[bytes] = (), *, patience_s: float | None = None
    ) -> Iterator[bytes]:
        """Yield the reply."""
        yield self.reply


class _Undo(Exception):
    """Ends a transaction of which nothing is to stay."""


@contextmanager
def record() -> Iterator[Store]:
    """Yield a record that has the jobs as intended, without events."""
    with tempfile.TemporaryDirectory() as folder, Store.open(Path(folder) / "results.db") as store:
        for journal in JOURNALS:
            intend(store, journal)
        yield store


def trial(store: Store, random: Random) -> str:
    """Change one value of a journal or of a reply, and read it."""
    try:
        if random.random() < 0.3:
            return _reply(random)
        return _journal(store, random)
    except RemoteError as refusal:
        if refusal.exit_code != 4 or "\n" in refusal.message:
            raise Broken(f"it is refused with exit {refusal.exit_code}: {refusal.message!r}") from refusal
        return "refused"


def _journal(store: Store, random: Random) -> str:
    journal = random.choice(JOURNALS)
    lines = journal.lines()
    number = random.randrange(len(lines))
    line = _mutant(journal.events[number], random)
    try:
        events.read(json.loads(line))  # as `ingest` begins, which makes a sentence of it: most cost no transaction
    except (ValueError, RecursionError):
        return "refused"
    with suppress(_Undo), store.transaction():
        ingested = ingest(store, journal.plan.job_id, [*lines[:number], line, *lines[number + 1 :]])
        _show(store, journal.plan.job_id, ingested)
        raise _Undo
    return "read"


def _show(store: Store, job_id: str, told: Iterable[Mapping[str, Any]]) -> None:
    """Show everything that a record with this job can be asked for."""
    with display(Out(Format.json, quiet=False)) as watch:
        for event in told:
            watch(event)
    page = report.collect_job(store, job_id)
    report.render(page)
    to_json(page)
    report.render_overview(report.overview(store))
    list(impossible_runs(store))
    job = store.job(job_id)
    for arm in job.plan.arms:
        with suppress(DgxlabError):
            report.render(report.collect(store, arm.name))


def _reply(random: Random) -> str:
    verb = random.choice(list(REPLIES))
    reply, ask = REPLIES[verb]
    answer = ask(Host(Saying(_mutant(reply, random)), HostEntry("box")))
    canonical(answer)
    if verb == "probe":
        list(check_facts(answer.facts, HostEntry("box"), answer.absent))
        for cuda in ("ON", "OFF"):
            assert Device.of(to_json(answer.facts), {"GGML_CUDA": cuda}).label
    return "read"


def _mutant(value: Any, random: Random) -> bytes:
    """Return JSON in which one value, at any depth, is another or is gone."""
    copy = json.loads(json.dumps(value))
    places = list(_places(copy))
    holder, key = random.choice(places)
    if random.random() < 0.15:
        del holder[key]
    elif random.random() < 0.2:
        other, name = random.choice(places)
        holder[key] = json.loads(json.dumps(other[name]))
    else:
        holder[key] = random.choice(ODD)
    text = json.dumps(copy, separators=(",", ":"))
    if random.random() < 0.01:
        text = text.replace("{}", DEEP, 1)
    return text.encode() + b"\n"


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Yield every place in JSON, as its holder and the key or the number there."""
    for key in list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        yield value, key
        yield from _places(value[key])


MUTANTS = Fault(
    "mutants",
    "mutated journals and replies: one value of another type, out of range, exchanged or gone",
    100_000,
    "refused with exit 4, or read and reported; no traceback",
    record,
    trial,
    limit_s=30.0,
)
