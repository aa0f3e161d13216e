"""Verdicts from journals: what counts, what makes one invalid and in which words, and computing them again."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dgxlab import judgement, stats
from dgxlab.errors import RemoteError
from dgxlab.ingest import ingest
from dgxlab.judgement import Judged, judge, recorded, whole
from dgxlab.model import BASELINE, BURN_IN, CANDIDATE, PROTOCOL, Cell, ChainStep, GateStep, NoiseFloor
from dgxlab.store import Store, check
from tests import journals
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

JOB = "20261120-120000-toy-1"
KERNEL = Cell("backend-ops", "MUL_MAT q4_0 4096x512x14336", {"type_a": "q4_0", "n": 512})


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    """An empty store."""
    with Store.open(tmp_path / "results.db") as opened:
        yield opened


def floor(sigma: float, cycles: int = 8, of: Cell | None = None) -> NoiseFloor:
    """Return a noise floor of the cell that chains have."""
    return NoiseFloor((of or cell()).key, "avg_ts", sigma, cycles, "an-older-job")


def begun(*chains: ChainStep, **changes: Any) -> Journal:
    """Return a session's journal up to where its chains begin, the gates passed."""
    return Journal(session_plan(JOB, *chains, **changes)).built().gates()


def read(store: Store, journal: Journal) -> list[Judged]:
    """Put a journal into the store; what is recorded is what is judged, and the record is sound."""
    intend(store, journal)
    ingest(store, journal.plan.job_id, journal.lines())
    found = recorded(store, journal.plan.job_id)
    assert found == judge(store, journal.plan.job_id)
    assert check(store) == judgement.check(store) == []
    return found


def one(store: Store, journal: Journal) -> Judged:
    """Return the only verdict of a journal."""
    (found,) = read(store, journal)
    return found


def reasons(store: Store, journal: Journal) -> tuple[str, ...]:
    """Return why the only verdict of a journal is invalid."""
    found = one(store, journal)
    assert found.verdict.verdict == "invalid"
    assert (found.verdict.effect, found.baseline, found.candidate, found.promoted) == (None, None, None, False)
    return found.verdict.reasons


# -- what is judged ---------------------------------------------------------------------------------------------------


def test_a_session_is_judged_when_it_has_ended(store: Store) -> None:
    """Nothing is said before the last line, and then all of it: word, numbers, means, arms, where."""
    journal = compared(JOB)
    intend(store, journal)
    ingest(store, JOB, journal.lines()[:-1])
    assert judge(store, JOB) == recorded(store, JOB) == judgement.check(store) == []
    found = one(store, journal)
    assert found.verdict.verdict == "faster"
    assert found.verdict.effect == pytest.approx(0.0995, abs=1e-3)
    assert found.baseline == pytest.approx(100.25, abs=0.5)
    assert found.candidate is not None
    assert found.candidate / found.baseline == pytest.approx(1 + found.verdict.effect)
    assert (found.baseline_arm, found.candidate_arm, found.chain) == ("toy", "patched", "chain:1")
    (row,) = store.rows("SELECT * FROM verdicts")
    assert (row["model_id"], row["cell"]) == (found.model_id, cell().key)
    assert (row["verdict"], row["ci_low"], row["valid_cycles"]) == (
        "faster",
        found.verdict.ci and found.verdict.ci[0],
        6,
    )


def test_a_chain_that_goes_on_measures_for_nobody(store: Store) -> None:
    """An experiment on the same build finds its runs when the session has ended: until then no report has them."""
    journal = compared(JOB)
    intend(store, journal)
    ingest(store, JOB, journal.lines()[:-1])
    run = store.rows("SELECT * FROM runs JOIN rows USING (run_id) WHERE arm = 'toy'")[-1]
    wanted = [(run["cell"], run["model_id"] or "", run["env_digest"])]
    assert store.up_to_date(run["build_id"], device(), wanted) == set()
    ingest(store, JOB, journal.lines())
    assert store.up_to_date(run["build_id"], device(), wanted) == set(wanted)


def test_a_job_without_chains_has_no_verdicts(store: Store) -> None:
    """An ordinary run is none of this module's business."""
    assert read(store, journals.whole(JOB)) == []
    assert store.rows("SELECT * FROM chain_runs") == []


@pytest.mark.parametrize("seed", range(5))
def test_the_record_says_what_stats_says_of_the_same_numbers(store: Store, seed: int) -> None:
    """Two chains of two cells each, some with drift and crashes: verdicts are those of the bare values, Holm's too."""
    source = random.Random(seed)  # noqa: S311 - not for secrets
    cells = (cell(), cell(1024))
    steps = [chain_step(number, cells) for number in (1, 2)]
    journal, chains = begun(*steps), []
    for step in steps:
        a: list[Any] = [[source.gauss(100, 1.0 + seed) for _ in cells] for _ in range(7)]
        b: list[Any] = [[source.gauss(101 + seed, 1.0) for _ in cells] for _ in range(6)]
        crash = source.choice([None, 1, 3])
        if crash:
            b[crash - 1] = None
        a, b = longer(step, a, b, source)
        flaws = {crash: f"candidate {crash} failed: killed by signal 9"} if crash else {}
        for place in range(2):
            columns = [[run and run[place] for run in side] for side in (a, b)]
            chains.append(stats.Chain(*columns, drift_limit=0.05, cycles=6, flaws=flaws, before=a[0][place]))
        journal.chain(step, a, b)
    found = read(store, journal.gates().end())
    held = ("not promoted", "a clock")
    bare = [replace(j.verdict, reasons=tuple(r for r in j.verdict.reasons if not r.startswith(held))) for j in found]
    assert bare == stats.judge_session(chains)


def longer(step: ChainStep, a: list[Any], b: list[Any], source: random.Random) -> tuple[list[Any], list[Any]]:
    """Add the cycles that follow invalid ones, as the agent does."""
    cells = range(len(a[0]))

    def counts(place: int) -> int:
        columns = [[run and run[place] for run in side] for side in (a, b)]
        flaws = {cycle: "it crashed" for cycle, run in enumerate(b, 1) if run is None}
        return len(b) - len(stats.Chain(*columns, drift_limit=step.drift_limit, flaws=flaws).flaws)

    while stats.another_cycle(step.cycles, len(b), min(map(counts, cells))):
        b.append([source.gauss(101, 1.0) for _ in cells])
        a.append([source.gauss(100, 1.0) for _ in cells])
    return a, b


def test_a_run_that_was_repeated_in_its_place_counts_once(store: Store) -> None:
    """The one that lost rows is passed over for the later one."""
    step = chain_step()
    journal = begun(step).chain(step, A[:1], FASTER[:1])
    journal.events[-1] |= {"status": "discarded", "reason": "1 of 2 rows are missing"}
    journal.place(step, CANDIDATE, 1, FASTER[0])
    for cycle in range(1, 7):
        journal.place(step, BASELINE, cycle, A[cycle])
        if cycle < 6:
            journal.place(step, CANDIDATE, cycle + 1, FASTER[cycle])
    assert one(store, journal.gates().end()).verdict == one(store, compared("job-2")).verdict


def test_a_time_is_better_when_it_is_lower(store: Store) -> None:
    """More microseconds are slower, and the effect says more."""
    step = chain_step(cells=(KERNEL,))
    found = one(store, begun(step).chain(step, A, FASTER, model_id="").gates().end())
    assert (found.verdict.verdict, found.verdict.better, found.comparison.metric) == ("slower", "lower", "time_us")
    assert found.verdict.effect == pytest.approx(0.0995, abs=1e-3)
    assert found.model_id is None


# -- bad input --------------------------------------------------------------------------------------------------------


def test_an_arm_that_crashes_in_half_of_its_runs_is_invalid(store: Store) -> None:
    """There is no number for a program that works half the time, however many cycles are left."""
    step = chain_step()
    b = (None, 110.0, None, 111.0, None, 110.0, None, 111.0)
    found = begun(step).chain(step, (*A, 101.0, 100.0), b).gates().end("failed", 8)
    assert reasons(store, found) == ("patched failed as candidate in 4 of 8 runs: killed by signal 9",)
    (verdict,) = (each.verdict for each in recorded(store, JOB))
    assert (verdict.cycles, verdict.valid_cycles, list(verdict.flaws)) == (8, 4, [1, 3, 5, 7])


def test_a_chain_that_cannot_be_saved_ends_early(store: Store) -> None:
    """Where no number of further cycles could help, the chain is whole: each cycle says why it does not count."""
    step = chain_step()
    journal = begun(step).chain(step, A[:1], ())
    for cycle in range(1, 6):
        flags = [THROTTLED]
        journal.place(step, CANDIDATE, cycle, 110.0, flags=flags).place(step, BASELINE, cycle, 100.0)
    assert reasons(store, journal.gates().end("failed", 8))[:2] == (
        "0 of 5 cycles are valid, at least 5 must be",
        "cycle 1 does not count: candidate 1 HW thermal slowdown for 2.1 s",
    )


JUMPING = (100.0, 110.0, 100.0, 110.0, 100.0, 110.0, 100.0)


def test_too_many_steps_are_invalid(store: Store) -> None:
    """A baseline that changes and stays so makes no bracket there."""
    step = chain_step()
    found = reasons(
        store,
        begun(step).chain(step, (100.0, 100.0, 110.0, 110.0, 100.0, 100.0, 100.0), FASTER).gates().end("failed", 8),
    )
    assert found[0] == "4 of 6 cycles are valid, at least 5 must be"
    assert [reason.partition(" does not count: a step")[0] for reason in found[1:]] == ["cycle 2", "cycle 4"]


def test_a_baseline_that_jumps_to_and_fro_is_noise(store: Store) -> None:
    """By which rule is decided by the plan's protocol: before the third, its cycles did not count."""
    step = chain_step()
    found = one(store, begun(step).chain(step, JUMPING, FASTER).gates().end())
    assert (found.verdict.verdict, found.verdict.valid_cycles) == ("inconclusive", 6)
    older = Journal(session_plan("job-2", step, protocol=2)).built().gates()
    assert reasons(store, older.chain(step, JUMPING, FASTER).gates().end("failed", 8))[:2] == (
        "0 of 6 cycles are valid, at least 4 must be",
        "cycle 1 does not count: its baselines are 9.5 % apart, the limit is 5 %",
    )


def test_an_older_protocol_has_no_interval_of_same_and_no_noise_of_its_own(store: Store) -> None:
    """Its verdict stays as it was recorded; a newer one of the same runs has both."""
    step = chain_step()
    of = [
        one(
            store,
            Journal(session_plan(f"job-{number}", step, protocol=number))
            .built()
            .gates()
            .chain(step, A, A[1:])
            .gates()
            .end(),
        )
        for number in (2, 3)
    ]
    assert [(each.verdict.same_ci is None, each.verdict.noise is None) for each in of] == [(True, True), (False, False)]
    low, high = of[1].verdict.same_ci or (0.0, 0.0)
    assert low < (of[1].verdict.effect or 0.0) < high
    sql = "SELECT job_id, same_low, same_high, noise FROM verdicts ORDER BY job_id"
    assert [tuple(row.values()) for row in store.rows(sql)] == [
        ("job-2", None, None, None),
        ("job-3", low, high, of[1].verdict.noise),
    ]


@pytest.mark.parametrize("value", [0.0, -1.0])
def test_a_value_that_is_no_measurement_is_not_recorded(store: Store, value: float) -> None:
    """Zero and less: a run that says so of itself is valid, its values are not."""
    step = chain_step()
    lines = begun(step).chain(step, A, (110.0, value, *FASTER[2:])).gates().end()
    with pytest.raises(RemoteError, match=f"samples: {value / 2:g} is not within"):
        reasons(store, lines)


def test_a_cell_without_a_value_is_invalid_alone(store: Store) -> None:
    """The other cell of the same runs keeps its verdict."""
    step = chain_step(cells=(cell(), cell(1024)))
    b = [[value, None if value == 111.0 else value] for value in FASTER]
    one, two = read(store, begun(step).chain(step, [[value, value] for value in A], b).gates().end())
    assert (one.verdict.verdict, two.verdict.verdict) == ("faster", "invalid")
    assert two.verdict.reasons == ("b[1] is None: a measurement is a finite number above 0",)


def test_a_hard_flag_makes_its_cycles_invalid(store: Store) -> None:
    """A throttled baseline costs both cycles beside it, a soft flag none; two more cycles make up for them."""
    step = chain_step()
    journal = begun(step)
    journal.chain(step, A[:1], FASTER[:1], flags=[CAPPED]).place(step, BASELINE, 1, 100.0, flags=[CAPPED, THROTTLED])
    for cycle in range(2, 9):
        journal.place(step, CANDIDATE, cycle, 110.0 + cycle % 2).place(step, BASELINE, cycle, 100.0)
    found = one(store, journal.gates().end())
    assert (found.verdict.verdict, found.verdict.valid_cycles, found.verdict.cycles) == ("faster", 6, 8)
    assert found.verdict.flaws == {
        1: "baseline 1 HW thermal slowdown for 2.1 s",
        2: "baseline 1 HW thermal slowdown for 2.1 s",
    }


@pytest.mark.parametrize(
    ("a", "b", "said"),
    [
        (6, 6, "the chain was cut after 5 of 6 cycles: nothing is glued across a gap"),
        (4, 3, "the chain was cut after 3 of 6 cycles: nothing is glued across a gap"),
        (1, 1, "the chain was cut after 0 of 6 cycles: nothing is glued across a gap"),
        (1, 0, "the chain was cut after 0 of 6 cycles: nothing is glued across a gap"),
    ],
)
@pytest.mark.parametrize(
    ("status", "error", "ending"),
    [
        ("cancelled", "", "the job was cancelled"),
        ("failed", "spark is on fire", "the job failed: spark is on fire"),
    ],
)
def test_a_cut_chain_is_invalid(store: Store, a: int, b: int, said: str, status: str, error: str, ending: str) -> None:
    """Wherever it was cut, with how far it came and how the job ended."""
    step = chain_step()
    journal = begun(step).chain(step, A[:a], FASTER[:b])
    if error:
        journal.add("error", exit_code=8, message=error, next="", details="")
    assert reasons(store, journal.end(status, 130)) == (said, ending)


def test_a_chain_cut_before_a_further_cycle_is_invalid(store: Store) -> None:
    """The planned cycles were there, one did not count, and the one in its place never ended."""
    step = chain_step()
    journal = begun(step).chain(step, A, (*FASTER[:5], None)).end("cancelled", 130)
    assert reasons(store, journal) == (
        "the chain was cut after 6 of 6 cycles and before another: nothing is glued across a gap",
        "the job was cancelled",
    )


@pytest.mark.parametrize(
    ("b", "words", "said"),
    [
        (FASTER, ["faster", "invalid"], "0 of 6 cycles are valid, at least 4 must be"),
        ((*FASTER[:5], None), ["invalid", "invalid"], "the chain was cut after 6 of 6 cycles and before another: "),
    ],
)
def test_a_cell_beyond_hope_asks_for_no_further_cycle(
    store: Store, b: Sequence[float | None], words: list[str], said: str
) -> None:
    """Whether a chain is whole is up to the cells that can still be judged."""
    step = chain_step(cells=(cell(), cell(1024)))
    jumping = list(zip(A, JUMPING, strict=True))
    found = read(store, begun(step, protocol=2).chain(step, jumping, b).gates().end())
    assert [each.verdict.verdict for each in found] == words
    assert found[1].verdict.reasons[0].startswith(said)


def test_a_chain_that_is_cut_does_not_take_the_others_with_it(store: Store) -> None:
    """The first chain is whole and keeps its verdict, without promotion; the second was cut; the third not begun."""
    steps = [chain_step(n, noise=[floor(0.002)]) for n in (1, 2, 3)]
    journal = begun(*steps).chain(steps[0], A, FASTER).chain(steps[1], A[:2], FASTER[:2]).end("cancelled", 130)
    one, two, three = read(store, journal)
    assert (one.verdict.verdict, one.verdict.confidence, one.promoted) == ("faster", 0.99, False)
    assert one.verdict.reasons[-1] == ("not promoted: the gates after the chains were not asked, the job was cancelled")
    assert two.verdict.reasons[0].startswith("the chain was cut after 1 of 6 cycles")
    assert three.verdict.reasons == ("the chain was not begun", "the job was cancelled")
    assert (three.verdict.cycles, three.model_id) == (0, None)


def test_a_baseline_that_cannot_run_is_named(store: Store) -> None:
    """A burn-in that failed says what failed."""
    step = chain_step()
    journal = begun(step).place(step, BURN_IN, 1, None).place(step, BURN_IN, 2, None)
    journal.add("error", exit_code=4, message="chain:1, burn-in 2 failed", next="", details="")
    assert reasons(store, journal.end("failed", 4)) == (
        "the chain was cut in its burn-in",
        "burn-in 2 failed: killed by signal 9",
        "the job failed: chain:1, burn-in 2 failed",
    )


@pytest.mark.parametrize("arm", ["toy", "patched"])
def test_a_gate_that_fails_afterwards_makes_it_invalid(store: Store, arm: str) -> None:
    """Whatever the values say: numbers of a program that is wrong are no evidence."""
    step = chain_step()
    journal = begun(step).chain(step, A, FASTER).gates(**{arm: 1102}).end("failed", 5)
    assert reasons(store, journal) == (
        f"gate MUL_MAT on CPU failed for {arm} after the chains: 1102 of 1103 cases passed",
    )


def test_a_gate_that_fails_beforehand_is_the_reason(store: Store) -> None:
    """The chain was never begun, and the gate says why."""
    journal = Journal(session_plan(JOB, chain_step())).built().gates(patched=1102).end("failed", 5)
    assert reasons(store, journal) == (
        "gate MUL_MAT on CPU failed for patched before the chains: 1102 of 1103 cases passed",
    )


def test_a_flaky_gate_is_no_failed_one(store: Store) -> None:
    """It is on record as flaky; the verdict stands."""
    step = chain_step()
    journal = begun(step).chain(step, A, FASTER).gate(arm="toy", status="flaky").gate(arm="patched").end()
    assert one(store, journal).verdict.verdict == "faster"


# -- lost and come back -----------------------------------------------------------------------------------------------


def test_a_lost_job_gets_its_verdicts_when_its_end_turns_up(store: Store) -> None:
    """Lost: cut. More lines: still lost, cut later. The rest: what a job that was never lost says."""
    journal = compared(JOB)
    lines = journal.lines()
    intend(store, journal)
    ingest(store, JOB, lines[:13])
    with store.transaction():
        store.set_state(JOB, "lost")
        judgement.record(store, JOB)
    said = [recorded(store, JOB)[0].verdict.reasons]
    ingest(store, JOB, lines[:17])
    said.append(recorded(store, JOB)[0].verdict.reasons)
    assert [each[-1] for each in said] == ["the job was lost"] * 2
    assert said[0] != said[1]
    assert judgement.check(store) == []
    ingest(store, JOB, lines)
    assert recorded(store, JOB) == read(store, compared("job-2"))


def test_a_job_that_runs_again_has_no_verdicts(store: Store) -> None:
    """One that was taken for lost: what was said of it is taken back."""
    journal = compared(JOB)
    intend(store, journal)
    ingest(store, JOB, journal.lines()[:15])
    store.set_state(JOB, "lost", error="its agent is gone")
    judgement.record(store, JOB)
    assert recorded(store, JOB)[0].verdict.reasons[-1] == "the job was lost: its agent is gone"
    store.update_job(JOB, state="running")
    assert judgement.check(store) == [
        f"the verdict of job {JOB} in chain:1 on avg_ts of cell {cell().key} was written while it runs"
    ]
    judgement.record(store, JOB)
    assert recorded(store, JOB) == judgement.check(store) == []


def test_recording_again_writes_nothing(store: Store) -> None:
    """The database is not touched where nothing changed."""
    read(store, compared(JOB))
    before = dump(store), store.connection.total_changes
    judgement.record(store, JOB)
    assert (dump(store), store.connection.total_changes) == before


# -- screens, noise, promotion ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("noise", "b", "word"),
    [
        ([floor(0.005)], 110.0, "faster"),
        ([floor(0.005)], 90.0, "slower"),
        ([floor(0.005)], 100.5, "inconclusive"),
        ([], 110.0, "invalid"),
        ([floor(0.005, of=cell(1024))], 110.0, "invalid"),
    ],
)
def test_a_screen_is_judged_by_the_noise_floor_of_its_plan(
    store: Store, noise: Sequence[NoiseFloor], b: float, word: str
) -> None:
    """It is marked as one, never promoted, and nothing without the floor of its own cell."""
    step = chain_step(noise=noise, screen=True)
    found = one(store, begun(step, kind="screen").chain(step, (100.0, 100.2), (b,)).end())
    assert (found.verdict.verdict, found.verdict.screen, found.promoted) == (word, True, False)
    expected = stats.Chain([100.0, 100.2], [b], cycles=1)
    assert found.verdict == stats.screen(expected, *((0.005, 8) if found.noise else (None,)))


def test_several_screens_say_that_they_are_several(store: Store) -> None:
    """Nothing holds them to one error together, as Holm does for chains."""
    noise = [floor(0.005), floor(0.005, of=cell(1024))]
    step = chain_step(cells=[cell(), cell(1024)], noise=noise, screen=True)
    journal = begun(step, kind="screen").chain(step, ([100.0, 100.0], [100.2, 100.2]), ([110.0, 110.0],)).end()
    read(store, journal)
    both = recorded(store, journal.plan.job_id)
    assert [each.verdict.reasons[-1] for each in both] == ["one of 2 screens, each of which errs by itself"] * 2


def test_a_burn_in_that_did_not_settle_is_a_reason(store: Store) -> None:
    """The verdict stands, and says under what it was found."""
    step = chain_step()
    late = {"device": "host", "kind": "unsettled", "hard": False, "reason": "the burn-in did not settle in 8 runs"}
    journal = begun(step)
    journal.place(step, BURN_IN, 1, 100.0, flags=[late])
    found = one(store, journal.chain(step, A, FASTER).gates().end())
    assert found.verdict.verdict == "faster"
    assert "the burn-in did not settle in 8 runs" in found.verdict.reasons


def test_a_screen_that_was_cut_is_a_screen(store: Store) -> None:
    """Every invalid verdict keeps the label."""
    step = chain_step(noise=[floor(0.005)], screen=True)
    found = one(store, begun(step, kind="screen").chain(step, (100.0,), (110.0,)).end("cancelled", 130))
    assert (found.verdict.verdict, found.verdict.screen) == ("invalid", True)


SLIGHTLY = (103.0, 104.0, 103.0, 104.0, 103.0, 104.0)
"""Candidates of A that are 3 % faster."""


@pytest.mark.parametrize(
    ("b", "dirty", "candidate", "said"),
    [
        (FASTER, False, "patched", ""),
        (
            SLIGHTLY,
            False,
            "patched",
            "not promoted: in speed the interval begins at +1.77 %, not above 5.47 %, which is 3 noise",
        ),
        (FASTER, True, "patched", "not promoted: patched was built from a checkout that is no commit"),
        (FASTER, False, "toy", "not promoted: both arms are the same"),
    ],
)
def test_what_is_promoted(store: Store, b: Sequence[float], dirty: bool, candidate: str, said: str) -> None:
    """What clears 2 % and 3 noise floors of its own, built from a commit, against something else; else why not."""
    step = chain_step(candidate=candidate)
    found = one(store, begun(step, dirty=dirty).chain(step, A, b).gates().end())
    assert found.verdict.verdict == "faster"
    assert found.promoted == (not said)
    assert found.verdict.reasons[-1].startswith(said)


@pytest.mark.parametrize(
    ("noise", "said"),
    [
        ([floor(0.002)], ""),
        ([], "not promoted: the noise floor is not known"),
        ([floor(0.04)], ", not above 12 %, which is 3 noise floors of 4 %"),
    ],
)
def test_before_protocol_3_the_plan_tells_the_noise_floor(store: Store, noise: Sequence[NoiseFloor], said: str) -> None:
    """It came from an A/A session."""
    step = chain_step(noise=noise)
    found = one(store, begun(step, protocol=2).chain(step, A, FASTER).gates().end())
    assert (found.verdict.verdict, found.promoted) == ("faster", not said)
    assert found.verdict.reasons[-1].endswith(said)
    assert found.noise == (noise[0] if noise else None)


def test_a_flaky_gate_holds_promotion_back(store: Store) -> None:
    """Whenever it was and in whichever arm: what fails now and then is not promoted on the strength of the rest."""
    step = chain_step(noise=[floor(0.002)])
    journal = begun(step).chain(step, A, FASTER).gate(arm="toy", status="flaky", flaky=["MUL_MAT(n=1)"])
    found = one(store, journal.gate(arm="patched").end())
    said = "not promoted: gate MUL_MAT on CPU was flaky for toy after the chains: MUL_MAT(n=1)"
    assert (found.verdict.verdict, found.promoted, found.verdict.reasons[-1]) == ("faster", False, said)


def test_a_gate_that_the_command_line_changed_holds_promotion_back(store: Store) -> None:
    """It may have asked for less than the spec does."""
    step = chain_step(noise=[floor(0.002)])
    journal = begun(step)
    changed = [
        replace(other, gate=replace(other.gate, overridden=True)) if isinstance(other, GateStep) else other
        for other in journal.plan.steps
    ]
    journal = Journal(replace(journal.plan, steps=tuple(changed))).built().gates()
    found = one(store, journal.chain(step, A, FASTER).gates().end())
    said = "not promoted: --set changed what gate MUL_MAT on CPU must reach"
    assert (found.verdict.verdict, found.promoted, found.verdict.reasons[-1]) == ("faster", False, said)


def session_of_noise(store: Store, job_id: str, spread: float, at: float, host: str = "host-a") -> str:
    """Record an A/A session whose candidates are that much above and below; it was intended at that time."""
    step = chain_step(candidate="toy")
    b = [100.0 * (1 + (-1) ** cycle * spread) for cycle in range(6)]
    journal = Journal(session_plan(job_id, step, kind="noise"), facts(host)).built().gates()
    read(store, journal.chain(step, [100.0] * 7, b).gates().end())
    store.update_job(job_id, intent_at=at)
    return step.baseline.cells[0].key


def test_the_latest_session_of_a_host_tells_its_noise(store: Store) -> None:
    """One floor a cell and metric: not another device's, model's or cell's, nor a difference's, nor an older one."""
    key = session_of_noise(store, "job-3", 0.004, 300.0)
    session_of_noise(store, "job-4", 0.01, 200.0)
    session_of_noise(store, "job-5", 0.02, 400.0, "host-b")
    read(store, compared("job-6"))
    (verdict,) = recorded(store, "job-3")
    (found,) = judgement.noise_floors(store, device("host-a"), [key], verdict.model_id or "")
    assert (found.cell, found.metric, found.cycles, found.session) == (key, "avg_ts", 6, "job-3")
    assert found.sigma == stats.noise_floor(verdict.verdict) == pytest.approx(0.0038, abs=1e-3)
    assert judgement.noise_floors(store, device("host-a"), [key], "") == []
    assert judgement.noise_floors(store, device("host-a"), [cell(1024).key], verdict.model_id or "") == []
    assert judgement.noise_floors(store, device("host-c"), [key], verdict.model_id or "") == []


def test_another_protocol_tells_no_noise(store: Store) -> None:
    """What was measured otherwise wandered otherwise."""
    key = session_of_noise(store, "job-1", 0.004, 100.0)
    model = recorded(store, "job-1")[0].model_id or ""
    assert len(judgement.noise_floors(store, device("host-a"), [key], model)) == 1
    store.update_job("job-1", protocol=PROTOCOL - 1)
    assert judgement.noise_floors(store, device("host-a"), [key], model) == []


def test_an_invalid_session_tells_no_noise(store: Store) -> None:
    """The older one that is whole stands; and runs that do not differ at all are not taken for a host without noise."""
    key = session_of_noise(store, "job-1", 0.004, 100.0)
    session_of_noise(store, "job-2", 0.0, 200.0)
    step = chain_step(candidate="toy")
    read(store, begun(step, kind="noise").chain(step, A[:2], A[:1]).end("cancelled", 130))
    model = recorded(store, "job-1")[0].model_id or ""
    assert [each.session for each in judgement.noise_floors(store, device("host-a"), [key], model)] == ["job-1"]


# -- clocks and power -------------------------------------------------------------------------------------------------


def at_clocks(
    step: ChainStep, a: Sequence[float], b: Sequence[float], clocks: tuple[float, float], gpus: int = 1
) -> Journal:
    """Return a session whose arms ran at these SM clocks."""
    journal = begun(step)
    for role, cycle in ((BURN_IN, 1), (BURN_IN, 2)):
        journal.place(step, role, cycle, a[0])
    for cycle, value in enumerate(a):
        for role, number, x, clock in (
            (BASELINE, cycle, value, clocks[0]),
            *([(CANDIDATE, cycle + 1, b[cycle], clocks[1])] if cycle < len(b) else []),
        ):
            seen = {**CLOCK, "median": clock, "max": 2000.0}
            journal.place(step, role, number, x, telemetry=[{**seen, "device": f"GPU-{n}"} for n in range(gpus)])
    return journal.gates().end()


@pytest.mark.parametrize(
    ("clocks", "gpus", "tool", "said"),
    [
        ((1800.0, 1980.0), 1, "llama-bench", True),
        ((1980.0, 1800.0), 1, "backend-ops", True),
        ((1980.0, 1980.0), 1, "llama-bench", False),
        ((1800.0, 1980.0), 2, "llama-bench", False),
        ((1800.0, 1980.0), 0, "llama-bench", False),
    ],
)
def test_a_gap_that_is_a_clock_is_called_one(
    store: Store, clocks: tuple[float, float], gpus: int, tool: str, said: bool
) -> None:
    """10 % more at 10 % more MHz vanishes per cycle; where a run has not one clock nothing is said."""
    step = chain_step(cells=(cell() if tool == "llama-bench" else KERNEL,))
    found = one(store, at_clocks(step, A, (110.2, 110.9, 110.3, 110.4, 110.6, 110.5), clocks, gpus))
    assert found.verdict.verdict == ("faster" if tool == "llama-bench" else "slower")
    spoken = [reason for reason in found.verdict.reasons if reason.startswith("a clock, not a kernel")]
    assert bool(spoken) == said
    if said:
        assert f"at {clocks[0]:.0f} and {clocks[1]:.0f} MHz" in spoken[0]
        assert "% per clock cycle" in spoken[0]


@pytest.mark.parametrize(
    ("watts", "block_s", "protocol", "warned"),
    [
        ((300.0, 320.0), 0.0, PROTOCOL, True),
        ((300.0, 310.0), 0.0, PROTOCOL, False),
        ((300.0, 320.0), 600.0, PROTOCOL, False),
        ((300.0, 320.0), 0.0, 2, False),
        ((300.0, None), 0.0, PROTOCOL, False),
    ],
)
def test_a_candidate_that_draws_more_power_is_told(
    store: Store, watts: tuple[float, float | None], block_s: float, protocol: int, warned: bool
) -> None:
    """Half of it on each of two GPUs; a run that does not count draws what it likes."""
    step = replace(chain_step(), block_s=block_s)
    journal = begun(step, protocol=protocol).place(step, BURN_IN, 1, 100.0)
    for cycle, value in enumerate((*A, 100.0)):
        journal.place(step, BASELINE, cycle, value, telemetry=drawing(watts[0]))
        if cycle < 7:
            first = 900.0 if cycle == 0 else watts[1]
            flags = [THROTTLED] if cycle == 0 else []
            journal.place(step, CANDIDATE, cycle + 1, 110.0 + cycle % 2, telemetry=drawing(first), flags=flags)
    found = one(store, journal.gates().end())
    assert found.verdict.verdict == "faster"
    said = [reason for reason in found.verdict.reasons if "320 W and the baseline 300 W" in reason]
    assert bool(said) == warned


def drawing(watts: float | None) -> list[dict[str, Any]]:
    """Return the telemetry of a run whose two GPUs drew that much together."""
    if watts is None:
        return []
    half = {**CLOCK, "name": "power.draw", "unit": "W", "median": watts / 2, "min": 0.0, "max": watts}
    return [{**half, "device": f"GPU-{n}"} for n in (1, 2)]


# -- a session's word, and looking again ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "word"),
    [
        ("faster faster", "faster"),
        ("faster same inconclusive", "faster"),
        ("slower same", "slower"),
        ("faster slower same", "mixed"),
        ("faster slower invalid", "invalid"),
        ("same same", "same"),
        ("same inconclusive", "inconclusive"),
        ("inconclusive", "inconclusive"),
        ("", "invalid"),
    ],
)
def test_the_word_for_a_session(words: str, word: str) -> None:
    """One invalid claim makes the session invalid; faster in one and slower in another cell is neither."""
    assert whole(words.split()) == word


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
        ("UPDATE verdicts SET metric = 'flops'", "on flops of cell {cell} is none of its claims"),
        ("DELETE FROM verdicts", "on avg_ts of cell {cell} is missing: the job is done"),
    ],
)
def test_a_forged_verdict_is_found(store: Store, sql: str, sentence: str) -> None:
    """Each says which verdict, what is written, and what its runs say."""
    read(store, compared(JOB))
    store.connection.execute(sql)
    found = judgement.check(store)
    assert any(sentence.replace("{cell}", cell().key) in each for each in found)
    assert all(each.startswith(f"the verdict of job {JOB} in chain:1 on ") for each in found)


@pytest.mark.parametrize(
    "sql",
    [
        "UPDATE verdicts SET effect = effect * (1 + 1e-13)",
        "UPDATE verdicts SET reasons = json_array('in other words')",
    ],
)
def test_what_another_machine_or_version_may_say_differently(store: Store, sql: str) -> None:
    """The last digit of a logarithm, and the wording."""
    read(store, compared(JOB))
    store.connection.execute(sql)
    assert judgement.check(store) == []


def test_what_is_recorded_is_read_back_whole(store: Store) -> None:
    """Flaws by their numbers, the interval, the floor; and the columns say the same in SQL."""
    step = chain_step(noise=[floor(0.002)])
    found = one(store, begun(step).chain(step, (*A, 100.0), (*FASTER[:5], None, 110.0)).gates().end())
    assert found.verdict.flaws == {6: "candidate 6 failed: killed by signal 9"}
    (row,) = store.rows("SELECT * FROM verdicts")
    assert (row["ci_low"], row["ci_high"]) == found.verdict.ci
    assert json.loads(row["reasons"]) == list(found.verdict.reasons)
    assert (row["noise_sigma"], row["noise_cycles"], row["noise_session"]) == (0.002, 8, "an-older-job")
