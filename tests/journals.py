"""Journals as the agent writes them, in a few lines: for tests of whatever reads one, or reads the store."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from dgxlab.model import ARM, BASELINE, BURN_IN, CANDIDATE, PROTOCOL, Expectation, ParityGate, digest, events, to_json
from dgxlab.model.experiment import Experiment, SyntheticModel
from dgxlab.model.plan import Arm, Cell, ChainStep, CheckCommand, GateStep, Noise, Plan, RunStep, SeriesRef, Source
from dgxlab.model.reasons import sentence
from dgxlab.model.result import CellResult, Device, Facts, Measurement, Toolchain, build_id, model_id
from dgxlab.store import Store
from dgxlab.tools import BackendOpsBench, LlamaBench, PerplexityGate, judge_check

PIN = "e3a74b299085cd00013804f7fca2e03441b2da20"
TOOLCHAIN = Toolchain(cc="gcc 12.2.0", cxx="g++ 12.2.0", cmake="3.25.1", machine="x86_64 0123456789abcdef")
TINY = SyntheticModel()
CHECK = PerplexityGate("tiny", "tiny", env={"FAST": "1"}, against={"FAST": None}, kld_ratio_at_most=0.5)
T0 = 1_763_640_000.0
"""Unix seconds at which journals begin."""


def experiment(name: str = "toy", path: str = "/lab/toy.yaml") -> Experiment:
    return Experiment(
        name=name,
        pin=PIN,
        sources=("https://github.com/ggml-org/llama.cpp",),
        path=path,
        root="/lab",
        models={"tiny": TINY},
        gates=(ParityGate("MUL_MAT", "CPU"),),
        bench=(BackendOpsBench("MUL_MAT", "CPU", {"n": (1,)}), LlamaBench("tiny", (512,), (128,))),
    )


def source(series: Sequence[str] = (), tree: str = "", *, dirty: bool = False) -> Source:
    tree = tree or digest(["tree", *series], 40)
    refs = tuple(SeriesRef(name, digest(name)) for name in series)
    return Source(PIN, tree, digest(["commit", tree, *series], 40) if series else PIN, refs, dirty)


def arm(name: str = "toy", made_from: Source | None = None) -> Arm:
    return Arm(name, made_from or source(), {"GGML_CUDA": "OFF"}, targets=("llama-bench",))


def plan(job_id: str, arms: Sequence[Arm] = (), of: Experiment | None = None) -> Plan:
    """Return a plan without steps, which is all that the store needs of one."""
    of = of or experiment()
    return Plan(job_id, of.name, of.digest, tuple(arms) or (arm(),), steps=(), specs=(of.spec,))


def chain_step(
    number: int = 1,
    cells: Sequence[Cell] = (),
    *,
    candidate: str = "patched",
    cycles: int = 6,
    noise: Sequence[Noise] = (),
    screen: bool = False,
) -> ChainStep:
    """Return a chain of toy and a candidate, of one cell of llama-bench; it drifts by at most 5 %."""
    measured = tuple(cells) or (cell(),)
    steps = [
        RunStep(f"run:{number}:{name}", name, measured[0].tool, (measured[0].tool,), {}, measured, "tiny")
        for name in ("toy", candidate)
    ]
    return ChainStep(
        f"chain:{number}", *steps, 1 if screen else cycles, drift_limit=0.05, screen=screen, noise=tuple(noise)
    )


def session_plan(
    job_id: str, *chains: ChainStep, kind: str = "ab", dirty: bool = False, protocol: int = PROTOCOL
) -> Plan:
    """Return the plan of an A/B session: gates of every arm, the chains, the gates again."""
    arms = {"toy": arm(), "patched": arm("patched", source(["w4a16"], dirty=dirty))}
    names = dict.fromkeys(name for chain in chains for name in chain.arms)
    once = (CheckCommand(ARM, ("x",), {}),)
    before = [GateStep(f"gate:{n}", name, ParityGate("MUL_MAT", "CPU"), once) for n, name in enumerate(names)]
    after = [replace(gate, id=f"{gate.id}:after") for gate in before]
    of = experiment()
    return Plan(
        job_id=job_id,
        name=of.name,
        experiment=of.digest,
        arms=tuple(arms[name] for name in names),
        steps=(*before, *chains, *after),
        kind=kind,
        protocol=protocol,
        baseline=digest("the baseline's experiment"),
        specs=(of.spec,),
    )


def cell(n: int = 512) -> Cell:
    return Cell("llama-bench", f"pp{n}", {"n_prompt": n, "n_gen": 0}, {"repetitions": 5})


def facts(host_id: str = "host-a", hostname: str = "box") -> Facts:
    return Facts(host_id, hostname, f"boot-of-{host_id}", TOOLCHAIN, {"cpu": "a real one", "mem_total_mib": 7936})


def device(host_id: str = "host-a") -> str:
    """Return the id of what the toy builds compute on there: the processor."""
    return Device.of(to_json(facts(host_id)), {}).id


def env_digest(env: Mapping[str, str]) -> str:
    return digest(env, 16)


def read(path: Path) -> list[events.Event]:
    """Return the events of a journal, without a torn last line."""
    whole, _, _ = path.read_bytes().rpartition(b"\n")
    return [events.read(json.loads(line)) for line in whole.splitlines()]


def words(gate: Mapping[str, Any]) -> list[str]:
    """Return why a gate failed, given its line of a journal."""
    return [sentence(reason["code"], reason["params"]) for reason in gate["reasons"]]


class Journal:
    """Builds a journal event by event; every method returns the journal, so that calls chain.

    Attributes:
        events: What was written, in order.
    """

    def __init__(self, plan: Plan, host: Facts | None = None, t: float = T0) -> None:
        self.plan = plan
        self.host = host or facts()
        self.t = t
        self.events: list[dict[str, Any]] = []
        self._position = 0

    def add(self, event: str, changes: Mapping[str, Any] | None = None, /, **fields: Any) -> Journal:
        seq = len(self.events)
        self.events.append({"seq": seq, "t": self.t + seq, "event": event, **to_json({**fields, **(changes or {})})})
        return self

    def job(self) -> Journal:
        return self.add(
            "job",
            job_id=self.plan.job_id,
            plan_digest=self.plan.digest,
            protocol=self.plan.protocol,
            agent_version="0.1.0",
            boot_id=self.host.boot_id,
            facts=self.host,
        )

    def build(self, name: str = "toy", *, reused: bool = False, **changes: Any) -> Journal:
        arm = self.plan.arm(name)
        return self.add(
            "build",
            changes,
            arm=name,
            build_id=self.build_id(name),
            source=arm.source,
            cmake=arm.cmake,
            toolchain=self.host.toolchain,
            binaries={"llama-bench": digest("llama-bench")},
            libraries={"libggml.so": digest("libggml.so")},
            cmake_cache=digest("CMakeCache.txt"),
            log="raw/build.log",
            seconds=270.5,
            reused=reused,
            dirty=arm.source.dirty,
        )

    def model(self, **changes: Any) -> Journal:
        return self.add(
            "model",
            changes,
            name="tiny",
            model_id=model_id(TINY),
            path="/home/me/.dgxlab/models/tiny.gguf",
            size=1 << 20,
            digest=digest("tiny"),
            recipe=TINY,
            seconds=1.25,
            reused=False,
        )

    def _judged(self, event: str, changes: dict[str, Any], reasons: Sequence[str], **fields: Any) -> Journal:
        """A gate of an arm passed, or failed for these reasons."""
        name = str(changes.pop("arm", "toy"))
        status = "failed" if reasons else "passed"
        about = {"id": f"gate-{name}", "arm": name, "build_id": self.build_id(name), "env": {}, "seconds": 30.0}
        return self.add(event, {**about, "status": status, "reasons": reasons, **fields, **changes})

    def gate(self, passed: int = 1103, *, expect: Expectation | None = None, **changes: Any) -> Journal:
        """A parity gate was judged; of 1103 cases `passed` did."""
        clean = passed == 1103
        return self._judged(
            "gate",
            changes,
            [] if clean else [f"{passed} of 1103 cases passed"],
            gate=ParityGate("MUL_MAT", "CPU", expect),
            argv=["test-backend-ops", "test", "-o", "MUL_MAT", "-b", "CPU"],
            rc=0 if clean else 1,
            passed=passed,
            total=1103,
            unsupported=306,
            flaky=[],
            failed=[] if clean else ["type_a=q4_0,m=16,n=1,k=256"],
            raw={"stdout": raw("gate.out")},
        )

    def check(self, kld: float = 0.001, *, gate: PerplexityGate = CHECK, **changes: Any) -> Journal:
        """A perplexity gate was judged; against the other environment 0.5 times its KLD of 0.004 is allowed."""
        same = {"kld_error": 0.0, "ppl_ratio_error": 0.0}
        readings: dict[str, Any] = {
            "reference": {"ppl": 10.5, "ppl_error": 0.25},
            "arm": {"kld": kld, "ppl_ratio": 1.001, "same_top_p": 99.5, **same},
            "against": {"kld": 0.004, "ppl_ratio": 1.004, "same_top_p": 98.5, **same},
        }
        return self._judged(
            "check",
            changes,
            list(map(str, judge_check(gate, readings))),
            id="gate:1",
            kind=gate.name,
            gate=gate,
            inputs={"tiny": model_id(TINY)},
            env={"FAST": "1"},
            commands=[{"role": role, "argv": ["llama-perplexity"], "env": {}, "rc": 0} for role in readings],
            readings=readings,
            raw={f"{role} stdout": raw(f"gate-1-{role}.out") for role in readings},
        )

    def run(self, values: Mapping[int, Sequence[float]] | Sequence[float] = (9.5, 9.75), **changes: Any) -> Journal:
        """A llama-bench run that gave these values for pp512, or for each pp<n> by its n, after a cold one."""
        of = values if isinstance(values, Mapping) else {512: values}
        name = str(changes.pop("arm", "toy"))
        env = changes.pop("env", {"GGML_NO_BACKTRACE": "1"})
        position, self._position = self._position, self._position + 1
        return self.add(
            "run",
            changes,
            id=f"run-{position}",
            arm=name,
            build_id=self.build_id(name),
            tool="llama-bench",
            model_id=model_id(TINY),
            argv=["llama-bench", "-p", "512"],
            env=env,
            env_digest=env_digest(env),
            rc=0,
            signal=None,
            started=self.t + len(self.events),
            seconds=0.5,
            status="valid",
            reason="",
            position=position,
            results=[result(cell(n), samples) for n, samples in of.items()],
            cells={cell(n).key: cell(n) for n in of},
            before={"load": 0.25},
            after={"load": 0.5},
            raw={"stdout": raw("run.out"), "stderr": raw("run.err")},
        )

    def place(
        self, step: ChainStep, role: str, cycle: int, value: float | Sequence[float] | None, **changes: Any
    ) -> Journal:
        """A run of a chain that gave this value, or one a cell, as its median; None for one that crashed."""
        of = step.candidate if role == CANDIDATE else step.baseline
        fields: dict[str, Any] = {"chain": step.id, "role": role, "cycle": cycle, "arm": of.arm, "tool": of.tool}
        if value is None:
            fields |= {"status": "failed", "reason": "killed by signal 9", "rc": None, "signal": 9}
        values = value if isinstance(value, Sequence) else [value] * len(of.cells)
        measured = list(zip(of.cells, values, strict=True)) if value is not None else []
        fields["results"] = [result(cell, [0.5 * x, x, 1.5 * x]) for cell, x in measured if x is not None]
        fields["cells"] = {cell.key: cell for cell, _ in measured}
        return self.run(**{**fields, **changes})

    def chain(
        self,
        step: ChainStep,
        a: Sequence[float | Sequence[float] | None],
        b: Sequence[float | Sequence[float] | None],
        **changes: Any,
    ) -> Journal:
        """A chain that gave these values: two runs of burn-in, then a_0 b_1 a_1 and so on until one of them ends."""
        for cycle in (1, 2):
            self.place(step, BURN_IN, cycle, a[0], **changes)
            still = {"cycles": step.cycles, "done": 0, "total": 0, "valid": 0, "drift": None, "left_s": None}
            self.add("chain", id=step.id, state="burn-in", role=BURN_IN, cycle=cycle, **still, conditions={}, note="")
        for cycle, value in enumerate(a):
            self.place(step, BASELINE, cycle, value, **changes)
            if cycle < len(b):
                self.place(step, CANDIDATE, cycle + 1, b[cycle], **changes)
        return self

    def built(self) -> Journal:
        self.job()
        for arm in self.plan.arms:
            self.build(arm.name)
        return self.model()

    def gates(self, **failing: int) -> Journal:
        for arm in self.plan.arms:
            self.gate(failing.get(arm.name, 1103), arm=arm.name)
        return self

    def end(self, status: str = "done", exit_code: int = 0) -> Journal:
        return self.add("end", status=status, exit_code=exit_code)

    def build_id(self, name: str = "toy") -> str:
        arm = self.plan.arm(name)
        return build_id(arm.source, arm.cmake, self.host.toolchain)

    def lines(self) -> list[bytes]:
        return [json.dumps(event, separators=(",", ":")).encode() + b"\n" for event in self.events]

    def text(self) -> bytes:
        """Return the journal as the file that the agent leaves."""
        return b"".join(self.lines())


def result(of: Cell, samples: Sequence[float]) -> CellResult:
    """Return what a run says of a cell in its tool's metric; the cold repetition is half the first value."""
    metric, unit = ("time_us", "us") if of.tool == "backend-ops" else ("avg_ts", "t/s")
    cold = (samples[0] / 2,) if samples else ()
    measured = Measurement(of.key, metric, unit, tuple(samples), cold)
    return CellResult(of.key, (measured,), {**of.params, metric: samples[0] if samples else 0})


def raw(name: str) -> dict[str, Any]:
    return {"path": f"raw/{name}", "sha256": digest(name), "size": 100}


CLOCK = {"device": "GPU-1", "name": "clocks.sm", "unit": "MHz", "n": 3, "median": 1980.0, "min": 345.0, "max": 1980.0}
CAPPED = {"device": "GPU-1", "kind": "sw_power_cap", "hard": False, "reason": "SW power cap for 412 ms"}
THROTTLED = {"device": "GPU-1", "kind": "hw_thermal", "hard": True, "reason": "HW thermal slowdown for 2.1 s"}


def whole(job_id: str, runs: int = 2, samples: int = 3, host: Facts | None = None) -> Journal:
    """Return the journal of a job that went well: build, model, gate, `runs` runs of one cell, end."""
    journal = Journal(plan(job_id), host).job().build().model().gate()
    for number in range(runs):
        values = [9.0 + number + 0.125 * sample for sample in range(samples)]
        journal.run(values, telemetry=[CLOCK], flags=[CAPPED])
    return journal.end()


A = (100.0, 101.0, 100.0, 101.0, 100.0, 101.0, 100.0)
FASTER = (110.0, 111.0, 110.0, 111.0, 110.0, 111.0)
"""Candidates of A that are 9 to 10 % faster; a single claim needs five cycles that count."""


def compared(
    job_id: str, b: Sequence[float | None] = FASTER, a: Sequence[float | None] = A, *, host: Facts | None = None
) -> Journal:
    """Return the journal of an A/B session of one chain that went well."""
    step = chain_step()
    journal = Journal(session_plan(job_id, step), host).built().gates()
    return journal.chain(step, a, b, telemetry=[CLOCK]).gates().end()


def intend(store: Store, journal: Journal) -> None:
    store.intend(journal.plan, "local", "0.1.0")


TABLES = (
    *("experiments", "jobs", "devices", "arms", "inputs", "cells"),
    *("case_lists", "gates", "checks", "runs", "rows", "samples", "telemetry", "flags", "chain_runs", "verdicts"),
)
"""What journals fill."""

FROM_ELSEWHERE = ("imports",)
"""What was measured elsewhere."""


def told(event: events.Event) -> dict[str, Any]:
    """Return an event as plain JSON, with words beside the codes of a run."""
    words = {"reason": event.reason} if isinstance(event, events.RunEvent) else {}
    fields = {**to_json(event), "event": event.event, **words}
    flags = {"flags": [{**to_json(flag), "reason": flag.reason} for flag in getattr(event, "flags", ())]}
    return {**fields, **flags} if words else fields


def dump(store: Store, *, intent_times: bool = True) -> dict[str, list[dict[str, Any]]]:
    """Return all that a store holds, in an order that does not depend on how it came in."""
    tables = {}
    for table in (*TABLES, *FROM_ELSEWHERE, *(("seals",) if intent_times else ())):
        rows = store.rows(f"SELECT * FROM {table}")  # noqa: S608
        for row in rows:
            if not intent_times:
                row.pop("intent_at", None)
        tables[table] = sorted(rows, key=lambda row: json.dumps(row, sort_keys=True, default=repr))
    return tables
