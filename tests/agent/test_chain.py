"""How a chain is held: which run follows which, on a bench whose programs are not run: what they come to is given."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, TypeVar

import pytest

from dgxlab.agent import chain
from dgxlab.agent.measure import Attempt, Workbench
from dgxlab.chains import ChainRun, cycles_planned
from dgxlab.errors import AGAIN, ConditionsError, DgxlabError, GateFailed, HostBusy, RemoteError, more_minutes
from dgxlab.model import Arm, Cell, CellResult, ChainStep, Measurement, Plan, RunStep, digest
from dgxlab.model.events import ChainEvent, Event, File, Flag, RunEvent, Summary, flag
from dgxlab.model.reasons import Code, Reason, reason
from dgxlab.stats import median
from tests.agent.conftest import FACTS, workplace
from tests.journals import read, source

E = TypeVar("E", bound=Event)

CELLS = tuple(Cell("llama-bench", label, {"n_prompt": n}, {}) for label, n in (("pp16", 16), ("pp32", 32)))
KEYS = [(cell.key, "avg_ts") for cell in CELLS]
ONE, TWO = (RunStep(f"chain:0:{arm}", arm, "llama-bench", (arm,), {}, CELLS, attempts=2) for arm in ("one", "two"))
STEP = ChainStep("chain:0", ONE, TWO, cycles=4, drift_limit=0.05)


@dataclass(frozen=True)
class Outcome:
    """What a run came to; one value for each cell."""

    values: tuple[float, ...] = (100.0, 200.0)
    status: Literal["valid", "discarded", "failed"] = "valid"
    reasons: tuple[Reason, ...] = ()
    again: str = ""
    flags: tuple[Flag, ...] = ()


class World(Workbench):
    """The bench of a job on the processor with one chain, some runs of which have to wait."""

    def __init__(self, folder: Path) -> None:
        arms = tuple(Arm(name, source(), {"GGML_CUDA": "OFF"}) for name in ("one", "two"))
        super().__init__(*workplace(folder), Plan("J", "n", "e", arms, (STEP,), "ab"), FACTS)
        self.says: Callable[[str], Outcome] = lambda name: Outcome()
        self.warm: Callable[[], float | None] = lambda: None
        self.waits: dict[int, float] = {}
        self.holds = 0
        self.names: list[str] = []
        self.absent: list[tuple[str, ...]] = []
        self.pinned: list[bool] = []
        self.telemetry = self  # type: ignore[assignment]

    def chain(self, says: Mapping[str, Outcome] | None = None, **changes: Any) -> DgxlabError | None:
        """Hold the chain with these changes of its step; `says` has outcomes by patterns of their runs' names."""
        if says:
            self.says = lambda name: next((says[pattern] for pattern in says if re.search(pattern, name)), Outcome())
        try:
            return chain.ChainRunner(replace(STEP, **changes), self).carry_out()
        finally:
            self.lease.release()
            self.journal.close()

    def progress(self, step: str, done: int, total: int, note: str) -> None:
        pass

    def hold(self) -> float:
        self.holds += 1
        return super().hold() + self.waits.get(self.holds, 0.0)

    def measure(self, step: RunStep, name: str, absent: Sequence[str] = (), *, pin: bool = False) -> Attempt:
        """Return what the script says of this run."""
        self.pinned.append(pin)
        self.names.append(name)
        self.absent.append(tuple(absent))
        outcome = self.says(name)
        measured = zip(step.cells, outcome.values, strict=False)
        run = RunEvent(
            id=step.id,
            arm=step.arm,
            build_id=f"B-{step.arm}",
            tool=step.tool,
            model_id="",
            position=next(self._positions),
            argv=step.argv,
            env={},
            env_digest=digest({}),
            rc=0,
            signal=None,
            started=0.0,
            seconds=1.0,
            before={},
            after={},
            cells={cell.key: cell for cell in step.cells},
            status=outcome.status,
            reasons=outcome.reasons,
            flags=outcome.flags,
            results=tuple(
                CellResult(cell.key, (Measurement(cell.key, "avg_ts", "t/s", (value,)),)) for cell, value in measured
            ),
            telemetry=(Summary("host", "cpu_mhz", "MHz", 3, 2600.0, 345.0, 3000.0),),
            raw={stream: File(f"raw/{name}.{stream[3:]}", "0", 0) for stream in ("stdout", "stderr")},
        )
        return Attempt(run, outcome.again)

    # -- samplers, of a temperature that no machine here has

    def start(self) -> None:
        pass

    def temperature(self) -> float | None:
        return self.warm()

    def now(self) -> dict[str, dict[str, float]]:
        seen = self.warm()
        return {} if seen is None else {"GPU-1": {"temperature.gpu": seen}, "GPU-2": {"temperature.gpu": seen - 2}}

    def of(self, kind: type[E]) -> list[E]:
        return [event for event in read(self.journal.path) if isinstance(event, kind)]

    @property
    def places(self) -> list[str]:
        """What ran, in short: u1 u2 a0 b1 a1."""
        letters = {"burn-in": "u", "baseline": "a", "candidate": "b"}
        return [f"{letters[run.role or '']}{run.cycle}" for run in self.of(RunEvent)]


STUCK = flag(Code.STUCK_CLOCK, "GPU-1", hard=True, mhz=611.0, least=1500.0)
HOT = flag(Code.HW_THERMAL, "GPU-1", hard=True, seconds=2.0)
CAPPED = flag(Code.SW_POWER_CAP, "GPU-1", hard=False, seconds=2.0)
SHARED = flag(Code.RUN_QUEUE, hard=True, threads=2, processors=2, waited=0.5, others=0.9)

CRASH = Outcome((), "failed", (reason(Code.KILLED, program="llama-bench", signal="SIGSEGV"),))
SHORT = Outcome(
    (100.0,), "failed", (reason(Code.ROWS, program="llama-bench", problems=["pp32: it has no row"]),), "rows"
)
BUSY = Outcome(flags=(SHARED,), again="disturbed")
STRANGER = Outcome((), "discarded", (reason(Code.STRANGER, processes="pid 7"),), "disturbed")
UNENGAGED = Outcome((), "discarded", (reason(Code.NOT_ENGAGED, marker="w4a16:", program="llama-bench"),))


def drifted(by: float, *, cell: int = 0) -> Outcome:
    return Outcome(tuple(value * (1 + by * (i == cell)) for i, value in enumerate((100.0, 200.0))))


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


BURNT = ["u1", "u2", "u3", "u4"]
EVEN = [*BURNT, "a0", "b1", "a1", "b2", "a2", "b3", "a3", "b4", "a4"]


def test_a_chain(world: World) -> None:
    assert world.chain() is None
    assert world.places == EVEN
    assert world.names[3:6] == ["chain:0-burn-in-4", "chain:0-baseline-0", "chain:0-candidate-1"]
    assert world.holds == len(set(world.names)) == 13
    runs = world.of(RunEvent)
    assert {(run.role, *run.argv, run.build_id) for run in runs} == {
        ("burn-in", "one", "B-one"),
        ("baseline", "one", "B-one"),
        ("candidate", "two", "B-two"),
    }
    assert [run.position for run in runs] == list(range(13))
    assert {run.chain for run in runs} == {"chain:0"}
    assert all(run.flags == () for run in runs)


def test_what_is_told_of_a_chain(world: World) -> None:
    assert world.chain({"candidate": drifted(0.5), "baseline-1": drifted(0.02)}) is None
    told = world.of(ChainEvent)
    assert [event.event for event in world.of(Event)] == ["lock", *["run", "chain"] * 13, "lock"]
    assert [event.state for event in told] == ["burn-in"] * 4 + ["running"] * 8 + ["done"]
    assert [(event.done, event.total, event.cycles) for event in told] == [(n, 13, 4) for n in range(1, 14)]
    assert [event.valid for event in told] == [0, 0, 0, 0, 0, 0, 1, 1, 2, 2, 3, 3, 4]
    far = pytest.approx(0.0198, abs=1e-4)
    assert [event.drift for event in told][:9] == [None, *[0.0] * 5, *[far] * 3]
    assert told[-1].conditions == {"cpu_mhz": (2600.0, 2600.0)}
    assert told[0].left_s > 0
    assert told[-1].left_s == 0
    assert {event.note for event in told} == {""}
    names = "seq t id state role cycle cycles done total valid drift conditions left_s note"
    assert vars(told[0]).keys() == set(names.split())


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
        Outcome((first[i - 1], second[i - 1])) if (i := int(name.rpartition("-")[2])) and "burn" in name else Outcome()
    )
    assert world.chain() is None
    assert world.places[: runs + 1] == [*(f"u{i + 1}" for i in range(runs)), "a0"]
    assert not any(flag for run in world.of(RunEvent) for flag in run.flags)
    assert world.of(ChainEvent)[-1].total == runs + 9


def test_a_burn_in_that_never_settles_ends(world: World) -> None:
    world.says = lambda name: drifted(2.0 ** int(name.rpartition("-")[2]) if "burn-in" in name else 0.0, cell=1)
    assert world.chain() is None
    assert world.places == [f"u{i}" for i in range(1, 17)] + EVEN[4:]
    unsettled = flag(Code.UNSETTLED, hard=False, runs=16)
    flags = [(run.role, run.cycle, *run.flags) for run in world.of(RunEvent) if run.flags]
    assert flags == [("burn-in", 16, unsettled)]
    assert [event.cycle for event in world.of(ChainEvent) if event.note == unsettled.reason] == [16]


def test_runs_too_short_to_see_other_programs_are_told_when_the_burn_in_ends(world: World) -> None:
    short = flag(Code.TOO_SHORT, hard=False, least=0.2)
    assert world.chain({"": Outcome(flags=(short,))}) is None
    told = [(event.role, event.cycle) for event in world.of(ChainEvent) if event.note == short.reason]
    assert told == [("burn-in", 4)]


@pytest.mark.parametrize(
    ("outcome", "kind", "message", "next"),
    [
        (CRASH, RemoteError, "llama-bench was killed by SIGSEGV", "dgxlab logs J raw/chain:0-burn-in-3.err"),
        (UNENGAGED, GateFailed, str(UNENGAGED.reasons[0]), "dgxlab logs J raw/chain:0-burn-in-3.err"),
        (STRANGER, HostBusy, f"chain:0, burn-in 3 was not left alone: {STRANGER.reasons[0]}", AGAIN),
    ],
)
def test_a_baseline_that_cannot_be_run(
    world: World, outcome: Outcome, kind: type[DgxlabError], message: str, next: str
) -> None:
    error = world.chain({"burn-in-[23]": outcome})
    assert type(error) is kind
    assert (error.message, error.next) == (message, next)
    assert world.places == ["u1", "u2", "u3"]
    assert [event.state for event in world.of(ChainEvent)] == ["burn-in", "burn-in", "done"]


def test_a_stuck_clock_ends_the_job(world: World) -> None:
    with pytest.raises(ConditionsError, match="the GPU was busy at 611 MHz"):
        world.chain({"burn-in-1": Outcome(flags=(STUCK,))})
    assert world.places == ["u1"]


def test_a_burn_in_of_which_no_run_counts_ends_the_chain(world: World) -> None:
    """Its cycles would not count either; and without known noise they would be the most that a chain may have."""
    error = world.chain({"burn-in": BUSY}, cycles=0, effect=0.05, claims=2)
    assert type(error) is ConditionsError
    assert error.message == f"chain:0 (llama-bench): no run of the burn-in counts; the last: {SHARED.reason}"
    assert world.places == [f"u{i}" for i in range(1, 17)]
    assert [event.state for event in world.of(ChainEvent)] == ["burn-in"] * 16 + ["done"]


def test_one_run_of_the_burn_in_that_counts_is_enough(world: World) -> None:
    assert world.chain({"burn-in-9": Outcome(), "burn-in": BUSY}) is None
    assert world.places == [f"u{i}" for i in range(1, 17)] + EVEN[4:]


MORE = ("b5", "a5", "b6", "a6")


@pytest.mark.parametrize(
    ("says", "more", "valid"),
    [
        ({"baseline-2": drifted(0.06, cell=1)}, (), 4),  # one far baseline is noise
        ({"baseline-[234]": drifted(0.06, cell=1)}, (), 3),  # a step costs its cycle
        ({"candidate-1": Outcome(flags=(CAPPED,))}, (), 4),
        # a baseline costs the two cycles beside it
        *(({"baseline-1": outcome}, MORE, 4) for outcome in (CRASH, STRANGER, BUSY, Outcome(flags=(HOT,)))),
        # a path that ran once, or had a stranger beside it, may still run
        *((says, MORE, 4) for says in ({"candidate-[13]": UNENGAGED}, {"candidate-[12]": STRANGER})),
    ],
)
def test_only_a_flaw_brings_another_cycle(
    world: World, says: dict[str, Outcome], more: Sequence[str], valid: int
) -> None:
    assert world.chain(says) is None
    assert world.places == [*EVEN, *more]
    told = world.of(ChainEvent)
    assert (told[-1].valid, told[-1].done, told[-1].total) == (valid, 13 + len(more), 13 + len(more))
    assert [event.cycles for event in told][-6:] == ([4, 5, 5, 6, 6, 6] if more else [4] * 6)


@pytest.mark.parametrize(
    ("says", "outcome", "places", "kind", "counts", "reason"),
    [
        # in the middle of its extra cycles
        ("candidate-[1345]", Outcome(flags=(HOT,)), [*EVEN, "b5", "a5"], ConditionsError, "1 of 5", HOT.reason),
        # a candidate that always crashes costs four cycles, not six
        ("candidate", CRASH, EVEN, ConditionsError, "0 of 4", f"failed: {CRASH.reasons[0]}"),
        # two cycles tell that a session compares nothing
        ("candidate", UNENGAGED, EVEN[:9], GateFailed, "0 of 2", f"discarded: {UNENGAGED.reasons[0]}"),
    ],
)
def test_a_chain_that_can_no_longer_count_stops(
    world: World, says: str, outcome: Outcome, places: list[str], kind: type[DgxlabError], counts: str, reason: str
) -> None:
    error = world.chain({says: outcome})
    assert world.places == places
    assert type(error) is kind
    cycle = counts[-1]
    words = f"{counts} cycles count and 3 are needed; cycle {cycle}: candidate {cycle} {reason}"
    assert error.message == f"chain:0 (llama-bench) gives no verdict: {words}"
    assert error.next == (AGAIN if outcome.flags else f"dgxlab logs J raw/chain:0-candidate-{cycle}.err")
    assert (world.of(ChainEvent)[-1].state, error.details) == ("done", "")


def test_the_error_names_one_flaw_of_the_last_cycle(world: World) -> None:
    error = world.chain({"baseline|candidate": Outcome(flags=(SHARED,))})
    assert error.message.endswith(f"cycle 4: baseline 3 {SHARED.reason}")


def test_one_lost_cell_does_not_cost_the_others_theirs(world: World) -> None:
    error = world.chain({"baseline-[345]": drifted(0.1, cell=1)}, cycles=5, claims=2)
    assert world.places == [*EVEN, "b5", "a5"]
    assert type(error) is ConditionsError
    assert " for pp32: 4 of 5 cycles count" in error.message


def test_the_candidates_path_must_not_run_in_the_baseline(world: World) -> None:
    assert world.chain(absent=("w4a16:",), cycles=2) is None
    assert world.absent == [("w4a16:",) if place[0] in "ua" else () for place in world.places]


def test_lost_rows_are_run_again_in_their_place(world: World) -> None:
    assert world.chain({"candidate-2-1": Outcome(), "candidate-2": SHORT, "baseline-3": SHORT}) is None
    assert world.places[7:14] == ["b2", "b2", "a2", "b3", "a3", "a3", "b4"]
    assert world.names[7:9] == ["chain:0-candidate-2", "chain:0-candidate-2-1"]
    assert world.places[14:] == ["a4", "b5", "a5", "b6", "a6"]
    told = world.of(ChainEvent)
    assert told[7].note == f"failed: {SHORT.reasons[0]}; it is run again"
    assert (told[7].done, told[8].done) == (8, 8)


@pytest.mark.parametrize(("says", "attempts"), [({}, 1), ({"candidate-1$": SHORT}, 2)])
def test_a_run_after_a_wait_does_not_count(world: World, says: dict[str, Outcome], attempts: int) -> None:
    """The device cooled meanwhile; before the first run that is no gap. Another attempt does not close it."""
    world.waits = {1: 90.0, 6: 5.5}
    assert world.chain(says) is None
    flags = [(run.role, run.cycle, *(each.kind for each in run.flags)) for run in world.of(RunEvent) if run.flags]
    assert flags == [("candidate", 1, "waited")] * attempts
    assert world.places[-2:] == ["b5", "a5"]


@pytest.mark.parametrize("closes", [True, False])
def test_a_screen_is_one_bracket(world: World, closes: bool) -> None:
    error = world.chain({} if closes else {"baseline-1": drifted(0.03)}, screen=True, cycles=1)
    assert world.places == [*BURNT, "a0", "b1", "a1"]
    assert world.of(ChainEvent)[-1].total == 7
    assert type(error) is (type(None) if closes else ConditionsError)
    assert not error or error.message.endswith("the limit is 2 %")


def test_an_aa_session_runs_one_arm(world: World) -> None:
    assert world.chain(candidate=ONE, pin=True) is None
    assert world.places == EVEN
    assert {run.arm for run in world.of(RunEvent)} == {"one"}
    assert world.pinned == [True] * 13


def noisy(name: str) -> Outcome:
    number = int(name.rpartition("-")[2])
    return drifted(0.02 * (number % 2) if "burn-in" in name else 0.0)


BY_EFFECT = {"cycles": 0, "effect": 0.05, "claims": 2}


def test_the_burn_in_decides_how_long_a_chain_is(world: World) -> None:
    world.says = noisy
    assert world.chain(**BY_EFFECT) is None
    told = world.of(ChainEvent)
    assert [(event.cycles, event.total) for event in told[:8]] == [(0, 0)] * 8
    chosen = told[8]
    assert (chosen.state, chosen.role, chosen.note[:9]) == ("burn-in", "burn-in", "14 cycles")
    assert {event.cycles for event in told[8:]} == {14}
    assert len(world.places) == 8 + 2 * 14 + 1 == told[-1].total
    values = [[median(m.samples) for r in run.results for m in r.measurements] for run in world.of(RunEvent)]
    runs = [
        ChainRun(run.role, run.cycle, dict(zip(KEYS, each, strict=True)), "", run.seconds)
        for run, each in zip(world.of(RunEvent), values, strict=True)
    ]
    assert cycles_planned(replace(STEP, **BY_EFFECT), runs) == 14


def test_a_limit_of_time_makes_a_chain_shorter(world: World) -> None:
    world.says = noisy
    assert world.chain(**BY_EFFECT, max_s=27.5) is None
    assert len(world.places) == 8 + 2 * 9 + 1
    (note,) = (event.note for event in world.of(ChainEvent) if event.note)
    assert re.match(r"9 cycles, .*: 27\.5 s .*; 14 are needed to find 5 %$", note)


@pytest.mark.parametrize("max_s", [18.5, 5.0])
def test_a_limit_that_leaves_nothing_to_claim_ends_the_chain(world: World, max_s: float) -> None:
    """As soon as three runs have said how long one takes: 1 s. Another chain has three minutes."""
    world.plan = replace(world.plan, steps=(replace(STEP, max_s=max_s), replace(STEP, id="chain:1", max_s=180.0)))
    error = world.chain(**BY_EFFECT, max_s=max_s)
    assert type(error) is ConditionsError
    least_s = 180 + 8 + 1 + 2 * 5
    allowed = 4 if max_s == 18.5 else 0
    assert f" allow {allowed} of the 5 cycles that its session needs" in error.message
    assert error.next == more_minutes(least_s) == f"{AGAIN} with --max-minutes 4"
    assert world.places == ["u1", "u2", "u3"]
    assert world.of(ChainEvent)[-1].state == "done"


@pytest.fixture
def long_runs(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dgxlab.agent.chain.time.monotonic", lambda: 40.0 * len(world.names))


@pytest.mark.usefixtures("long_runs")
def test_a_block_warms_its_arm_before_the_run_that_counts(world: World) -> None:
    """Runs of 40 s in blocks of 60 s: two that warm the device, then one; those are in the record, and flawed."""
    assert world.chain(block_s=60.0) is None
    assert world.places == [*BURNT, *(place for place in EVEN[4:] for _ in range(3))]
    kinds = [[flag.kind for flag in run.flags] for run in world.of(RunEvent)]
    assert kinds == [[]] * 4 + [["warming"], ["warming"], []] * 9
    assert world.of(ChainEvent)[-1].valid == 4
    assert world.of(ChainEvent)[-1].done == 13


@pytest.mark.usefixtures("long_runs")
def test_a_block_whose_run_fails_is_over(world: World) -> None:
    assert world.chain({"candidate-2": CRASH}, block_s=60.0) is None
    assert [world.places.count(f"b{i}") for i in range(1, 6)] == [3, 1, 3, 3, 3]


# -- runs that wait for the device to cool ----------------------------------------------------------------------------


@pytest.fixture
def quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have a clock that goes on by what is slept alone: no wait takes time, and a slow machine changes nothing."""
    slept = [0.0]
    clock = SimpleNamespace(sleep=slept.append, monotonic=lambda: sum(slept))
    monkeypatch.setattr(chain, "time", clock)


def cools(world: World, at: Callable[[int, int], float]) -> None:
    looks: list[int] = []

    def warm() -> float:
        looks.append(len(world.names))
        return at(len(world.names), looks.count(len(world.names)))

    world.warm = warm


@pytest.mark.usefixtures("quickly")
def test_a_cold_chain_waits_for_its_gate(world: World) -> None:
    cools(world, lambda runs, looks: 50.0 if runs == 0 else max(40.0, 60.0 - looks))
    assert world.chain(thermal="cold", cycles=2) is None
    assert world.places == ["u1", "u2", "u3", "u4", "a0", "b1", "a1", "b2", "a2"]
    cooling = [event for event in world.of(ChainEvent) if event.state == "cooling"]
    assert cooling[0].note.startswith("cooling from 59.0 °C until")
    assert [event.note for event in cooling[1:]] == ["cooling from 59.0 °C to 43.0 °C"] * 7
    assert [(event.role, event.cycle) for event in cooling[:4]] == [
        ("burn-in", 1),
        ("burn-in", 3),
        ("burn-in", 4),
        ("baseline", 0),
    ]
    assert cooling[1].conditions == {"temperature.gpu": (56.0, 58.0)}
    assert not any(run.flags for run in world.of(RunEvent))


@pytest.mark.usefixtures("quickly")
def test_a_device_that_stays_warm(world: World) -> None:
    cools(world, lambda runs, looks: 40.0 if runs < 3 else 44.04)
    error = world.chain(thermal="cold", cycles=2)
    assert isinstance(error, ConditionsError)
    assert (error.exit_code, error.next) == (8, AGAIN)
    assert re.findall(r"[\d.]+ (?:°C|min)", error.message) == ["43.0 °C", "15 min", "44.0 °C"]
    assert world.places == ["u1", "u2", "u3"]
    assert world.of(ChainEvent)[-1].state == "done"


@pytest.mark.usefixtures("quickly")
def test_no_temperature_no_cold_chain(world: World) -> None:
    error = world.chain(thermal="cold", cycles=2)
    assert isinstance(error, ConditionsError)
    assert error.next == "dgxlab doctor local"
    assert world.of(RunEvent) == []


@pytest.mark.usefixtures("quickly")
def test_a_temperature_that_is_late_or_pauses(world: World) -> None:
    seen: Iterator[float | None] = iter([None, None, 40.0, None])
    world.warm = lambda: next(seen, 40.0)
    assert world.chain(thermal="cold", cycles=2) is None
