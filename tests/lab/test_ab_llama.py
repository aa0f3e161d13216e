"""A/B sessions on the real llama.cpp: an experiment against itself, and against one that is truly slower."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from dgxlab import judgement, lab, store
from dgxlab.model import Experiment, ParityGate, Session
from dgxlab.spec import load
from tests.conftest import PROJECT, Bench, Quickstart

pytestmark = pytest.mark.llama

ATTEMPTS = 3
"""How often a session is held where other programs make a verdict invalid, or too uncertain to settle."""


@pytest.fixture
def bench(quickstart: Quickstart) -> Bench:
    """The record and the host of the quickstart, with its build."""
    return quickstart.bench


def arm(name: str) -> Experiment:
    """Return a shipped experiment with a gate of a second instead of half a minute."""
    return replace(load(PROJECT / "experiments" / f"{name}.yaml"), gates=(ParityGate("SQR", "CPU"),))


def hold(bench: Bench, baseline: Experiment, candidate: Experiment, **options: Any) -> tuple[lab.Session, list[Any]]:
    """Hold a session, and again while other programs make the machine wander too far for it; returns its events."""
    events: list[Mapping[str, Any]] = []
    for _ in range(ATTEMPTS):
        events.clear()
        session = lab.ab(bench.lab, baseline, candidate, watch=lambda event: events.append(dict(event)), **options)
        found = judgement.recorded(bench.lab.store, session.job_id)
        if not {"invalid", "inconclusive"} & {one.verdict.verdict for one in found}:
            break
    return session, events


def test_a_slower_arm_is_called_slower(bench: Bench) -> None:
    """One thread against two, as shipped, but for a limit that a processor shared with other programs keeps."""
    wide = Session(cycles=4, drift_limit=0.5)
    baseline, candidate = (replace(arm(name), session=wide) for name in ("threads-2", "threads-1"))
    session, events = hold(bench, baseline, candidate)
    assert session.error is None
    found = judgement.recorded(bench.lab.store, session.job_id)
    assert [one.claim.metric for one in found] == ["avg_ts", "avg_ts"]
    prompt = max(found, key=lambda one: one.baseline or 0.0)
    assert (prompt.verdict.verdict, prompt.promoted) == ("slower", False)
    assert prompt.verdict.effect is not None
    assert prompt.verdict.effect < 0
    assert store.check(bench.lab.store) == judgement.check(bench.lab.store) == []
    runs = [event for event in events if event["event"] == "run" and event["role"] != "burn-in"]
    assert [run["role"] for run in runs[:5]] == ["baseline", "candidate", "baseline", "candidate", "baseline"]
    gates = [event["id"] for event in events if event["event"] == "gate"]
    assert gates == ["gate:0", "gate:1", "gate:0:after", "gate:1:after"]


def test_an_experiment_against_itself(bench: Bench) -> None:
    """An A/A session: one build, a noise floor a cell, and nothing to keep."""
    session, events = hold(bench, arm("threads-1"), arm("threads-1"), kind="noise")
    assert session.error is None
    assert len([event for event in events if event["event"] == "build"]) == 1
    found = judgement.recorded(bench.lab.store, session.job_id)
    assert len(found) == 2
    for one in found:
        assert not one.promoted
        assert one.verdict.effect is not None
    cells = [one.claim.baseline for one in found]
    (model,) = {row["model_id"] for row in bench.lab.store.rows("SELECT model_id FROM verdicts")}
    host_id = bench.lab.store.job(session.job_id).host_id or ""
    floors = judgement.noise_floors(bench.lab.store, host_id, cells, model, cuda=False)
    assert {floor.session for floor in floors} == {session.job_id}
    assert {floor.cell for floor in floors} == set(cells)
    ahead = lab.outlook(bench.lab.store, arm("threads-1"), bench.lab.store.job(session.job_id).plan.arms[0].source, 0.5)
    assert {one.label for one in ahead.claims} == {"pp256", "tg32"}
    assert ahead.unknown == ()
    assert ahead.seconds is not None
    assert ahead.seconds > 0
