"""A/B sessions on the real llama.cpp: an experiment against itself, and against one that is truly slower."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from dgxlab import audit, judgement
from dgxlab.judgement import Judged
from dgxlab.lab.outlook import outlook
from dgxlab.lab.session import Outcome
from dgxlab.model import Experiment, LlamaBench, ParityGate, Session
from dgxlab.spec import load
from tests.conftest import PROJECT, Bench, Quickstart

pytestmark = pytest.mark.llama

ATTEMPTS = 3
"""How often a session is held where other programs make a verdict invalid, or one that counts too uncertain."""


@pytest.fixture
def bench(quickstart: Quickstart) -> Bench:
    """The record and the host of the quickstart, with its build."""
    return quickstart.bench


def arm(name: str) -> Experiment:
    """Return a shipped experiment at half its sizes, with a gate of a second instead of half a minute."""
    experiment = load(PROJECT / "experiments" / "cpu" / f"{name}.yaml")
    (entry,) = experiment.bench
    assert isinstance(entry, LlamaBench)
    small = replace(entry, n_prompt=(128,), n_gen=(16,))
    return replace(experiment, gates=(ParityGate("SQR", "CPU"),), bench=(small,))


def of_the_prompt(claims: list[Judged]) -> Judged:
    """Return the faster of the claims."""
    return max(claims, key=lambda claim: claim.baseline or 0.0)


def valid(claims: list[Judged]) -> bool:
    """Return whether no claim is invalid: of a build against itself no more is asked, it may well stay uncertain."""
    return "invalid" not in {claim.verdict.verdict for claim in claims}


def settled(claims: list[Judged]) -> bool:
    """Return whether no claim is invalid and that of the prompt is not uncertain."""
    return valid(claims) and of_the_prompt(claims).verdict.verdict != "inconclusive"


def hold(
    bench: Bench, baseline: Experiment, candidate: Experiment, enough: Callable[[list[Judged]], bool], kind: str = "ab"
) -> tuple[Outcome, list[Any]]:
    """Hold a session, and again while its verdicts are not `enough`: other programs make the machine wander."""
    for _ in range(ATTEMPTS):
        session, events = bench.run(candidate, kind, baseline=baseline)
        if enough(judgement.recorded(bench.lab.store, session.job_id)):
            break
    return session, events


def test_a_slower_arm_is_called_slower(bench: Bench) -> None:
    """One thread against two, with a limit that a processor shared with other programs keeps."""
    wide = Session(cycles=5, drift_limit=0.5)
    baseline, candidate = (replace(arm(name), session=wide) for name in ("threads-2", "threads-1"))
    session, events = hold(bench, baseline, candidate, settled)
    assert session.error is None
    claims = judgement.recorded(bench.lab.store, session.job_id)
    assert [claim.comparison.metric for claim in claims] == ["avg_ts", "avg_ts"]
    prompt = of_the_prompt(claims)
    assert (prompt.verdict.verdict, prompt.promoted) == ("slower", False)
    assert prompt.verdict.effect is not None
    assert prompt.verdict.effect < 0
    assert audit.check(bench.lab.store) == []
    runs = [event for event in events if event["event"] == "run" and event["role"] != "burn-in"]
    assert [run["role"] for run in runs[:5]] == ["baseline", "candidate", "baseline", "candidate", "baseline"]
    gates = [event["id"] for event in events if event["event"] == "gate"]
    assert gates == ["gate:0", "gate:1", "gate:0:after", "gate:1:after"]


def test_an_experiment_against_itself(bench: Bench) -> None:
    """An A/A session: one build, a noise floor a cell, and nothing to keep."""
    claim = replace(arm("threads-1"), session=Session(cycles=5))
    session, events = hold(bench, claim, claim, valid, kind="noise")
    assert session.error is None
    assert len([event for event in events if event["event"] == "build"]) == 1
    claims = judgement.recorded(bench.lab.store, session.job_id)
    assert len(claims) == 2
    for each in claims:
        assert not each.promoted
        assert each.verdict.effect is not None
    cells = [each.comparison.baseline for each in claims]
    (model,) = {row["model_id"] for row in bench.lab.store.rows("SELECT model_id FROM verdicts")}
    (device,) = bench.lab.store.devices(session.job_id).values()
    floors = judgement.noise_floors(bench.lab.store, device.id, cells, model)
    assert {floor.session for floor in floors} == {session.job_id}
    assert {floor.cell for floor in floors} == set(cells)
    ahead = outlook(bench.lab.store, arm("threads-1"), bench.lab.store.job(session.job_id).plan.arms[0].source, 0.5)
    assert {claim.label for claim in ahead.claims} == {"pp128", "tg16"}
    assert ahead.unknown == ()
    assert ahead.seconds is not None
    assert ahead.seconds > 0
