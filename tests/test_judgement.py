"""Verdicts from journals: what counts, what makes one invalid and for which reasons, and computing them again.

`python -m tests.test_judgement` writes the golden file of verdicts and reasons anew, for a person to read.
"""

import json
import random
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from dgxlab import judgement, stats
from dgxlab.ingest import ingest
from dgxlab.judgement import Judged, judge, recorded, session_verdict
from dgxlab.judgement.verdicts import ENDS
from dgxlab.model import BASELINE, BURN_IN, CANDIDATE, PROTOCOL, Cell, ChainStep, GateStep, Noise
from dgxlab.store import Store, check
from tests.journals import (
    CAPPED,
    CLOCK,
    FASTER,
    THROTTLED,
    A,
    Journal,
    cell,
    chain_step,
    compared,
    device,
    dump,
    facts,
    intend,
    session_plan,
)

GOLDEN = Path(__file__).resolve().parent / "golden" / "judgement.json"
JOB = "20261120-120000-toy-1"
KERNEL = Cell("backend-ops", "MUL_MAT q4_0 4096x512x14336", {"type_a": "q4_0", "n": 512})
STEP = chain_step()
JUMPING = (100.0, 110.0, 100.0, 110.0, 100.0, 110.0, 100.0)
SLIGHTLY = (103.0, 104.0, 103.0, 104.0, 103.0, 104.0)  # 3 % faster than A


def noise(sigma: float, cycles: int = 8, of: Cell | None = None) -> Noise:
    return Noise((of or cell()).key, "avg_ts", sigma, cycles, "an-older-job")


def begun(*chains: ChainStep, **changes: Any) -> Journal:
    """Return a session's journal up to where its chains begin, the gates passed."""
    return Journal(session_plan(JOB, *chains, **changes)).built().gates()


def read(store: Store, journal: Journal) -> list[Judged]:
    """Put a journal into the store; what is recorded is what is judged, and the record is sound."""
    intend(store, journal)
    ingest(store, journal.plan.job_id, journal.lines())
    judged = recorded(store, journal.plan.job_id)
    assert judged == judge(store, journal.plan.job_id)
    assert check(store) == judgement.check(store) == []
    return judged


def only(store: Store, journal: Journal) -> Judged:
    (judged,) = read(store, journal)
    return judged


Values = Sequence[Any]


def held(a: Values = A, b: Values = FASTER, end: str = "done", *, step: ChainStep = STEP, **plan: Any) -> Journal:
    """Return a session of one chain with these values, its gates passed; cancelled ones have no gates after it."""
    journal = begun(step, **plan).chain(step, a, b)
    return journal.gates().end() if end == "done" else journal.end(end, 130)


def failed(journal: Journal, error: str) -> Journal:
    journal.add("error", exit_code=8, message=error, next="", details="")
    return journal.end("failed", 8)


def cannot_be_saved() -> Journal:
    """No number of further cycles could help: the chain is whole."""
    journal = begun(STEP).chain(STEP, A[:1], ())
    for cycle in range(1, 6):
        journal.place(STEP, CANDIDATE, cycle, 110.0, flags=[THROTTLED]).place(STEP, BASELINE, cycle, 100.0)
    return journal.gates().end("failed", 8)


def hard_flag() -> Journal:
    """A throttled baseline costs both cycles beside it, a soft flag none; two more cycles make up for them."""
    journal = begun(STEP).chain(STEP, A[:1], FASTER[:1], flags=[CAPPED])
    journal.place(STEP, BASELINE, 1, 100.0, flags=[CAPPED, THROTTLED])
    for cycle in range(2, 9):
        journal.place(STEP, CANDIDATE, cycle, 110.0 + cycle % 2).place(STEP, BASELINE, cycle, 100.0)
    return journal.gates().end()


def half_crashed() -> Journal:
    """A program that works half the time has no number, however many cycles are left."""
    b = (None, 110.0, None, 111.0, None, 110.0, None, 111.0)
    return begun(STEP).chain(STEP, (*A, 101.0, 100.0), b).gates().end("failed", 8)


def two_cells(b: Values, **plan: Any) -> Journal:
    """The second cell's baseline jumps, or its candidate has no value."""
    a = list(zip(A, JUMPING if plan else A, strict=True))
    return held(a, b, step=chain_step(cells=(cell(), cell(1024))), **plan)


def three_chains() -> Journal:
    """The first is whole and not promoted, the second is cut, the third not begun."""
    steps = [chain_step(n, noise=[noise(0.002)]) for n in (1, 2, 3)]
    return begun(*steps).chain(steps[0], A, FASTER).chain(steps[1], A[:2], FASTER[:2]).end("cancelled", 130)


def no_burn_in() -> Journal:
    journal = begun(STEP).place(STEP, BURN_IN, 1, None).place(STEP, BURN_IN, 2, None)
    return failed(journal, "chain:1, burn-in 2 failed")


def gate_after(status: str, **counts: int) -> Journal:
    """A gate after the chains failed for an arm, or was flaky."""
    journal = begun(STEP).chain(STEP, A, FASTER)
    if status == "failed":
        return journal.gates(**counts).end("failed", 5)
    return journal.gate(arm="toy", status=status, flaky=["MUL_MAT(n=1)"]).gate(arm="patched").end()


def gate_before() -> Journal:
    return Journal(session_plan(JOB, chain_step())).built().gates(patched=1102).end("failed", 5)


def changed_gate() -> Journal:
    """The command line may have asked for less than the spec does."""
    plan = session_plan(JOB, STEP)
    steps = [replace(s, gate=replace(s.gate, overridden=True)) if isinstance(s, GateStep) else s for s in plan.steps]
    return Journal(replace(plan, steps=tuple(steps))).built().gates().chain(STEP, A, FASTER).gates().end()


def no_gate() -> Journal:
    """Nothing says that the faster arm computes the same."""
    plan = session_plan(JOB, STEP)
    steps = [step for step in plan.steps if not (isinstance(step, GateStep) and step.arm == "patched")]
    journal = Journal(replace(plan, steps=tuple(steps))).built().gate(arm="toy")
    return journal.chain(STEP, A, FASTER).gate(arm="toy").end()


def unsettled() -> Journal:
    """The verdict is kept, with the reason."""
    late = {"device": "host", "kind": "unsettled", "hard": False, "reason": "the burn-in did not settle in 8 runs"}
    return begun(STEP).place(STEP, BURN_IN, 1, 100.0, flags=[late]).chain(STEP, A, FASTER).gates().end()


def screened(noise: Sequence[Noise], b: float, cells: Sequence[Cell] = ()) -> Journal:
    """A screen, whose noise comes from its plan."""
    step = chain_step(cells=cells or (cell(),), noise=noise, screen=True)
    a, candidates = ([[value] * max(1, len(cells)) for value in side] for side in ((100.0, 100.2), (b,)))
    return begun(step, kind="screen").chain(step, a, candidates).end()


def at_clocks(clocks: tuple[float, float], gpus: int = 1, of: Cell | None = None) -> Journal:
    """The candidate is 10 % faster; a session whose arms ran at these SM clocks."""
    step = chain_step(cells=(of or cell(),))
    b = (110.2, 110.9, 110.3, 110.4, 110.6, 110.5)
    journal = begun(step).place(step, BURN_IN, 1, A[0]).place(step, BURN_IN, 2, A[0])
    runs = [(BASELINE, 0, A[0], clocks[0])]
    for cycle in range(1, 7):
        runs += [(CANDIDATE, cycle, b[cycle - 1], clocks[1]), (BASELINE, cycle, A[cycle], clocks[0])]
    for role, cycle, value, clock in runs:
        seen = {**CLOCK, "median": clock, "max": 2000.0}
        journal.place(step, role, cycle, value, telemetry=[{**seen, "device": f"GPU-{n}"} for n in range(gpus)])
    return journal.gates().end()


def at_power(watts: tuple[float, float | None], block_s: float = 0.0, **plan: Any) -> Journal:
    """Half of it on each of two GPUs; a run that does not count draws 900 W."""
    step = replace(chain_step(), block_s=block_s)
    journal = begun(step, **plan).place(step, BURN_IN, 1, 100.0)
    for cycle, value in enumerate((*A, 100.0)):
        journal.place(step, BASELINE, cycle, value, telemetry=drawing(watts[0]))
        if cycle < 7:
            drawn, flags = (watts[1], []) if cycle else (900.0, [THROTTLED])
            journal.place(step, CANDIDATE, cycle + 1, 110.0 + cycle % 2, telemetry=drawing(drawn), flags=flags)
    return journal.gates().end()


def drawing(watts: float | None) -> list[dict[str, Any]]:
    """Return the telemetry of a run whose two GPUs drew that much together."""
    if watts is None:
        return []
    half = {**CLOCK, "name": "power.draw", "unit": "W", "median": watts / 2, "min": 0.0, "max": watts}
    return [{**half, "device": f"GPU-{n}"} for n in (1, 2)]


SCENARIOS: dict[str, Callable[[], Journal]] = {
    "half of an arm crashed": half_crashed,
    "cannot be saved": cannot_be_saved,
    "too many steps": partial(held, (100.0, 100.0, 110.0, 110.0, 100.0, 100.0, 100.0)),
    "jumps to and fro": partial(held, JUMPING),
    "jumps to and fro, protocol 2": partial(held, JUMPING, protocol=2),
    "a cell without a value": partial(two_cells, [[x, None if x == 111.0 else x] for x in FASTER]),
    "a cell beyond hope": partial(two_cells, FASTER, protocol=2),
    "a cell beyond hope, another cut": partial(two_cells, (*FASTER[:5], None), protocol=2),
    "hard flag": hard_flag,
    "cut before a baseline": partial(held, A[:6], FASTER, "cancelled"),
    "cut before a candidate": partial(held, A[:4], FASTER[:3], "cancelled"),
    "cut in the first cycle": partial(held, A[:1], FASTER[:1], "cancelled"),
    "cut before the first candidate": partial(held, A[:1], (), "cancelled"),
    "cut with an error": lambda: failed(begun(STEP).chain(STEP, A[:4], FASTER[:3]), "spark is on fire"),
    "cut before a further cycle": partial(held, A, (*FASTER[:5], None), "cancelled"),
    "three chains": three_chains,
    "no burn-in": no_burn_in,
    "gate of the baseline failed after": partial(gate_after, "failed", toy=1102),
    "gate of the candidate failed after": partial(gate_after, "failed", patched=1102),
    "gate failed before": gate_before,
    "flaky gate": partial(gate_after, "flaky"),
    "gate changed by the command line": changed_gate,
    "no gate": no_gate,
    "burn-in did not settle": unsettled,
    "screen faster": partial(screened, [noise(0.005)], 110.0),
    "screen slower": partial(screened, [noise(0.005)], 90.0),
    "screen inconclusive": partial(screened, [noise(0.005)], 100.5),
    "screen without noise": partial(screened, [], 110.0),
    "screen with the noise of another cell": partial(screened, [noise(0.005, of=cell(1024))], 110.0),
    "two screens": partial(screened, [noise(0.005), noise(0.005, of=cell(1024))], 110.0, (cell(), cell(1024))),
    "screen cut": partial(
        held, A[:1], FASTER[:1], "cancelled", step=chain_step(noise=[noise(0.005)], screen=True), kind="screen"
    ),
    "promoted": held,
    "not much faster": partial(held, b=SLIGHTLY),
    "dirty": partial(held, dirty=True),
    "both arms the same": partial(held, step=chain_step(candidate="toy")),
    "protocol 2, known noise": partial(held, step=chain_step(noise=[noise(0.002)]), protocol=2),
    "protocol 2, unknown noise": partial(held, protocol=2),
    "protocol 2, high noise": partial(held, step=chain_step(noise=[noise(0.04)]), protocol=2),
    "a higher clock": partial(at_clocks, (1800.0, 1980.0)),
    "a lower clock, a time": partial(at_clocks, (1980.0, 1800.0), of=KERNEL),
    "the same clock": partial(at_clocks, (1980.0, 1980.0)),
    "two clocks": partial(at_clocks, (1800.0, 1980.0), 2),
    "no clock": partial(at_clocks, (1800.0, 1980.0), 0),
    "more power": partial(at_power, (300.0, 320.0)),
    "little more power": partial(at_power, (300.0, 310.0)),
    "more power, in blocks": partial(at_power, (300.0, 320.0), 600.0),
    "more power, protocol 2": partial(at_power, (300.0, 320.0), protocol=2),
    "unknown power": partial(at_power, (300.0, None)),
}


def told(store: Store, name: str) -> list[Any]:
    """Return what the golden file holds of a scenario: each verdict with its reasons."""
    return [
        {
            "verdict": ("screen: " if each.verdict.screen else "") + each.verdict.verdict,
            "promoted": each.promoted,
            "cycles": f"{each.verdict.valid_cycles} of {each.verdict.cycles}",
            "flaws": sorted(each.verdict.flaws),
            "reasons": list(each.verdict.reasons),
        }
        for each in read(store, SCENARIOS[name]())
    ]


@pytest.mark.parametrize("name", SCENARIOS)
def test_golden(store: Store, name: str) -> None:
    assert told(store, name) == json.loads(GOLDEN.read_text())[name]
    for each in recorded(store, JOB):
        numbers = (each.verdict.effect, each.baseline, each.candidate)
        assert (None in numbers) == (each.verdict.verdict == "invalid")
        assert not (each.promoted and None in numbers)


def test_a_session_counts_when_it_has_ended(store: Store) -> None:
    journal = compared(JOB)
    intend(store, journal)
    ingest(store, JOB, journal.lines()[:-1])
    run = store.rows("SELECT * FROM runs JOIN rows USING (run_id) WHERE arm = 'toy'")[-1]
    wanted = [(run["cell"], run["model_id"] or "", run["env_digest"])]
    assert store.up_to_date(run["build_id"], device(), wanted) == set()
    assert judge(store, JOB) == recorded(store, JOB) == judgement.check(store) == []
    judged = only(store, journal)
    assert store.up_to_date(run["build_id"], device(), wanted) == set(wanted)
    assert (judged.verdict.verdict, judged.verdict.valid_cycles) == ("faster", 6)
    assert judged.verdict.effect == pytest.approx(0.0995, abs=1e-3)
    assert judged.baseline == pytest.approx(100.25, abs=0.5)
    assert judged.candidate is not None
    assert judged.candidate / judged.baseline == pytest.approx(1 + judged.verdict.effect)
    assert (judged.baseline_arm, judged.candidate_arm, judged.chain) == ("toy", "patched", "chain:1")
    assert (judged.model_id, judged.comparison.baseline) == (run["model_id"], cell().key)


@pytest.mark.parametrize("seed", range(5))
def test_the_record_says_what_stats_says_of_the_same_numbers(store: Store, seed: int) -> None:
    source = random.Random(seed)  # noqa: S311 - not for secrets
    cells = (cell(), cell(1024))
    steps = [chain_step(number, cells) for number in (1, 2)]
    journal, chains = begun(*steps), []
    for step in steps:
        crash = source.choice([None, 1, 3])
        cycles = 7 if crash else 6  # another one follows in its place
        a: list[Any] = [[source.gauss(100, 1.0 + seed) for _ in cells] for _ in range(cycles + 1)]
        b: list[Any] = [[source.gauss(101 + seed, 1.0) for _ in cells] for _ in range(cycles)]
        if crash:
            b[crash - 1] = None
        flaws = {crash: f"candidate {crash} failed: killed by signal 9"} if crash else {}
        for place in range(2):
            columns = [[run and run[place] for run in side] for side in (a, b)]
            chains.append(stats.Chain(*columns, drift_limit=0.05, cycles=6, flaws=flaws, before=a[0][place]))
        journal.chain(step, a, b)
    held = ("not promoted", "a clock")
    bare = [
        replace(each.verdict, reasons=tuple(r for r in each.verdict.reasons if not r.startswith(held)))
        for each in read(store, journal.gates().end())
    ]
    assert bare == stats.judge_session(chains)


def test_a_run_that_was_repeated_in_its_place_counts_once(store: Store) -> None:
    journal = begun(STEP).chain(STEP, A[:1], FASTER[:1])
    journal.events[-1] |= {"status": "discarded", "reason": "1 of 2 rows are missing"}
    journal.place(STEP, CANDIDATE, 1, FASTER[0])
    for cycle in range(1, 7):
        journal.place(STEP, BASELINE, cycle, A[cycle])
        if cycle < 6:
            journal.place(STEP, CANDIDATE, cycle + 1, FASTER[cycle])
    assert only(store, journal.gates().end()).verdict == only(store, compared("job-2")).verdict


def test_a_time_is_better_when_it_is_lower(store: Store) -> None:
    step = chain_step(cells=(KERNEL,))
    judged = only(store, begun(step).chain(step, A, FASTER, model_id="").gates().end())
    assert (judged.verdict.verdict, judged.verdict.better, judged.comparison.metric) == ("slower", "lower", "time_us")
    assert judged.verdict.effect == pytest.approx(0.0995, abs=1e-3)
    assert judged.model_id is None


def test_an_older_protocol_has_no_interval_of_same_and_no_noise_of_its_own(store: Store) -> None:
    old, new = (
        only(store, journal.built().gates().chain(STEP, A, A[1:]).gates().end()).verdict
        for journal in (Journal(session_plan(f"job-{number}", STEP, protocol=number)) for number in (2, 3))
    )
    assert (old.same_ci, old.noise) == (None, None)
    assert new.noise is not None
    low, high = new.same_ci or (0.0, 0.0)
    assert low < (new.effect or 0.0) < high


def test_a_lost_job_gets_its_verdicts_when_its_end_turns_up(store: Store) -> None:
    journal = compared(JOB)
    lines = journal.lines()
    intend(store, journal)
    ingest(store, JOB, lines[:13])
    with store.transaction():
        store.set_state(JOB, "lost")
        judgement.record(store, JOB)
    early = recorded(store, JOB)[0].verdict.reasons
    ingest(store, JOB, lines[:17])
    late = recorded(store, JOB)[0].verdict.reasons
    assert early[-1] == late[-1] == ENDS["lost"]
    assert early != late
    assert judgement.check(store) == []
    ingest(store, JOB, lines)
    assert recorded(store, JOB) == read(store, compared("job-2"))


def test_a_job_that_runs_again_has_no_verdicts(store: Store) -> None:
    journal = compared(JOB)
    intend(store, journal)
    ingest(store, JOB, journal.lines()[:15])
    store.set_state(JOB, "lost", error="its agent is gone")
    judgement.record(store, JOB)
    assert recorded(store, JOB)[0].verdict.reasons[-1].startswith(ENDS["lost"])
    store.update_job(JOB, state="running")
    (wrong,) = judgement.check(store)
    assert cell().key in wrong
    judgement.record(store, JOB)
    assert recorded(store, JOB) == judgement.check(store) == []


def test_recording_again_writes_nothing(store: Store) -> None:
    read(store, compared(JOB))
    before = dump(store), store.connection.total_changes
    judgement.record(store, JOB)
    assert (dump(store), store.connection.total_changes) == before


def session_of_noise(store: Store, job_id: str, spread: float, at: float, host: str = "host-a") -> str:
    """Record an A/A session whose candidates are that much above and below; it was intended at that time."""
    step = chain_step(candidate="toy")
    b = [100.0 * (1 + (-1) ** cycle * spread) for cycle in range(6)]
    journal = Journal(session_plan(job_id, step, kind="noise"), facts(host)).built().gates()
    read(store, journal.chain(step, [100.0] * 7, b).gates().end())
    store.update_job(job_id, intent_at=at)
    return step.baseline.cells[0].key


def test_the_latest_session_of_a_host_tells_its_noise(store: Store) -> None:
    """One a cell and metric: of this device, model, cell and protocol, of arms that are the same, and valid.

    Runs that do not differ at all are not taken for a host without noise.
    """
    key = session_of_noise(store, "job-3", 0.004, 300.0)
    session_of_noise(store, "job-4", 0.01, 200.0)
    session_of_noise(store, "job-5", 0.02, 400.0, "host-b")
    session_of_noise(store, "job-7", 0.0, 500.0)
    read(store, compared("job-6"))
    read(store, begun(chain_step(candidate="toy"), kind="noise").chain(chain_step(candidate="toy"), A[:2], A[:1]).end())
    (verdict,) = recorded(store, "job-3")
    model = verdict.model_id or ""
    (noise,) = judgement.noises(store, device("host-a"), [key], model)
    assert (noise.cell, noise.metric, noise.cycles, noise.session) == (key, "avg_ts", 6, "job-3")
    assert noise.sigma == stats.sigma(verdict.verdict) == pytest.approx(0.0038, abs=1e-3)
    others = (("host-a", key, ""), ("host-a", cell(1024).key, model), ("host-c", key, model))
    assert not any(judgement.noises(store, device(host), [of], read_by) for host, of, read_by in others)
    for job_id in ("job-3", "job-4"):
        store.update_job(job_id, protocol=PROTOCOL - 1)
    assert judgement.noises(store, device("host-a"), [key], model) == []


def test_the_word_for_a_session() -> None:
    for word, sessions in {
        "faster": ("faster faster", "faster same inconclusive"),
        "slower": ("slower same",),
        "mixed": ("faster slower same",),
        "invalid": ("", "faster slower invalid"),
        "same": ("same same",),
        "inconclusive": ("inconclusive", "same inconclusive"),
    }.items():
        assert {session_verdict(words.split()) for words in sessions} == {word}


@pytest.mark.parametrize(
    ("sql", "sentence"),
    [
        ("UPDATE verdicts SET verdict = 'slower', promoted = 0", "verdict slower where its runs give faster"),
        ("UPDATE verdicts SET effect = effect * 1.001", "has effect 0.0"),
        ("UPDATE verdicts SET ci_low = NULL, ci_high = NULL", "ci_low None where its runs give 0.0"),
        ("UPDATE verdicts SET promoted = 0", "has promoted 0 where its runs give True"),
        ("UPDATE verdicts SET noise = noise / 2", "has noise 0.0"),
        ("UPDATE verdicts SET same_low = NULL, same_high = NULL", "has same_low None where its runs give 0.0"),
        ('UPDATE verdicts SET flaws = \'{"2":"drift"}\'', 'has flaws {"2":"drift"} where its runs give {}'),
        ("UPDATE verdicts SET noise_sigma = 0.001", "has noise_sigma 0.001 where its runs give None"),
        ("UPDATE verdicts SET metric = 'flops'", "is of no planned comparison"),
        ("DELETE FROM verdicts", "is missing: the job is done"),
    ],
)
def test_a_forged_verdict_is_found(store: Store, sql: str, sentence: str) -> None:
    read(store, compared(JOB))
    store.connection.execute(sql)
    sentences = judgement.check(store)
    assert any(sentence in each for each in sentences)
    assert all(JOB in each and cell().key in each for each in sentences)


@pytest.mark.parametrize(
    "sql",
    ["UPDATE verdicts SET effect = effect * (1 + 1e-13)", "UPDATE verdicts SET reasons = json_array('in other words')"],
)
def test_what_another_machine_or_version_may_say_differently(store: Store, sql: str) -> None:
    read(store, compared(JOB))
    store.connection.execute(sql)
    assert judgement.check(store) == []


if __name__ == "__main__":
    pages = {}
    for each in SCENARIOS:
        with tempfile.TemporaryDirectory() as folder, Store.open(Path(folder) / "results.db") as opened:
            pages[each] = told(opened, each)
    GOLDEN.write_text(json.dumps(pages, indent=1, ensure_ascii=False) + "\n")
