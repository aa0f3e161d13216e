"""How a chain is held: which run follows which, on a bench whose values are given."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dgxlab.chains import Slot, planned
from dgxlab.errors import AGAIN, ConditionsError, DgxlabError, GateFailed, HostBusy, RemoteError
from dgxlab.model import ChainStep, RunStep
from dgxlab.model.events import ChainEvent, RunEvent, flag
from dgxlab.model.reasons import Code, reason
from dgxlab.stats import median
from tests.agent.scripted import CELLS, Said, World, scripted

KEYS = [(cell.key, "avg_ts") for cell in CELLS]

STUCK = flag(Code.STUCK_CLOCK, "GPU-1", hard=True, mhz=611.0, least=1500.0)
HOT = flag(Code.HW_THERMAL, "GPU-1", hard=True, seconds=2.0)
CAPPED = flag(Code.SW_POWER_CAP, "GPU-1", hard=False, seconds=2.0)
SHARED = flag(Code.RUN_QUEUE, hard=True, threads=2, processors=2, waited=0.5)

CRASH = Said((), "failed", (reason(Code.KILLED, program="llama-bench", signal="SIGSEGV"),))
SHORT = Said((100.0,), "failed", (reason(Code.ROWS, program="llama-bench", problems=["pp32: it has no row"]),), "rows")
BUSY = Said(flags=(SHARED,), again="disturbed")
STRANGER = Said((), "discarded", (reason(Code.STRANGER, processes="pid 7"),), "disturbed")
UNENGAGED = Said((), "discarded", (reason(Code.NOT_ENGAGED, marker="w4a16:", program="llama-bench"),))


def drifted(by: float, *, cell: int = 0) -> Said:
    """Return a run in which one cell was faster by a share."""
    return Said(tuple(value * (1 + by * (i == cell)) for i, value in enumerate((100.0, 200.0))))


@pytest.fixture
def world(tmp_path: Path) -> World:
    """One whose runs all come to the same."""
    return World(tmp_path)


def screen(step: ChainStep) -> ChainStep:
    """Make it a screen."""
    return replace(step, screen=True, cycles=1)


BURNT = ["u1", "u2", "u3", "u4"]
EVEN = [*BURNT, "a0", "b1", "a1", "b2", "a2", "b3", "a3", "b4", "a4"]


def test_a_chain(world: World) -> None:
    """Four runs of burn-in, then by turns, each under its own name, with its own arm's argv and build."""
    assert world.hold() is None
    assert world.places == EVEN
    assert world.names[3:6] == ["chain:0-burn-in-4", "chain:0-baseline-0", "chain:0-candidate-1"]
    assert world.holds == len(set(world.names)) == 13
    runs = world.of(RunEvent)
    assert {(run.role, *run.argv, run.build_id) for run in runs} == {
        ("burn-in", "one", "one", "B-one"),
        ("baseline", "one", "one", "B-one"),
        ("candidate", "two", "two", "B-two"),
    }
    assert [run.position for run in runs] == list(range(13))
    assert {run.chain for run in runs} == {"chain:0"}
    assert all(run.flags == () for run in runs)


def test_what_is_told_of_a_chain(world: World) -> None:
    """How far it is after every run, and none of its values."""
    scripted(world, {"candidate": drifted(0.5), "baseline-1": drifted(0.02)})
    assert world.hold() is None
    told = world.of(ChainEvent)
    assert [event.event for event in world.events] == ["run", "chain"] * 13
    assert [event.state for event in told] == ["burn-in"] * 4 + ["running"] * 8 + ["done"]
    assert [event.done for event in told] == list(range(1, 14))
    assert {event.total for event in told} == {13}
    assert {event.cycles for event in told} == {4}
    assert [event.valid for event in told] == [0, 0, 0, 0, 0, 0, 1, 1, 2, 2, 3, 3, 4]
    drift = [event.drift for event in told]
    assert drift[0] is None
    assert drift[1:6] == [0.0] * 5
    assert drift[6:9] == [pytest.approx(0.0198, abs=1e-4)] * 3
    assert told[-1].conditions == {"cpu_mhz": (2600.0, 2600.0)}
    assert told[0].left_s > 0
    assert told[-1].left_s == 0
    assert {event.note for event in told} == {""}
    names = "seq t event id state role cycle cycles done total valid drift conditions left_s note"
    assert vars(told[0]).keys() | {"event"} == set(names.split())


@pytest.mark.parametrize(
    ("first", "second", "runs"),
    [
        ([100] * 4, [200] * 4, 4),
        ([100, 102, 99, 101], [200] * 4, 4),
        ([100, 110, 120, 130, 140, 140], [200] * 6, 6),
        ([100, 110, 120, 130, 130, 130], [200, 210, 220, 230, 250, 250], 6),
    ],
)
def test_burn_in_until_every_cell_has_settled(world: World, first: list[float], second: list[float], runs: int) -> None:
    """The last two runs agree in all of them at once, within 1.5 % or within the noise so far."""
    world.says = lambda name: (
        Said((first[i - 1], second[i - 1])) if (i := int(name.rpartition("-")[2])) and "burn" in name else Said()
    )
    assert world.hold() is None
    assert world.places[: runs + 1] == [*(f"u{i + 1}" for i in range(runs)), "a0"]
    assert not any(flag for run in world.of(RunEvent) for flag in run.flags)
    assert world.of(ChainEvent)[-1].total == runs + 9


def test_a_burn_in_that_never_settles_ends(world: World) -> None:
    """With the sixteenth run, which says so; the chain is held all the same."""
    world.says = lambda name: drifted(2.0 ** int(name.rpartition("-")[2]) if "burn-in" in name else 0.0, cell=1)
    assert world.hold() is None
    assert world.places == [f"u{i}" for i in range(1, 17)] + EVEN[4:]
    unsettled = flag(Code.UNSETTLED, hard=False, runs=16)
    flags = [(run.role, run.cycle, *run.flags) for run in world.of(RunEvent) if run.flags]
    assert flags == [("burn-in", 16, unsettled)]
    assert [event.cycle for event in world.of(ChainEvent) if event.note == unsettled.reason] == [16]


def test_a_failed_run_of_burn_in_is_followed_by_another(world: World) -> None:
    """It gives nothing to agree with; two in a row are the error of the chain."""
    assert scripted(world, {"burn-in-4": CRASH}).hold() is None
    assert world.places[:7] == [*BURNT, "u5", "u6", "a0"]


@pytest.mark.parametrize(
    ("outcome", "kind", "message", "next"),
    [
        (CRASH, RemoteError, "llama-bench was killed by SIGSEGV", "dgxlab logs J raw/chain:0-burn-in-3.err"),
        (UNENGAGED, GateFailed, str(UNENGAGED.reasons[0]), "dgxlab logs J raw/chain:0-burn-in-3.err"),
        (STRANGER, HostBusy, f"chain:0, burn-in 3 was not left alone: {STRANGER.reasons[0]}", AGAIN),
    ],
)
def test_a_baseline_that_cannot_be_run(
    world: World, outcome: Said, kind: type[DgxlabError], message: str, next: str
) -> None:
    """Two failures in a row end the chain before anything is compared."""
    error = scripted(world, {"burn-in-[23]": outcome}).hold()
    assert type(error) is kind
    assert (error.message, error.next) == (message, next)
    assert world.places == ["u1", "u2", "u3"]
    assert [event.state for event in world.of(ChainEvent)] == ["burn-in", "burn-in", "done"]


def test_a_stuck_clock_ends_the_job(world: World) -> None:
    """It is recorded first; no other chain makes sense in that state."""
    scripted(world, {"burn-in-1": Said(flags=(STUCK,))})
    with pytest.raises(ConditionsError, match="the GPU was busy at 611 MHz"):
        world.hold()
    assert world.places == ["u1"]


@pytest.mark.parametrize(
    ("says", "far", "valid"),
    [
        ({"baseline-2": drifted(0.06, cell=1)}, 4, 4),
        ({"baseline-[234]": drifted(0.06, cell=1)}, 2, 3),
        ({"candidate-1": Said(flags=(CAPPED,))}, 0, 4),
    ],
)
def test_values_and_soft_flags_bring_no_other_cycle(world: World, says: dict[str, Said], far: int, valid: int) -> None:
    """One far baseline is noise, a step costs its cycle; how far apart baselines are is told, and that is all."""
    assert scripted(world, says).hold() is None
    assert world.places == EVEN
    assert sum((event.drift or 0.0) > 0.05 for event in world.of(ChainEvent)) == far
    assert world.of(ChainEvent)[-1].valid == valid


def test_a_cycle_with_a_flaw_gets_another(world: World) -> None:
    """And so does the one that shares its baseline."""
    assert scripted(world, {"baseline-2": Said(flags=(HOT,))}).hold() is None
    assert world.places == [*EVEN, "b5", "a5", "b6", "a6"]
    told = world.of(ChainEvent)
    assert [event.cycles for event in told][-6:] == [4, 5, 5, 6, 6, 6]
    assert [event.valid for event in told][-6:] == [1, 2, 2, 3, 3, 4]
    assert told[-1].total == told[-1].done == 17


def test_a_chain_that_can_no_longer_count_stops(world: World) -> None:
    """In the middle of its extra cycles too; the error has the reason of each cycle."""
    error = scripted(world, {"candidate-[1345]": Said(flags=(HOT,))}).hold()
    assert world.places == [*EVEN, "b5", "a5"]
    assert type(error) is ConditionsError
    assert error.message == (
        "chain:0 (llama-bench) gives no verdict: 1 of 5 cycles count and 3 are needed;"
        " cycle 5: candidate 5 HW thermal slowdown for 2.0 s"
    )
    assert error.details.splitlines()[0] == "cycle 1: candidate 1 HW thermal slowdown for 2.0 s"
    assert len(error.details.splitlines()) == 4
    assert error.next == AGAIN


def test_a_hopeless_chain_is_given_up(world: World) -> None:
    """A candidate that always crashes costs four cycles, not six; each ends with its baseline."""
    error = scripted(world, {"candidate": CRASH}).hold()
    assert world.places == EVEN
    assert type(error) is ConditionsError
    assert error.message.startswith(
        "chain:0 (llama-bench) gives no verdict: 0 of 4 cycles count and 3 are needed; cycle 4"
    )
    assert error.message.endswith("candidate 4 failed: llama-bench was killed by SIGSEGV")
    assert error.next == "dgxlab logs J raw/chain:0-candidate-4.err"
    last = world.of(ChainEvent)[-1]
    assert (last.state, last.cycles, last.valid) == ("done", 4, 0)


def test_one_lost_cell_does_not_cost_the_others_theirs(world: World) -> None:
    """A chain in which one cell has a step too many goes on for the rest, and makes no extra cycle for that one."""
    scripted(world, {"baseline-[345]": drifted(0.1, cell=1)})
    error = world.hold(lambda step: replace(step, cycles=5, claims=2))
    assert world.places == [*EVEN, "b5", "a5"]
    assert type(error) is ConditionsError
    assert error.message.startswith(
        "chain:0 (llama-bench) gives no verdict for pp32: 4 of 5 cycles count and 5 are needed"
    )


def test_a_path_that_never_ran_is_a_failed_gate(world: World) -> None:
    """The candidate's marker is missing: two cycles tell that a session compares nothing."""
    error = scripted(world, {"candidate": UNENGAGED}).hold()
    assert world.places == EVEN[:9]
    assert world.of(ChainEvent)[-1].state == "done"
    assert type(error) is GateFailed
    assert error.message.endswith(f"candidate 2 discarded: {UNENGAGED.reasons[0]}")


@pytest.mark.parametrize("says", [{"candidate-[13]": UNENGAGED}, {"candidate-[12]": STRANGER}])
def test_a_path_that_may_still_run_is_waited_for(world: World, says: dict[str, Said]) -> None:
    """It ran once, or a stranger was beside it, which says nothing about the path."""
    assert scripted(world, says).hold() is None
    assert world.places == [*EVEN, "b5", "a5", "b6", "a6"]


def test_the_candidates_path_must_not_run_in_the_baseline(world: World) -> None:
    """Every run of the baseline is asked for it, burn-in too, and none of the candidate."""
    assert world.hold(lambda step: replace(step, absent=("w4a16:",), cycles=2)) is None
    assert world.absent == [("w4a16:",) if place[0] in "ua" else () for place in world.places]


@pytest.mark.parametrize("outcome", [CRASH, STRANGER, BUSY, Said(flags=(HOT,))])
def test_a_flawed_run_is_not_repeated(world: World, outcome: Said) -> None:
    """A baseline costs the two cycles beside it; the chain goes on."""
    assert scripted(world, {"baseline-1": outcome}).hold() is None
    assert world.places == [*EVEN, "b5", "a5", "b6", "a6"]
    assert [event.valid for event in world.of(ChainEvent)][6:9:2] == [0, 0]


def test_lost_rows_are_run_again_in_their_place(world: World) -> None:
    """As often as the step allows, under another name; the last attempt counts."""
    scripted(world, {"candidate-2-1": Said(), "candidate-2": SHORT, "baseline-3": SHORT})
    assert world.hold() is None
    assert world.places[7:14] == ["b2", "b2", "a2", "b3", "a3", "a3", "b4"]
    assert world.names[7:9] == ["chain:0-candidate-2", "chain:0-candidate-2-1"]
    assert world.places[14:] == ["a4", "b5", "a5", "b6", "a6"]
    told = world.of(ChainEvent)
    assert told[7].note == "candidate 2 failed: llama-bench: pp32: it has no row; it is run again"
    assert (told[7].done, told[8].done) == (8, 8)


@pytest.mark.parametrize(("says", "attempts"), [({}, 1), ({"candidate-1$": SHORT}, 2)])
def test_a_run_after_a_wait_does_not_count(world: World, says: dict[str, Said], attempts: int) -> None:
    """The device cooled meanwhile; before the first run that is no gap. Another attempt does not close it."""
    world.waits = {1: 90.0, 6: 5.5}
    assert scripted(world, says).hold() is None
    flags = [(run.role, run.cycle, *(each.kind for each in run.flags)) for run in world.of(RunEvent) if run.flags]
    assert flags == [("candidate", 1, "waited")] * attempts
    assert world.places[-2:] == ["b5", "a5"]


@pytest.mark.parametrize("closes", [True, False])
def test_a_screen_is_one_bracket(world: World, closes: bool) -> None:
    """Burn-in, one cycle, and never another; its limit is 2 %, whatever the spec allows."""
    error = scripted(world, {} if closes else {"baseline-1": drifted(0.03)}).hold(screen)
    assert world.places == [*BURNT, "a0", "b1", "a1"]
    assert world.of(ChainEvent)[-1].total == 7
    assert type(error) is (type(None) if closes else ConditionsError)
    assert not error or error.message.endswith("the limit is 2 %")


def test_an_aa_session_runs_one_arm(world: World) -> None:
    """The same step in both places; its runs are told apart by their role. A pinned chain pins every run."""
    assert world.hold(lambda step: replace(step, candidate=step.baseline, pin=True)) is None
    assert world.places == EVEN
    assert {run.arm for run in world.of(RunEvent)} == {"one"}
    assert world.pinned == [True] * 13


def noisy(name: str) -> Said:
    """Return a run of a burn-in that moves up and down by 2 %, or one of a chain that does not."""
    number = int(name.rpartition("-")[2])
    return drifted(0.02 * (number % 2) if "burn-in" in name else 0.0)


def by_effect(step: ChainStep, **changes: Any) -> ChainStep:
    """Let the burn-in decide how long a chain of two claims is."""
    return replace(step, **{"cycles": 0, "effect": 0.05, "claims": 2, **changes})


def test_the_burn_in_decides_how_long_a_chain_is(world: World) -> None:
    """Eight runs; the number is told with what it finds before the chain begins, and the record gives it again."""
    world.says = noisy
    assert world.hold(by_effect) is None
    told = world.of(ChainEvent)
    assert [event.cycles for event in told[:8]] == [0] * 8
    assert [event.total for event in told[:8]] == [0] * 8
    chosen = told[8]
    assert (chosen.state, chosen.role, chosen.note[:9]) == ("burn-in", "burn-in", "14 cycles")
    assert {event.cycles for event in told[8:]} == {14}
    assert len(world.places) == 8 + 2 * 14 + 1 == told[-1].total
    values = [[median(m.samples) for r in run.results for m in r.measurements] for run in world.of(RunEvent)]
    slots = [
        Slot(run.role, run.cycle, dict(zip(KEYS, each, strict=True)), "", run.seconds)
        for run, each in zip(world.of(RunEvent), values, strict=True)
    ]
    runs = [RunStep("r", arm, "llama-bench", (), {}, CELLS) for arm in ("one", "two")]
    assert planned(by_effect(ChainStep("chain:0", *runs, cycles=4, drift_limit=0.05)), slots) == 14


def test_a_limit_of_time_makes_a_chain_shorter(world: World) -> None:
    """Each run takes a second: eight of burn-in, and 19 places for the rest."""
    world.says = noisy
    assert world.hold(lambda step: by_effect(step, max_s=27.5)) is None
    assert len(world.places) == 8 + 2 * 9 + 1
    (note,) = (event.note for event in world.of(ChainEvent) if event.note)
    assert note.startswith("9 cycles, to find ")
    assert note.endswith(": 27.5 s allow no more, 14 would find 5 %")


@pytest.mark.parametrize("max_s", [18.5, 5.0])
def test_a_limit_that_leaves_nothing_to_claim_ends_the_chain(world: World, max_s: float) -> None:
    """After its burn-in, which is what tells it."""
    error = world.hold(lambda step: by_effect(step, max_s=max_s))
    assert type(error) is ConditionsError
    assert world.places == [f"u{i}" for i in range(1, 9)]
    assert world.of(ChainEvent)[-1].state == "done"


def timed(monkeypatch: pytest.MonkeyPatch, world: World) -> None:
    """Let every run take 40 s, and nothing else any time."""
    clock, says = [0.0], world.says

    def run(name: str) -> Said:
        clock[0] += 40.0
        return says(name)

    world.says = run
    monkeypatch.setattr("dgxlab.agent.chain.time.monotonic", lambda: clock[0])


def test_a_block_warms_its_arm_before_the_run_that_counts(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs of 40 s in blocks of 60 s: two that warm the device, then one; those are in the record, and flawed."""
    timed(monkeypatch, world)
    assert world.hold(lambda step: replace(step, block_s=60.0)) is None
    assert world.places == [*BURNT, *(place for place in EVEN[4:] for _ in range(3))]
    kinds = [[flag.kind for flag in run.flags] for run in world.of(RunEvent)]
    assert kinds == [[]] * 4 + [["warming"], ["warming"], []] * 9
    assert world.of(ChainEvent)[-1].valid == 4
    assert world.of(ChainEvent)[-1].done == 13


def test_a_block_whose_run_fails_is_over(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would fail again and again as long as the block lasts."""
    timed(monkeypatch, scripted(world, {"candidate-2": CRASH}))
    assert world.hold(lambda step: replace(step, block_s=60.0)) is None
    assert [world.places.count(f"b{i}") for i in range(1, 6)] == [3, 1, 3, 3, 3]
