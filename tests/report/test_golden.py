"""Whole reports against golden files."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dgxlab.errors import DgxlabError
from dgxlab.model import BASELINE, CANDIDATE, ChainStep, FileModel
from dgxlab.report import Report, collect, collect_job, render
from dgxlab.store import Store
from dgxlab.tools import LlamaBench
from tests.journals import CAPPED, CLOCK, THROTTLED, source
from tests.report.worlds import CYCLES, Session, agrees, fails, h200, numbers, places, session_of_two, whole
from tests.report.worlds import GOLDEN as RAW

GOLDEN = Path(__file__).resolve().parent / "golden"
A, B, C = "20261120-103000-h200-a", "20261120-114500-h200-b", "20261120-120000-h200-c"


def _whole(store: Store) -> str:
    whole(store, A, tree=source(["backend-ops-shapes", "w4a16"]))
    return render(collect(store, "h200"))


def _troubled(store: Store) -> str:
    """Return two sessions on a dirty tree: a gate and runs that failed, one mended later, others still missing."""
    tree = replace(source(), dirty=True)
    models = {"q4k": FileModel("~/bench/Qwen3-32B-Q4_K_M.gguf")}
    bench = (*h200().bench, LlamaBench("q4k", (), (128,), {"n_depth": (0, 4096), "n_ubatch": (512, 2048)}))
    experiment = h200(models=models, bench=bench, hypothesis="a|b beats <c>")
    failed = {"passed": 1101, "status": "failed", "rc": 1, "failed": ["type_a=q4_0,n=1", "type_a=q4_K,n=8"]}
    first = Session(store, experiment, A, tree=tree).build()
    first.gates(**failed, reasons=["passed 1101 of 1103", "2 FAIL lines"]).end("failed", 5)
    second = Session(store, experiment, B, tree=tree).build().gates(status="flaky", flaky=["type_a=q4_0,n=1"])
    second.runs(ends=fails("test-backend-ops was killed by SIGSEGV: CUDA error | 700"), only=["backend-ops"])
    second.runs(numbers(61.25, samples=5), only=["llama-bench"])
    second.runs(ends=fails("'w4a16:' is not on stderr", "discarded"), only=["batched-bench"])
    second.journal.add("error", exit_code=4, message="test-backend-ops was killed by SIGSEGV", next="", details="")
    second.end("failed", 4)
    return render(collect(store, "h200"))


def _session(store: Store) -> str:
    """Return one session that measured only a part, and is still running."""
    whole(store, A)
    session = Session(store, h200(), B, wanted=lambda model, env, cell: cell.tool == "batched-bench").build()
    session.save()
    return render(collect_job(store, B))


def _flagged(store: Store) -> str:
    """Return a session whose GPU was sampled: runs that were throttled, by whom, and one that was not."""
    hot = {**CLOCK, "median": 1305.0}
    warm = {**CLOCK, "name": "temperature.gpu", "unit": "C", "median": 71.0, "min": 30.0, "max": 92.0}
    session = Session(store, h200(), A).build().gates()
    session.runs(only=["backend-ops"], telemetry=[hot, warm], flags=[THROTTLED, CAPPED])
    session.runs(only=["llama-bench"], telemetry=[CLOCK, {**warm, "median": 55.0}], flags=[])
    session.runs(only=["batched-bench"], telemetry=[CLOCK], flags=[CAPPED]).end()
    only = Session(
        store,
        h200(),
        B,
        wanted=lambda model, env, cell: cell.params.get("n_gen") or cell.params.get("type_a") == "q4_K",
    )
    only.build().runs(only=["llama-bench"], telemetry=[hot], flags=[{**CAPPED, "reason": "no | samples"}])
    only.runs(only=["backend-ops"], telemetry=[CLOCK], flags=[]).end()
    return render(collect(store, "h200"))


def _compared(store: Store) -> str:
    """Return an A/B session with faster, slower and same cells, and what does not count of its chains."""
    session = (
        session_of_two(store, A, noise=0.004, bench=(*h200().bench, LlamaBench("q4k", (1024,), ()))).build().gates()
    )
    effects = {"chain:0": 0.9, "chain:1": 1.10, "chain:2": 1.002, "chain:3": 0.95}

    def value(step: ChainStep, role: str, cycle: int) -> float:
        stepped = 1.1 if step.id == "chain:3" and cycle >= (3 if role == BASELINE else 4) else 1.0
        return 1000 * stepped * (1 + 0.001 * (2 * cycle % 5)) * (effects[step.id] if role == CANDIDATE else 1)

    hot = {**CLOCK, "median": 1305.0}
    for step in session.plan.chains:
        for role, cycle in places(step.cycles + (step.id == "chain:1")):
            around: dict[str, Any] = {"telemetry": [CLOCK], "flags": []}
            if (step.id, role, cycle) == ("chain:1", CANDIDATE, 3):
                around = {"telemetry": [hot], "flags": [THROTTLED]}
            if step.id == "chain:1" and role == BASELINE:
                around["flags"] = [{**CAPPED, "reason": f"SW power cap for {100 + cycle} ms"}]
            if (step.id, role, cycle) == ("chain:2", BASELINE, 0):
                session.place(step, role, cycle, None, **around)
            session.place(step, role, cycle, value(step, role, cycle), **around)
    session.gates(after=True).end()
    return render(collect(store, "h200-vs-w4a16"))


def _wide(store: Store) -> str:
    _compared(store)
    return render(collect(store, "h200-vs-w4a16"), wide=True)


def _screened(store: Store) -> str:
    session = session_of_two(store, A, kind="screen", noise=0.004).build().gates()
    session.chains(lambda step, role, cycle: 900.0 + cycle if role == CANDIDATE else 1000.0 + cycle).end()
    return render(collect_job(store, A))


def _noise(store: Store) -> str:
    session = session_of_two(store, A, kind="noise", bench=(h200().bench[1],)).build().gates()
    session.chains(lambda step, role, cycle: 1000.0 + 3 * (cycle % 3) - 2 * (role == CANDIDATE)).gates(after=True).end()
    return render(collect_job(store, A))


def _cut(store: Store) -> str:
    """Return a session that was cancelled in its first chain."""
    session = session_of_two(store, A).build().gates()
    chain = next(session.plan.chains)
    for role, cycle in places(2):
        session.place(chain, role, cycle, 1000.0)
    session.end("cancelled", 130)
    return render(collect_job(store, A))


def _unfinished(store: Store) -> str:
    """Return a session that goes on: how far it is, and nothing of what it found."""
    session = session_of_two(store, A).build().gates()
    first, second, *_ = session.plan.chains
    for role, cycle in places(CYCLES):
        session.place(first, role, cycle, 4242.0)
    session.place(second, "burn-in", 1, 4242.0)
    session.save()
    return render(collect_job(store, A))


def _gate_again(store: Store) -> str:
    """Return an experiment whose gate failed with many cases, crashed before its summary, and then passed."""
    failing = (RAW.parent / "cpu" / "tbo-test-failing.txt").read_text().replace("CPU", "CUDA0")
    why = {"status": "failed", "reasons": ["2 of 1103 cases failed"], "failed": ["n=1", "n=2", "n=3", "n=4"], "rc": 1}
    session = Session(store, h200(), A).build().gates(failing, **why)
    error = "gate MUL_MAT on CUDA0 failed for h200: 2 of 1103 cases failed"
    session.journal.add("error", exit_code=5, message=error, next="", details="")
    session.end("failed", 5)
    crashed = {
        "passed": None,
        "total": None,
        "unsupported": None,
        "status": "failed",
        "reasons": ["no summary"],
        "failed": [],
    }
    Session(store, h200(), B).build().gates(**crashed).end("failed", 5)
    before = [render(collect_job(store, job)) for job in (A, B)]
    whole(store, "20261120-195900-h200-z")
    return "".join([*before, render(collect(store, "h200"))])


def _never_began(store: Store) -> str:
    """Return sessions that were recorded, lost, or refused by the host, beside older results."""
    pages = []
    for job, state, error in ((A, "intended", ""), (B, "lost", "the host was rebooted"), (C, "failed", "no route")):
        Session(store, h200(name=state), job)
        if error:
            store.set_state(job, state, error=error, exit_code=3)
        pages.append(render(collect(store, state)))
    whole(store, "20261120-080000-h200-d")
    Session(store, h200(), "20261120-133000-h200-e")
    store.set_state("20261120-133000-h200-e", "failed", error="host h200 cannot be reached", exit_code=3)
    return "".join([*pages, render(collect(store, "h200"))])


def _unexplained(store: Store) -> str:
    """Return sessions in which runs failed or were discarded, with an error that explains the runs, and another."""
    session = Session(store, h200(), A).build().gates()
    session.runs(ends=fails("test-backend-ops printed nothing"), only=["backend-ops"])
    session.runs(ends=fails("'w4a16:' is not on stderr", "discarded"), only=["llama-bench"])
    session.journal.add("error", exit_code=4, message="test-backend-ops printed nothing", next="", details="")
    session.runs(only=["batched-bench"]).end("failed", 4)
    other = Session(store, h200(name="full"), B, tree=source(["w4a16"])).build()
    other.runs(ends=fails("llama-bench printed nothing"), only=["llama-bench"])
    other.journal.add("error", exit_code=4, message="the disk is full", next="df -h", details="")
    other.end("failed", 4)
    return render(collect(store, "h200")) + render(collect(store, "full"))


def _refused(store: Store) -> str:
    """Return why reports are refused: names that are not there, and a plan of another dgxlab."""
    Session(store, h200(), A).build().end()
    lines = []

    def ask(form: Callable[[Store, str], Report], name: str) -> None:
        with pytest.raises(DgxlabError) as error:
            form(store, name)
        lines.append(f"{name}: {error.value.message.replace(str(store.path), 'DB')} (next: {error.value.next})\n")

    ask(collect, "h20")
    ask(collect, "zzz")
    ask(collect_job, "nope")
    (row,) = store.rows("SELECT plan FROM jobs")
    store.update_job(A, plan=json.dumps({**json.loads(row["plan"]), "new_field": 1}))
    ask(collect_job, A)
    return "".join(lines)


PAGES: dict[str, Callable[[Store], str]] = {
    "whole": _whole,
    "troubled": _troubled,
    "session": _session,
    "flagged": _flagged,
    "compared": _compared,
    "wide": _wide,
    "screened": _screened,
    "noise": _noise,
    "cut": _cut,
    "unfinished": _unfinished,
    "gate-again": _gate_again,
    "never-began": _never_began,
    "unexplained": _unexplained,
    "refused": _refused,
}


@pytest.mark.parametrize("name", sorted(PAGES))
def test_golden(name: str, store: Store) -> None:
    assert agrees(PAGES[name](store), GOLDEN / f"{name}.md")
