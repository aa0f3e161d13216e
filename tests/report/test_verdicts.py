"""The report of a session of two arms: every verdict with its reasons, and nothing before the end."""

import json
import re
from dataclasses import replace

import pytest

from dgxlab import judgement, stats
from dgxlab import plan as planning
from dgxlab.errors import UsageError
from dgxlab.model import BASELINE, BURN_IN, CANDIDATE, ChainStep, EngagedGate, digest, to_json
from dgxlab.model import Session as SessionSpec
from dgxlab.report import (
    Number,
    SessionReport,
    Table,
    collect,
    collect_fleet_sessions,
    collect_job,
    collect_session,
    collect_sweep_sessions,
    overview,
    page,
    query,
    render,
    render_page,
    sessions,
)
from dgxlab.report.cells import OUTCOME, layout
from dgxlab.store import Store
from dgxlab.tools import BatchedBench, LlamaBench, ServeBench
from tests.journals import CAPPED, CLOCK, THROTTLED, source
from tests.report.worlds import CYCLES, H200, RECIPE, Session, h200, numbers, places, session_of_two

A, B = "20261120-103000-h200-a", "20261120-114500-h200-b"
STREAM = (LlamaBench("q4k", (512,), (32,), {"n_ubatch": (2048,)}),)


def by(effect: float, of: float = 1000.0) -> object:
    """Return what runs give whose candidate is so many times as fast."""

    def value(step: ChainStep, role: str, cycle: int) -> float:
        return of * (1 + 0.001 * (2 * cycle % 5)) * (effect if role == CANDIDATE else 1)

    return value


def held(store: Store, effect: float = 1.1, job_id: str = A, **changes: object) -> Session:
    session = session_of_two(store, job_id, **{"bench": STREAM, **changes}).build().gates()
    return session.chains(by(effect)).gates(after=True).end()


def verdicts(report: SessionReport, title: str = "") -> Table:
    tables = [table for table in report.tables if table.kind == "session" and table.form == "verdicts"]
    (table,) = (table for table in tables if table.title.startswith(title))
    return table


def flat(page: str) -> str:
    return " ".join(page.split())


def test_numbers_are_in_the_json_twin(store: Store) -> None:
    held(store)
    report = collect_session(store, A)
    twin = json.loads(json.dumps(to_json(report)))
    assert (twin["session"], twin["kind"], twin["ended"], twin["verdict"]) == (A, "ab", True, "faster")
    assert (twin["counts"], twin["summary"]) == ({"faster": 2}, "faster: 2 of 2 faster")
    row = twin["tables"][1]["rows"][0]
    assert (row["model"], row["test"], row["metric"]) == ("q4k", "pp512", "avg_ts")
    assert (row["verdict"], row["promoted"]) == ("faster", True)
    baseline = {"mean": pytest.approx(1002.05, abs=0.01), "n": 10, "spread": pytest.approx(1.4826)}
    assert row["baseline"] == {"metric": "avg_ts", "unit": "t/s", **baseline}
    assert row["candidate"]["n"] == row["valid_cycles"] == row["run_cycles"] == CYCLES
    assert row["effect"] == f"{row['effect_pct']:+.2f}"
    assert row["interval"] == f"{row['ci_low_pct']:+.2f} to {row['ci_high_pct']:+.2f}"
    assert row["same"] is None
    assert row["ci_low_pct"] < row["same_low_pct"] < row["effect_pct"] < row["same_high_pct"] < row["ci_high_pct"]
    assert row["noise_floor_pct"] == pytest.approx(0.34, abs=0.01)
    assert twin["tables"][1]["candidate"]["experiment"] == "w4a16"
    assert [each["what"] for each in twin["differences"]] == ["series", "cmake", "env"]


def test_a_marker_is_shown_as_missing_where_the_runs_of_one_model_lacked_it(store: Store) -> None:
    """The baseline need not print it, and has no row."""
    bench = [LlamaBench(model, (512,), ()) for model in ("q4k", "q40")]
    models = {"q4k": RECIPE, "q40": replace(RECIPE, quant="Q4_0")}
    candidate = {"gates": (EngagedGate("w4a16: on"),)}
    session = session_of_two(store, A, bench=bench, gates=(), models=models, candidate=candidate).build()
    why = "the path under test did not run: 'w4a16: on' is not on llama-bench's stderr"
    for chain, lacking in zip(session.plan.chains, ({}, {"status": "discarded", "reason": why}), strict=True):
        for role, cycle in places(2):
            session.place(chain, role, cycle, 1000.0, **(lacking if role == CANDIDATE else {}))
    session.end("failed", 10)
    (row,) = collect_session(store, A).tables[0].rows
    assert (row["arm"], row["gate"], row["status"], row["found"]) == ("w4a16", "engaged", "failed", why)


def test_a_session_is_found_by_its_name_and_by_its_id(store: Store) -> None:
    held(store)
    held(store, 0.9, B)
    assert render(collect(store, "h200-vs-w4a16")) == render(collect_job(store, B))
    assert collect_session(store, A).verdict == "faster"
    assert collect_session(store, B).verdict == "slower"


def test_a_rejected_session_says_so_and_has_no_tables(store: Store) -> None:
    held(store)
    store.put("rejections", {"job_id": A, "reason": "hot", "at": 0.0})
    report = collect_session(store, A)
    assert (report.summary, report.tables) == ("rejected: hot", ())
    assert "**rejected: hot**" in render(report)


def test_what_decides_is_in_the_table(store: Store) -> None:
    held(store, 1.002)
    table = verdicts(collect_session(store, A))
    headers, _, body = layout(table)
    for row, numbers_of in zip(body, table.rows, strict=True):
        low, high = (float(bound) for bound in row[headers.index("interval (%)")].split(" to "))
        assert -1 < low < high < 1
        assert [low, high] == pytest.approx([numbers_of["same_low_pct"], numbers_of["same_high_pct"]], abs=0.005)
        assert row[headers.index("noise floor (%)")] == "0.34"
        assert [row[headers.index(name)] for name in ("verdict", "promoted")] == ["same", "no"]
    held(store, 1.008, B)
    table = verdicts(collect_session(store, B))
    assert "equivalence interval (%)" not in layout(table)[0]
    assert not any(row["promoted"] for row in table.rows)


def test_how_chains_were_measured_is_listed(store: Store) -> None:
    changes = {"session": SessionSpec(pin=True, block_minutes=10.0)}
    session = session_of_two(store, A, bench=STREAM, **changes).build().gates()
    (chain,) = session.plan.chains
    for role, cycle in [*((BURN_IN, n) for n in range(1, 9)), *places(8)[2:]]:
        session.place(chain, role, cycle, 1000.0 + cycle % 3, before={"pinned": [0, 2]})
    session.gates(after=True).end()
    table = verdicts(collect_session(store, A))
    assert [row["cycles"] for row in table.rows] == ["8 of 8"] * 2
    held_so = "cycles planned for an effect of 2 %, arms each at its own temperature, thermal hot, drift limit 5 %"
    assert f"- protocol 3, {held_so}, pinned to processors 0,2 " in flat(render(collect_session(store, A)))


def test_an_older_verdict_is_marked_beside_newer_ones(store: Store) -> None:
    held(store, 1.1, A, protocol=2)
    held(store, 1.1, B)
    assert verdicts(collect_session(store, A)).protocol["protocol"] == 2
    (pair,) = (table for table in collect_session(store, B).tables if table.kind == "arms")
    assert [column.label for column in pair.columns] == ["cell", "session 1 (protocol 2)", "session 2, this one"]
    (latest,) = (table for table in overview(store).tables if table.title == "Verdicts")
    assert [str(row["verdict"]).endswith(" (protocol 2)") for row in latest.rows] == [False, True]
    held(store, 1.1, "20261120-195900-h200-c", protocol=2)
    of_steps = {"form": "steps", "experiment": "w4a16"}
    for words, against in (
        ({"form": "levers"}, " against h200"),
        (of_steps, " against h200"),
        ({**of_steps, "baseline": "h200"}, ""),  # the table names it
    ):
        (table,) = page(store, query(words)).tables
        assert [row["verdict"] for row in table.rows if row.get("verdict")] == [f"faster (protocol 2){against}"]


def test_what_others_were_compared_with_was_measured(store: Store) -> None:
    held(store)
    (table,) = page(store, query({"form": "levers"})).tables
    shown = [(row["lever"], row["status"], row["session"]) for row in table.rows]
    assert shown == [("w4a16", "promoted", A), ("h200", "measured", A)]


def test_a_gate_that_fails_afterwards_makes_it_invalid(store: Store) -> None:
    session = session_of_two(store, A, bench=STREAM).build().gates().chains(by(1.1))
    session.gates(after=True, passed=1101, status="failed", reasons=["1101 of 1103"], failed=[]).end("failed", 5)
    report = collect_session(store, A)
    gates = [(row["arm"], row["when"], row["status"]) for row in report.tables[0].rows]
    places = (("before", "passed"), ("after", "failed"))
    assert gates == [(arm, *place) for place in places for arm in ("h200", "w4a16")]
    assert (report.verdict, report.counts) == ("invalid", {"invalid": 2})
    assert all(row["effect"] is None and row["baseline"] is None for row in verdicts(report).rows)
    (because,) = verdicts(report).because
    assert "gate MUL_MAT on CUDA0 failed for w4a16 after the chains: 1101 of 1103" in because.reasons
    assert [(f.what, f.reason) for f in report.failures if f.what.startswith("gate")] == [
        (f"gate MUL_MAT on CUDA0 of {arm} after the chains", "1101 of 1103") for arm in ("h200", "w4a16")
    ]
    with pytest.raises(UsageError, match="h200 has nothing measured"):
        of_h200(store)
    (run, *_) = store.rows("SELECT runs.*, device_id FROM runs JOIN arms USING (job_id, arm) WHERE status = 'valid'")
    wanted = [(cell.key, run["model_id"], run["env_digest"]) for cell in next(session.plan.chains).baseline.cells]
    assert store.up_to_date(run["build_id"], run["device_id"], wanted) == set()
    held(store, job_id=B)
    assert store.up_to_date(run["build_id"], run["device_id"], wanted) == set(wanted)


def test_no_value_is_shown_before_the_end(store: Store) -> None:
    session = session_of_two(store, A, bench=STREAM).build().gates()
    Session(store, h200(bench=STREAM), B).build().gates().end()
    (chain,) = session.plan.chains
    for role, cycle in places(CYCLES):
        session.place(chain, role, cycle, 4242.0)
        session.save()
        shown = [collect_session(store, A), collect(store, "h200-vs-w4a16"), collect(store, "h200")]
        assert all("4242" not in json.dumps(to_json(report)) + render(report) for report in shown)
    assert collect_session(store, A).progress == ("chain:0 llama-bench q4k: 9 of 9 cycles",)
    assert collect_session(store, A).summary == ""
    session.gates(after=True).end()
    assert "4242" in render(collect_session(store, A))
    assert "| pp512 | 4242 ± 0 (10) |" in render(collect(store, "h200"))


def test_a_run_of_a_chain_does_not_replace_one_of_an_ordinary_session(store: Store) -> None:
    Session(store, h200(bench=STREAM), A).build().gates().runs(numbers(77.0)).end()
    held(store, job_id=B)
    table = next(table for table in collect(store, "h200").tables if table.form == "single-stream")
    assert table.provenance.sessions == (A,)
    assert {row["avg_ts"].median for row in table.rows} == {77.0}  # type: ignore[union-attr]


def of_h200(store: Store) -> Table:
    (table,) = page(store, query({"form": "single-stream", "experiment": "h200"})).tables
    assert table.kind == "arms"
    return table


def test_an_arm_of_a_chain_has_one_number(store: Store) -> None:
    held(store, effect=0.5, job_id=A)
    session = session_of_two(store, B, bench=(*STREAM, h200().bench[0])).build().gates()
    for chain in session.plan.chains:
        for role, cycle in places(CYCLES + 1):
            last = (role, cycle) == (BASELINE, CYCLES + 1)
            burnt = 0.1 if role == "burn-in" else 1.0
            flags = [THROTTLED] if last else []
            value = burnt * (1.3 if last else 1.0) * (1000.0 + 10 * cycle) * (6 if role == CANDIDATE else 1)
            session.place(chain, role, cycle, value, flags=flags)
    session.gates(after=True).end()
    judged = {str(row["test"]): row for row in verdicts(collect_session(store, B), "Single").rows if "test" in row}
    assert judged["pp512"]["cycles"] == "9 of 10"
    table = of_h200(store)
    for test in ("pp512", "tg32"):
        assert table.rows[0][test] == judged[test]["baseline"]
    assert table.rows[0]["pp512"] == Number(
        "avg_ts", "t/s", 10, pytest.approx(37.065), mean=pytest.approx(1044.669, abs=0.001)
    )
    assert table.provenance.sessions == (B,)
    words = {"form": "steps", "experiment": "w4a16", "baseline": "h200", "cells": "pp512, tg32"}
    (steps,) = page(store, query(words)).tables
    keys = {column.label: column.key for column in steps.columns}
    for row, arm in zip(steps.rows, ("baseline", "candidate"), strict=True):
        assert {test: row[keys[test]] for test in judged} == {test: judged[test][arm] for test in judged}


def test_a_step_has_the_numbers_that_its_verdict_is_on(store: Store) -> None:
    held(store)
    changes = {"cmake": {**h200().cmake, "GGML_CUDA_FA": "OFF"}, "env": {"GGML_CUDA_W4A16": "1"}}
    alone = h200(name="w4a16", series=("w4a16",), bench=STREAM, **changes)
    Session(store, alone, B, tree=source(["w4a16"])).build().gates().runs(numbers(77.0)).end()
    words = {"form": "steps", "experiment": "w4a16", "baseline": "h200", "cells": "pp512"}
    row = page(store, query(words)).tables[0].rows[1]
    assert (row["ratio"], row["verdict"], row["verdict_session"]) == ("1.10x (A/B)", "faster", A)
    assert row["verdict_elsewhere"] is False
    assert "| w4a16 | 1102 ± 2 (9) |" in render_page(page(store, query(words)))
    newer = h200(name="w4a16", series=("w4a16",), bench=STREAM, **changes, hypothesis="again")
    job = "20261120-195900-h200-c"
    Session(store, newer, job, tree=source(["w4a16"], "f" * 40)).build().gates().runs(numbers(88.0)).end()
    row = page(store, query(words)).tables[0].rows[1]
    assert (row["ratio"], row["verdict"], row["verdict_elsewhere"]) == ("1.10x (A/B)", "faster", True)
    assert "| w4a16 | 88.0 |" in render_page(page(store, query(words)))


def test_an_aa_session_gives_its_baselines_number(store: Store) -> None:
    session = session_of_two(store, A, kind="noise", bench=STREAM).build().gates()
    session.chains(lambda step, role, cycle: 1000.0 + cycle).gates(after=True).end()
    report = collect_session(store, A)
    rows = {str(row["test"]): row["baseline"] for row in verdicts(report).rows}
    assert {test: of_h200(store).rows[0][test] for test in rows} == rows
    for row, judged in zip(verdicts(report).rows, judgement.recorded(store, A), strict=True):
        percent = [100 * (share or 0) for share in (stats.sigma(judged.verdict), judged.verdict.noise)]
        assert [row["noise_pct"], row["noise_floor_pct"]] == percent
        assert percent[0] < percent[1]
        assert report.summary.endswith("; noise {:.2f} %; noise floor {:.2f} %".format(*percent))
        word, outcome = judged.verdict.verdict, OUTCOME.match(str(row["verdict"]))
        assert (row["verdict"], outcome and outcome[1]) == (f"{word} (A/A)", word)


def test_an_ab_of_an_arm_and_itself_is_called_an_aa(store: Store) -> None:
    stock = h200(bench=STREAM, session=SessionSpec(cycles=CYCLES))
    session = Session(store, stock, A, plan=planning.make_ab(stock, stock, (source(), source()), job_id=A))
    assert collect_session(store, A).title.endswith(": A/A of h200 against itself")
    session.build().gates().chains(by(1.0)).gates(after=True).end()
    report, word = collect_session(store, A), "same (A/A): 2 of 2 same"
    assert (report.kind, report.summary.partition(";")[0]) == ("noise", word)
    assert {row["verdict"] for row in verdicts(report).rows} == {"same (A/A)"}
    assert [(row["kind"], row["verdict"]) for row in sessions(store, kind="noise")] == [("noise", word)]
    assert sessions(store, kind="ab") == []
    tables = {table.title: table.rows for table in overview(store).tables}
    assert [row["kind"] for row in tables["Sessions"]] == ["A/A"]
    assert [row["verdict"] for row in tables["Verdicts"]] == [word]


def test_an_arm_that_differs_in_name_alone_has_its_own_number(store: Store) -> None:
    stock = h200(bench=STREAM, session=SessionSpec(cycles=CYCLES))
    twin = replace(stock, name="twin")
    plan = planning.make_ab(stock, twin, (source(), source()), job_id=A)
    Session(store, twin, A, plan=plan).build().gates().chains(by(1.1)).gates(after=True).end()
    judged = {str(row["test"]): row for row in verdicts(collect_session(store, A)).rows}
    for name, arm in (("h200", "baseline"), ("twin", "candidate")):
        (table,) = page(store, query({"form": "single-stream", "experiment": name})).tables
        assert {test: table.rows[0][test] for test in judged} == {test: judged[test][arm] for test in judged}


def test_what_both_arms_share_and_what_differs(store: Store) -> None:
    candidate = {"env": {"SAME": "1", "GGML_CUDA_W4A16": ""}, "bench": (with_ubatch(512),)}
    env = {"SAME": "1", "GGML_CUDA_W4A16": "0", "ONLY": "x"}
    session = session_of_two(store, A, bench=STREAM, env=env, candidate=candidate).build().gates()
    session.chains(by(1.1)).gates(after=True).end()
    report = collect_session(store, A)
    line = (
        "both arms: model q4k, env SAME=1 · baseline n_ubatch=2048, candidate n_ubatch=512; "
        'baseline GGML_CUDA_W4A16=0, candidate GGML_CUDA_W4A16=""; baseline ONLY=x, candidate ONLY unset · '
    )
    assert line in flat(render(report))
    assert line in flat(render_page(page(store, query({"form": "verdicts", "session": A}))))
    twin = json.loads(json.dumps(to_json(report)))["tables"][1]
    assert twin["settings"] == {"env": "SAME=1"}
    differ = {"n_ubatch": [2048, 512], "GGML_CUDA_W4A16": ["0", ""], "ONLY": ["x", None]}
    assert twin["differ"] == differ


def test_a_row_says_what_differs_in_it_alone(store: Store) -> None:
    first = LlamaBench("q4k", (512,), (), {"n_ubatch": (2048,)})
    second = LlamaBench("q4k", (1024,), (), {"n_ubatch": (2048,)})
    entries = (first, replace(second, env={"M": "8"}))
    candidate = {"env": {}, "bench": entries}
    session = session_of_two(store, A, bench=(first, second), candidate=candidate).build().gates()
    session.chains(by(1.1)).gates(after=True).end()
    table = verdicts(collect_session(store, A))
    assert [(row["test"], row["M"]) for row in table.rows] == [
        ("pp512", None),
        ("pp1024", "baseline M unset, candidate M=8"),
    ]
    assert (table.settings, table.differ) == ({"n_ubatch": 2048}, {})


OTHER = replace(H200, details={"gpus": [{"name": "NVIDIA H200", "uuid": "GPU-2222222222"}]})
OF_W4A16 = (
    {"form": "verdicts", "experiment": "w4a16"},
    {"form": "steps", "experiment": "w4a16", "baseline": "h200", "cells": "pp512"},
    {"form": "levers"},
)


@pytest.mark.parametrize(
    ("far", "ends", "why"),
    [
        ("", ("cancelled", 130), "the chain was not begun"),
        ("built", ("failed", 8), "the chain was not begun"),
        ("run", ("failed", 8), "the chain was cut after 1 of 9 cycles: runs before and after a gap are not joined"),
    ],
)
def test_an_invalid_rerun_does_not_replace_a_verdict(store: Store, far: str, ends: tuple[str, int], why: str) -> None:
    held(store)
    newer = session_of_two(store, B, bench=STREAM)
    if far:
        newer.build()
    for place in places(1) if far == "run" else ():
        newer.place(next(newer.plan.chains), *place, 1000.0)
    newer.end(*ends)
    judged, step, lever = (page(store, query(words)) for words in OF_W4A16)
    assert judged.summary.startswith("faster: 2 of 2 faster")
    assert (step.tables[0].rows[1]["verdict"], step.tables[0].rows[1]["verdict_session"]) == ("faster", A)
    assert [lever.tables[0].rows[0][name] for name in ("status", "session")] == ["promoted", A]
    for shown, note in ((judged, ""), (step, "w4a16: "), (lever, "w4a16: ")):
        text = f"{note}a newer session {B[-6:]} of the same is invalid: {why}"
        assert shown.tables[-1].notes[-1] == text
        assert text in flat(render_page(shown))


@pytest.mark.parametrize("kind", ["ab", "noise"])
def test_an_invalid_a_a_does_not_replace_a_verdict_of_the_same(store: Store, kind: str) -> None:
    """An A/B of an experiment against itself compares the same."""
    stock = h200(session=SessionSpec(cycles=CYCLES), bench=STREAM)
    plan = planning.make_ab(stock, stock, (source(), source()), job_id=A, kind=kind)
    Session(store, stock, A, host=H200, plan=plan).build().gates().chains(by(1.0)).gates(after=True).end()
    session_of_two(store, B, bench=STREAM, kind="noise").build().end("cancelled", 130)
    shown = page(store, query({"form": "verdicts", "experiment": "h200"}))
    assert "2 of 2 same" in shown.summary
    assert shown.tables[-1].notes == (f"a newer session {B[-6:]} of the same is invalid: the chain was not begun",)


@pytest.mark.parametrize("what", ["gate", "env", "device", "protocol", "kind", "compiler", "file"])
def test_what_is_invalid_and_new_is_shown(store: Store, what: str) -> None:
    """A gate that failed, and a session that compares something else."""
    held(store)
    changes = {
        "env": {"candidate": {"env": {"GGML_CUDA_W4A16": "2"}}},
        "device": {"host": OTHER},
        "protocol": {"protocol": 2},
        "kind": {"kind": "screen"},
        "compiler": {"host": replace(H200, toolchain=replace(H200.toolchain, cc="gcc (GCC) 99"))},
    }
    model = {"model_id": digest("a new file at its path")} if what == "file" else {}
    newer = session_of_two(store, B, bench=STREAM, **changes.get(what, {})).build(**model)
    if what == "gate":
        newer.gates(passed=1101, status="failed", reasons=["1101 of 1103"], failed=[])
    newer.end("cancelled", 130)
    judged, _, lever = (page(store, query(words)) for words in OF_W4A16)
    assert "2 of 2 invalid" in judged.summary
    assert lever.tables[0].rows[0]["session"] == B


def test_cells_of_one_name_are_told_apart(store: Store) -> None:
    """Two entries of a tool, and one of another, whose cells have the same name."""
    sizes = ("q4k", (128,), (64,), (8,))
    bench = (
        *(BatchedBench(*sizes, {"n_ubatch": (n,)}) for n in (512, 2048)),
        ServeBench(*sizes, axes={"n_ubatch": (512,)}),
    )

    def value(step: ChainStep, role: str, cycle: int) -> float:
        return by({"chain:0": 1.1, "chain:1": 1.2, "chain:2": 1.4}[step.id])(step, role, cycle)

    for job in (A, B):
        session = session_of_two(store, job, bench=bench, host=H200 if job == A else OTHER)
        session.build().gates().chains(value).gates(after=True).end()
    wanted = {
        "q4k pp128 tg64 B8 S_TG batched-bench n_ubatch=512": 10,
        "q4k pp128 tg64 B8 S_TG batched-bench n_ubatch=2048": 20,
        "q4k pp128 tg64 B8 S_TG serve": 40,
    }
    (pair,) = (table for table in collect_session(store, B).tables if table.kind == "arms")
    effects = {row["cell"]: row["effect_pct.1"] for row in pair.rows if " S_TG" in str(row["cell"])}
    assert effects == {name: pytest.approx(effect, abs=0.1) for name, effect in wanted.items()}
    (row, _) = collect_sweep_sessions(store, [A, B]).tables[0].rows
    assert {name: round(float(str(row[name]).split()[0])) for name in wanted} == wanted
    pooled, devices = collect_fleet_sessions(store, {"a": A, "b": B}).tables
    assert {row["cell"] for row in pooled.rows} >= wanted.keys()
    assert {name: round(float(str(devices.rows[0][name]).split()[0])) for name in wanted} == wanted


def test_every_session_of_a_pair_is_shown(store: Store) -> None:
    jobs = (A, B, "20261120-195900-h200-c")
    held(store, 1.1, jobs[0])
    held(store, 1.2, jobs[1], host=OTHER)
    held(store, 0.9, jobs[2])
    held(store, 2.0, "20261120-205900-h200-d", candidate={"name": "unrelated"})
    held(store, 1.3, "20261120-215900-h200-e", kind="screen", noise=0.004)
    invalid = session_of_two(store, "20261120-235900-h200-z", bench=STREAM).build().gates().chains(by(1.1))
    invalid.gates(after=True, passed=1101, status="failed", reasons=["1101 of 1103"], failed=[]).end("failed", 5)
    report = collect_session(store, B)
    assert report.summary == "faster: 2 of 2 faster; session 2 of 4 of this pair"
    (table,) = (table for table in report.tables if table.kind == "arms")
    assert [column.label for column in table.columns] == ["cell", "session 1", "session 2, this one", "session 3"]
    row = table.rows[0]
    assert row["cell"] == "q4k pp512"
    assert [row[f"effect_pct.{number}"] for number in (1, 2, 3)] == [pytest.approx(e, abs=0.1) for e in (10, 20, -10)]
    assert re.fullmatch(r"\+10\.\d\d \(\+\d\.\d\d to \+1\d\.\d\d\) faster", str(row["effect.1"]))
    assert str(row["effect.3"]).endswith(" slower")
    assert [origin.provenance.sessions for origin in table.origins] == [(jobs[0],), (jobs[2],)]
    assert table.notes[0].endswith("; sessions without one are left out: 1")
    assert "NVIDIA H200 GPU-22222222" in table.provenance.host
    shown = render_page(page(store, query({"form": "verdicts", "session": B})))
    assert shown.startswith(f"**{report.summary}**")
    assert "| cell | session 1 | session 2, this one | session 3 |" in shown
    held(store, 1.2, "20261120-225900-h200-f", kind="screen", noise=0.004)
    (screens,) = (t for t in collect_session(store, "20261120-225900-h200-f").tables if t.kind == "arms")
    assert [str(screens.rows[0][f"effect.{number}"])[-8:] for number in (1, 2)] == ["(screen)"] * 2
    alone = collect_session(store, "20261120-205900-h200-d")
    assert (alone.summary, [table for table in alone.tables if table.kind == "arms"]) == ("faster: 2 of 2 faster", [])


def test_flags_of_a_chain_are_listed_once(store: Store) -> None:
    session = session_of_two(store, A, bench=STREAM).build().gates()
    (chain,) = session.plan.chains
    for role, cycle in places(CYCLES):
        capped = [{**CAPPED, "reason": f"SW power cap for {100 + cycle} ms"}] if cycle in (1, 3) else []
        clock = {**CLOCK, "median": 1900.0 + cycle}
        session.place(chain, role, cycle, 1000.0 + 200.0 * (cycle % 2), telemetry=[clock], flags=capped)
    session.gates(after=True).end()
    table = of_h200(store)
    cap, spread = table.flags
    assert (cap.reason, cap.sessions) == ("in 2 of 10 runs SW power cap for 101 ms, and 1 like it", (A,))
    assert (spread.reason[:12], spread.sessions) == ("the MAD is a", ())  # its session's report has an interval
    shown = render_page(page(store, query({"form": "single-stream", "experiment": "h200"})))
    assert "- flag in h200: the MAD is above" in flat(shown)  # no other report has it
    assert f"\n1 flag: see dgxlab report {A[-6:]} --wide\n" in shown
    assert table.origins[0].conditions["clocks.sm"] == (1900.0, 1909.0)


def test_a_hard_event_in_every_run_of_the_cycles_is_not_said_of_the_burn_in(store: Store) -> None:
    session = session_of_two(store, A, bench=STREAM).build().gates()
    (chain,) = session.plan.chains
    for role, cycle in places(CYCLES):
        session.place(chain, role, cycle, 1000.0, flags=[] if role == BURN_IN else [THROTTLED])
    session.gates(after=True).end()
    hard = f"- **hard event** in every run after the burn-in: {THROTTLED['reason']}"
    assert hard in flat(render(collect_session(store, A)))


@pytest.mark.parametrize("flags", [[], [THROTTLED]])
def test_a_run_of_a_chain_counted_later_only_without_a_hard_event(store: Store, flags: list[object]) -> None:
    session = session_of_two(store, A, bench=STREAM).build().gates()
    (chain,) = session.plan.chains
    for role, cycle in places(CYCLES):
        if (role, cycle) == (CANDIDATE, 2):
            session.place(chain, role, cycle, None)
        session.place(chain, role, cycle, 1000.0, flags=flags)
    session.gates(after=True).end()
    (failure,) = collect_session(store, A).failures
    assert (failure.what, failure.again) == ("chain:0 llama-bench: candidate 2", not flags)


def test_settings_that_differ_are_named(store: Store) -> None:
    session_of_two(store, A, bench=STREAM, candidate={"bench": (with_ubatch(512),)}).build().save()
    differ = {(each.what, each.name): (each.baseline, each.candidate) for each in collect_session(store, A).differences}
    assert differ["arguments", "chain:0 llama-bench"] == ("-ub 2048", "-ub 512")
    assert differ["env", "GGML_CUDA_W4A16"] == ("-", "1")


def with_ubatch(size: int) -> LlamaBench:
    return LlamaBench("q4k", (512,), (32,), {"n_ubatch": (size,)})
