"""Where a job is, told with its progress: at the start, and after a second client has joined it."""

import math
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dgxlab import plan, stats
from dgxlab.agent.environment import Settings
from dgxlab.errors import AGAIN, SpecError
from dgxlab.ingest import ingest
from dgxlab.lab.jobs import adopt, follow
from dgxlab.lab.outlook import device_on, expected, least_s, shared
from dgxlab.lab.progress import Progress
from dgxlab.model import (
    ARM,
    BuildStep,
    ChainStep,
    CheckCommand,
    DerivedModel,
    GateStep,
    HostEntry,
    ModelStep,
    Plan,
    Session,
    SyntheticModel,
    events,
)
from dgxlab.store import Store
from dgxlab.units import duration
from tests import journals, toy
from tests.journals import TINY, read, told
from tests.lab.conftest import Event, ToyLab, kinds
from tests.machines import script
from tests.store.conftest import measured


def with_model(*chains: ChainStep) -> Plan:
    """Return the plan of a session that makes the model of its chains ready."""
    job = journals.session_plan("J", *chains)
    models = (ModelStep(f"model:tiny:{arm.name}", arm.name, "tiny", "{models}/tiny.gguf", TINY) for arm in job.arms)
    return replace(job, steps=(*models, *job.steps))


def places(events: list[Event]) -> list[str]:
    return [event["note"] for event in kinds(events, "progress") if "step " in event["note"]]


def test_each_step_is_told_with_its_place(toy_lab: ToyLab) -> None:
    """A second job knows from the first how long its steps take."""
    _, events = toy_lab.run_well()
    first = places(events)
    steps = {event["id"] for event in kinds(events, "step")}
    assert first[0].startswith(f"step 1 of {len(steps)}: build toy")
    assert any(note.startswith(f"step {len(steps)} of {len(steps)}: ") for note in first)
    assert any(": gate MUL_MAT on CPU of toy" in note for note in first)
    assert not any("about" in note for note in first)
    _, events = toy_lab.run_well(again=True)
    again = places(events)
    assert any(", about " in note for note in again if ": gate " in note)


def test_a_step_that_takes_longer_than_before_says_no_time_left(toy_lab: ToyLab) -> None:
    outcome, _ = toy_lab.run_well()
    seen: list[Any] = []
    progress = Progress(toy_lab.lab.store, toy_lab.host.entry, toy_lab.lab.store.job(outcome.job_id), seen.append)
    progress.took = dict.fromkeys(progress.steps, 10.0)
    for t in (0.0, 4.0, 11.0):
        progress.see(events.ProgressEvent(t=t, id=next(iter(progress.steps)), done=1, total=2, note="cmake"))
    rest = 10 * len(progress.steps)
    assert [event.note.partition(", ")[2] for event in seen[2:]] == [f"{duration(rest - 4)} left: cmake", ""]
    assert seen[-1].note == f"step 1 of {len(progress.steps)}: cmake"


def test_a_chain_counts_what_follows_it(toy_lab: ToyLab) -> None:
    """Its gates run again after it, and may never have run before; a second chain takes an unknown time."""
    entries = [toy.llama_bench(n_prompt=(size,), n_gen=(0,)) for size in (16, 32)]
    arms = [toy_lab.experiment(name=name, bench=entries, session=Session(cycles=5)) for name in ("toy", "other")]
    outcome, seen = toy_lab.run_well(arms[1], "ab", baseline=arms[0])
    gates = sum(gate["seconds"] for gate in kinds(seen, "gate") if not gate["id"].endswith(":after"))
    written = [told(event) for event in read(toy_lab.root / "jobs" / outcome.job_id / "journal.jsonl")]
    added: dict[str, list[tuple[float, str]]] = {"chain:0": [], "chain:1": []}
    for event, own in zip(kinds(seen, "chain"), kinds(written, "chain"), strict=True):
        if own["left_s"]:
            added[event["id"]].append((event["left_s"] - own["left_s"], event["note"]))
    # its runs are too short to see other programs, which the last of the burn-in says too
    assert {note.rpartition("; ")[2] for _, note in added["chain:0"]} == {"what follows is not counted"}
    assert [more for more, _ in added["chain:1"]] == [pytest.approx(gates)] * len(added["chain:1"])


@pytest.mark.parametrize(
    ("cycles", "place", "note"),
    [
        (0, "at least 1 min 20 s left", "a chain that follows is counted with its fewest cycles"),
        (5, "1 min 20 s left", ""),
    ],
)
def test_a_chain_that_chooses_its_cycles_may_take_longer(store: Store, cycles: int, place: str, note: str) -> None:
    steps = [journals.chain_step(size, (journals.cell(size),), cycles=cycles) for size in (512, 1024)]
    measured(store, journals.Journal(job := with_model(*steps)))
    seen: list[Any] = []
    progress = Progress(store, HostEntry("local"), store.job(job.job_id), seen.append)
    progress.took = dict.fromkeys(progress.steps, 0.0) | {step.id: 40.0 for step in steps}
    progress.see(events.StepEvent(id=job.steps[0].id, kind="build", state="started"))
    assert seen[0].note.endswith(f", {place}")
    left = dict.fromkeys(("done", "total", "valid", "cycles"), 9) | {"drift": None, "conditions": {}, "left_s": 10.0}
    for step in steps:
        progress.see(events.ChainEvent(id=step.id, state="running", role="baseline", cycle=2, note="", **left))
    told = [(event.left_s, event.note) for event in seen if isinstance(event, events.ChainEvent)]
    assert told == [(50.0, note), (10.0, "")]


def test_a_gate_takes_as_long_as_it_did_and_a_new_one_as_long_as_one_of_its_op(toy_lab: ToyLab) -> None:
    known, other, new = (toy.parity(env={"GATE": name}) for name in ("known", "other", "new"))
    toy_lab.run_well(toy_lab.experiment(gates=(known, other)))
    store = toy_lab.lab.store
    rows = store.rows(
        "SELECT json_extract(env, '$.GATE') AS gate, gates.seconds, device_id FROM gates JOIN arms USING (job_id)"
    )
    took = {row["gate"]: row["seconds"] for row in rows}
    side = toy_lab.side(toy_lab.experiment(gates=(known, new)))
    job = plan.make(side.experiment, side.source, job_id="j")
    times = expected(store, job, rows[0]["device_id"])
    assert (times["gate:0"], times["gate:1"]) == (took["known"], took["other"])


def test_local_is_this_machine_whatever_the_record_calls_so(
    toy_lab: ToyLab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To look for its device starts no program, as a job may be measuring."""
    toy_lab.run_well()
    for name in ("cc", "cmake", "nvidia-smi"):
        script(tmp_path / "bin" / name, f"#!/bin/sh\ntouch {tmp_path}/started; kill -KILL $$\n")
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
    store = toy_lab.lab.store
    here = store.rows("SELECT device_id FROM arms")[0]["device_id"]
    measured(store, journals.Journal(journals.plan("job-1")).job().build())
    assert store.devices("job-1")["toy"].id == journals.device()
    assert device_on(store, HostEntry("local"), store.job("job-1").plan) == here
    assert not (tmp_path / "started").exists()


def test_a_device_is_of_the_host_as_it_is_set_now(store: Store) -> None:
    """Other settings make another device, of which no time is known; an older agent reported its processors alone."""
    box, one = HostEntry("box", ssh="box"), {"CUDA_VISIBLE_DEVICES": "1"}
    few = {"settings": Settings(processors=(0, 1)).digest}
    reports = {"plain": {}, "few": few, "one": {"settings": Settings(env=one).digest}, "older": {"processors": [0, 1]}}
    for name, details in reports.items():
        facts = replace(journals.facts(name), details=details)
        journal = journals.Journal(journals.plan(name), facts).job().build()
        store.intend(journal.plan, "box", "0.1.0")
        ingest(store, name, journal.lines())
    known = {store.devices(name)["toy"].id: name for name in reports}

    def seen(**settings: Any) -> str:
        return known.get(device_on(store, replace(box, **settings), journals.plan("job")), "")

    assert (seen(), seen(processors=(0, 1)), seen(processors=(0, 2))) == ("plain", "few", "")
    assert (seen(env={**one, "CC": "gcc-12"}), seen(env={"CUDA_VISIBLE_DEVICES": "0"})) == ("one", "")


def test_what_both_arms_need_is_made_once(toy_lab: ToyLab) -> None:
    toy_lab.run_well()
    store = toy_lab.lab.store
    sides = [toy_lab.side(toy_lab.experiment(name=name)) for name in ("toy", "other")]
    job = plan.make_ab(sides[0].experiment, sides[1].experiment, (sides[0].source, sides[1].source), job_id="j")
    alone = plan.make(sides[0].experiment, sides[0].source, job_id="j")
    device = store.rows("SELECT device_id FROM arms")[0]["device_id"]
    times = expected(store, job, device)
    assert times["build:toy"] == expected(store, alone, device)["build:toy"] != 0
    assert times["build:other"] == 0


def test_a_build_takes_anew_as_long_as_the_longest(toy_lab: ToyLab) -> None:
    """A later one of the same pin, as of a changed checkout, compiles only what has changed."""
    store = toy_lab.lab.store
    for number, seconds in enumerate((3.0, 270.0, 9.0)):
        measured(store, journals.Journal(journals.plan(f"job-{number}")).job().build(seconds=seconds))
    job = replace(journals.plan("j"), steps=(BuildStep("build:toy", "toy", (), ()),))
    times = [expected(store, job, journals.device(), anew=anew)["build:toy"] for anew in (True, False)]
    assert times == [270.0, 9.0]


@pytest.mark.parametrize(("recipe", "anew", "took"), [(TINY, True, None), (TINY, False, 5e-4), (None, True, 5e-4)])
def test_a_model_that_was_reused_tells_not_how_long_it_takes_to_make(
    toy_lab: ToyLab, recipe: SyntheticModel | None, anew: bool, took: float | None
) -> None:
    """A file is never made, only read."""
    store, step = toy_lab.lab.store, ModelStep("model:tiny", "toy", "tiny", "/models/tiny.gguf", recipe)
    journal = journals.Journal(journals.plan("job-1")).job().build()
    measured(store, journal.model(recipe=recipe, path=step.path, reused=True, seconds=5e-4))
    job = replace(journals.plan("j"), steps=(step,))
    assert expected(store, job, journals.device(), anew=anew)[step.id] == took


@pytest.mark.parametrize("name", ["tiny.gguf", "other.gguf"])
def test_what_another_model_took_tells_nothing(toy_lab: ToyLab, name: str) -> None:
    """Of a model of the same name: how long it was read, and what was launched with it."""
    store, file = toy_lab.lab.store, {"recipe": None, "path": "/models/tiny.gguf", "model_id": "file-1"}
    journal = journals.Journal(journals.plan("job-1")).job().build().model(**file)
    measured(store, journal.run(model_id="file-1", seconds=2.0).check(inputs={"tiny": "file-1"}))
    chain = journals.chain_step(cycles=0)
    gate = GateStep("gate:0", "toy", journals.CHECK, (CheckCommand(ARM, ("x",), {"FAST": "1"}, "tiny"),))
    model = ModelStep("model:tiny", "toy", "tiny", f"/models/{name}")
    job = replace(journals.plan("j"), steps=(model, gate, chain.baseline, chain))
    known = {step for step, took in expected(store, job, journals.device()).items() if took is not None}
    assert known == ({step.id for step in job.steps} if name == "tiny.gguf" else set())


def test_each_model_made_of_a_file_takes_its_time(toy_lab: ToyLab) -> None:
    file = toy_lab.experiment().models["m"]
    models = {"m": file, **{name: DerivedModel(file, name) for name in ("Q4_0", "Q8_0")}}
    benches = tuple(toy.llama_bench(model=name) for name in ("Q4_0", "Q8_0"))
    side = toy_lab.side(toy_lab.experiment(models=models, bench=benches))
    times = expected(toy_lab.lab.store, plan.make(side.experiment, side.source, job_id="j"), "")
    assert (times["model:Q4_0"], times["model:Q8_0"]) == (None, None)


def test_what_a_job_takes_at_least_is_the_sum_of_its_known_parts(toy_lab: ToyLab) -> None:
    """Of both arms' gates, before and after the chains, each once; builds may be there already."""
    toy_lab.run_well()
    store = toy_lab.lab.store
    sides = [toy_lab.side(toy_lab.experiment(name=name)) for name in ("toy", "other")]
    job = plan.make_ab(sides[0].experiment, sides[1].experiment, (sides[0].source, sides[1].source), job_id="j")
    device = store.rows("SELECT device_id FROM arms")[0]["device_id"]
    times = expected(store, job, device)
    parts = [times[step.id] for step in job.steps if isinstance(step, GateStep | ChainStep)]
    assert len(parts) > 4
    assert least_s(store, job, device) == pytest.approx(sum(filter(None, parts)))


def test_who_joins_later_is_told_too(toy_lab: ToyLab) -> None:
    job = toy_lab.submit(toy_lab.slow())
    seen: list[Event] = []

    def leave(event: Any) -> None:
        seen.append(told(event))
        if "llama-bench" in str(seen[-1].get("note")):
            raise KeyboardInterrupt

    adopt(toy_lab.lab, toy_lab.host, job.job_id, leave)
    try:
        follow(toy_lab.lab, toy_lab.host, job.job_id, leave)
    except Exception as stopped:
        assert "goes on" in str(stopped)  # noqa: PT017
    toy_lab.release()
    later: list[Event] = []
    assert follow(toy_lab.lab, toy_lab.host, job.job_id, lambda event: later.append(told(event))) is None
    assert places(seen)[-1].startswith("step ")


def test_chains_share_the_time_by_what_each_needs(toy_lab: ToyLab) -> None:
    """Where one never ran anywhere, they have equal shares; what cannot be enough is refused, with what would be."""
    store = toy_lab.lab.store
    journal = journals.Journal(journals.plan("job-1")).job().build().model()
    measured(store, journal.run({512: [1.5]}, seconds=2.0).run({1024: [2.5]}, seconds=20.0))

    def shares(max_s: float, *sizes: int, host: str = "host-a") -> list[float]:
        steps = [journals.chain_step(size, (journals.cell(size),), cycles=0) for size in sizes]
        job = with_model(*(replace(step, claims=1, max_s=max_s / len(sizes)) for step in steps))
        return [chain.max_s for chain in shared(store, job, journals.device(host)).chains]

    assert shares(660.0, 512, 1024) == pytest.approx([60.0, 600.0])
    assert shares(66.0, 512, 1024, host="host-b") == pytest.approx([6.0, 60.0])  # by another's times, which refuse none
    one = journals.Journal(journals.plan("job-2"), journals.facts("host-c")).job().build().model()
    measured(store, one.run({512: [1.5]}, seconds=400.0))  # times of two devices are not set beside each other
    assert shares(132000.0, 512, 1024, host="host-c") == pytest.approx([12000.0, 120000.0])
    assert shares(660.0, 512, 4096) == [330.0, 330.0]
    measured(store, journal.run({256: [1.5], 128: [1.5]}, seconds=900.0))  # says nothing of one cell alone
    assert shares(660.0, 512, 256) == [330.0, 330.0]
    assert shares(0.0, 512, 1024) == [0.0, 0.0]
    runs = stats.PLANNING_RUNS + 2 * stats.fewest_cycles(1) + 1
    with pytest.raises(SpecError, match=f"1 min 00 s are too short: .* {duration(runs * 20.0)} or more") as refused:
        shares(60.0, 1024, 4096)
    assert refused.value.next == f"{AGAIN} with --max-minutes {math.ceil(1.1 * runs * 20 / 60)}"
