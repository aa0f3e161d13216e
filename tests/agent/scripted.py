"""A job with one chain on a bench whose programs are not run: what they come to is given."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

from dgxlab.agent.chain import ChainRunner
from dgxlab.agent.journal import Journal
from dgxlab.agent.lease import DeviceLease
from dgxlab.agent.measure import Attempt, Bench, Runs
from dgxlab.errors import DgxlabError
from dgxlab.model import Arm, Cell, CellResult, ChainStep, Measurement, Plan, RunStep, digest
from dgxlab.model.events import Event, File, Flag, RunEvent, Summary
from dgxlab.model.reasons import Reason
from tests.journals import read, source

E = TypeVar("E", bound=Event)

CELLS = tuple(Cell("llama-bench", label, {"n_prompt": n}, {}) for label, n in (("pp16", 16), ("pp32", 32)))


@dataclass(frozen=True)
class Outcome:
    """What a run came to; one value for each cell."""

    values: tuple[float, ...] = (100.0, 200.0)
    status: Literal["valid", "discarded", "failed"] = "valid"
    reasons: tuple[Reason, ...] = ()
    again: str = ""
    flags: tuple[Flag, ...] = ()


@dataclass
class World:
    """A job on the processor with one chain, whose runs come to what `says` says of their names."""

    folder: Path
    says: Callable[[str], Outcome] = lambda name: Outcome()
    waits: Mapping[int, float] = field(default_factory=dict)
    warm: Callable[[], float | None] = lambda: None
    names: list[str] = field(default_factory=list)
    holds: int = 0
    absent: list[tuple[str, ...]] = field(default_factory=list)
    pinned: list[bool] = field(default_factory=list)

    def hold(self, changed: Callable[[ChainStep], ChainStep] = lambda step: step) -> DgxlabError | None:
        """Hold the chain."""
        runs = [RunStep(f"chain:0:{arm}", arm, "llama-bench", (arm,), {}, CELLS, attempts=2) for arm in ("one", "two")]
        step = changed(ChainStep("chain:0", *runs, cycles=4, drift_limit=0.05))
        arms = tuple(Arm(name, source(), {"GGML_CUDA": "OFF"}) for name in ("one", "two"))
        lease = SlowLease(self, Plan("J", "n", "e", arms, (step,), "ab"), [], (), lambda *told: None)
        journal = Journal(self.folder / "journal.jsonl")
        bench = Bench(self.folder, (), Thermometer(self), lambda note: None)  # type: ignore[arg-type]
        held = Scripted("J", journal, bench, lease, lambda argv, arm: [*argv, arm], lambda run: ("", ""), [])
        held.world = self
        try:
            return ChainRunner(step, held, lambda *told: None).carry_out()
        finally:
            lease.release()
            journal.close()

    @property
    def events(self) -> list[Event]:
        """The journal."""
        return list(read(self.folder / "journal.jsonl"))

    def of(self, kind: type[E]) -> list[E]:
        """Return the events of a kind."""
        return [event for event in self.events if isinstance(event, kind)]

    @property
    def places(self) -> list[str]:
        """What ran, in short: u1 u2 a0 b1 a1."""
        letters = {"burn-in": "u", "baseline": "a", "candidate": "b"}
        return [f"{letters[run.role or '']}{run.cycle}" for run in self.of(RunEvent)]


class SlowLease(DeviceLease):
    """A lease that some runs have to wait for."""

    def __init__(self, world: World, *args: Any) -> None:
        super().__init__(*args)
        self.world = world

    def hold(self) -> float:
        """Have the processor, as if after a while."""
        self.world.holds += 1
        return super().hold() + self.world.waits.get(self.world.holds, 0.0)


class Scripted(Runs):
    """Runs whose programs are not run."""

    world: World

    def launch(self, step: RunStep, name: str, absent: Sequence[str] = (), *, pin: bool = False) -> Attempt:
        """Return what the script says of this run."""
        self.world.pinned.append(pin)
        self.world.names.append(name)
        self.world.absent.append(tuple(absent))
        outcome = self.world.says(name)
        measured = zip(step.cells, outcome.values, strict=False)
        run = RunEvent(
            id=step.id,
            arm=step.arm,
            build_id=f"B-{step.arm}",
            tool=step.tool,
            model_id="",
            position=self._position,
            argv=(*step.argv, step.arm),
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


class Thermometer:
    """A temperature that no machine here has."""

    def __init__(self, world: World) -> None:
        self.world = world

    def start(self) -> None:
        """Begin."""

    def temperature(self) -> float | None:
        """Return that of the device."""
        return self.world.warm()

    def now(self) -> dict[str, dict[str, float]]:
        """Return what was sampled last."""
        seen = self.world.warm()
        return {} if seen is None else {"GPU-1": {"temperature.gpu": seen}, "GPU-2": {"temperature.gpu": seen - 2}}


def scripted(world: World, by_name: Mapping[str, Outcome]) -> World:
    world.says = lambda name: next(
        (outcome for pattern, outcome in by_name.items() if re.search(pattern, name)), Outcome()
    )
    return world
