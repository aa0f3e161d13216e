"""The report of a session of two arms: every verdict with its reasons, and nothing before the end."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from dgxlab.model import BASELINE, CANDIDATE, ChainStep, LlamaBench, to_json
from dgxlab.report import (
    ArmsTable,
    Quantity,
    SessionReport,
    SessionTable,
    asked,
    collect,
    collect_session,
    page,
    render,
)
from dgxlab.report.markdown import layout
from dgxlab.store import Store
from tests.journals import CAPPED, CLOCK
from tests.report.worlds import Session, h200, numbers, places, session_of_two

A, B = "20261120-103000-h200-a", "20261120-114500-h200-b"
STREAM = (LlamaBench("q4k", (512,), (32,), {"n_ubatch": (2048,)}),)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    """Give an empty record."""
    with Store.open(tmp_path / "results.db") as opened:
        yield opened


def by(effect: float, of: float = 1000.0) -> object:
    """Return what runs give whose candidate is so many times as fast."""

    def value(step: ChainStep, role: str, cycle: int) -> float:
        return of * (1 + 0.001 * (2 * cycle % 5)) * (effect if role == CANDIDATE else 1)

    return value


def held(store: Store, effect: float = 1.1, job_id: str = A, **changes: object) -> Session:
    """Hold a whole session on single stream."""
    session = session_of_two(store, job_id, **{"bench": STREAM, **changes}).build().gates()
    return session.chains(by(effect)).gates(after=True).end()


def verdicts(report: SessionReport) -> SessionTable:
    """Return the only table of verdicts."""
    (table,) = (table for table in report.tables if table.form == "verdicts")
    assert isinstance(table, SessionTable)
    return table


def test_numbers_are_in_the_json_twin(store: Store) -> None:
    """Texts for people, and beside them what they were made from; means know how many runs they are of."""
    held(store, noise=0.004)
    report = collect_session(store, A)
    twin = json.loads(json.dumps(to_json(report)))
    assert (twin["session"], twin["kind"], twin["ended"], twin["verdict"]) == (A, "ab", True, "faster")
    assert (twin["counts"], twin["summary"]) == ({"faster": 2}, "faster: 2 of 2 faster")
    row = twin["tables"][1]["rows"][0]
    assert (row["model"], row["test"], row["metric"], row["verdict"], row["promoted"]) == (
        *("q4k", "pp512", "avg_ts", "faster"),
        True,
    )
    baseline = {"mean": pytest.approx(1002.12, abs=0.01), "n": 5, "spread": pytest.approx(1.4826)}
    assert row["baseline"] == {"metric": "avg_ts", "unit": "t/s", **baseline}
    assert row["candidate"]["n"] == row["valid_cycles"] == row["run_cycles"] == 4
    assert row["effect"] == f"{row['effect_pct']:+.2f}"
    assert row["interval"] == f"{row['ci_low_pct']:+.2f} to {row['ci_high_pct']:+.2f}"
    assert row["noise_floor_pct"] == pytest.approx(0.4)
    assert twin["tables"][1]["candidate"]["experiment"] == "w4a16"
    assert [one["what"] for one in twin["differences"]] == ["series", "cmake", "env"]


def test_a_session_is_found_by_its_name_and_by_its_id(store: Store) -> None:
    """`stock-vs-w4a16` is the newest session of these two."""
    held(store)
    held(store, 0.9, B)
    assert render(collect(store, "h200-vs-w4a16")) == render(collect(store, job_id=B))
    assert collect_session(store, A).verdict == "faster"
    assert collect_session(store, B).verdict == "slower"


def test_what_is_known_of_an_arm_stands_beneath(store: Store) -> None:
    """Pin, series, tree and build of both; whoever built from a checkout is told so, and is not promoted."""
    held(store, noise=0.004, dirty=True)
    text = render(collect_session(store, A))
    assert "- candidate w4a16 · pin e3a74b299085 · series w4a16@" in text
    assert text.count("**dirty** tree") == 2
    assert "not promoted: w4a16 was built from a checkout that is no commit" in text


def test_an_unknown_noise_floor_promotes_nothing(store: Store) -> None:
    """The reason stands beside the verdict; the column has no number."""
    held(store)
    table = verdicts(collect_session(store, A))
    headers, _, body = layout(table)
    assert [row[headers.index("noise floor (%)")] for row in body] == ["\N{EN DASH}"] * 2
    assert [row[-2:] for row in body] == [["faster", "no"]] * 2
    said = {because.reasons[-1] for because in table.because}
    assert said == {"not promoted: the noise floor of this host is not known"}


def test_a_gate_that_fails_afterwards_makes_it_invalid(store: Store) -> None:
    """The table shows it before and after, the reason which arm, and no number is left."""
    session = session_of_two(store, A, bench=STREAM).build().gates().chains(by(1.1))
    session.gates(after=True, passed=1101, status="failed", reasons=["1101 of 1103"], failed=[]).end("failed", 5)
    report = collect_session(store, A)
    gates = [(row["arm"], row["when"], row["status"]) for row in report.tables[0].rows]
    assert gates == [
        ("h200", "before", "passed"),
        ("w4a16", "before", "passed"),
        ("h200", "after", "failed"),
        ("w4a16", "after", "failed"),
    ]
    assert (report.verdict, report.counts) == ("invalid", {"invalid": 2})
    assert all(row["effect"] is None and row["baseline"] is None for row in verdicts(report).rows)
    (because,) = verdicts(report).because
    assert "gate MUL_MAT on CUDA0 failed for w4a16 after the chains: 1101 of 1103" in because.reasons
    assert [(f.what, f.reason) for f in report.failures if f.what.startswith("gate")] == [
        ("gate MUL_MAT on CUDA0 of h200 after the chains", "1101 of 1103"),
        ("gate MUL_MAT on CUDA0 of w4a16 after the chains", "1101 of 1103"),
    ]


def test_nobody_is_shown_a_value_before_the_end(store: Store) -> None:
    """Not in the session's own report, and not in an experiment's for which the same runs would count."""
    session = session_of_two(store, A, bench=STREAM).build().gates()
    ordinary = Session(store, h200(bench=STREAM), B).build().gates().end()
    (chain,) = session.plan.chains
    for role, cycle in places(4):
        session.place(chain, role, cycle, 4242.0)
        session.save()
        shown = [collect_session(store, A), collect(store, "h200-vs-w4a16"), collect(store, "h200")]
        assert all("4242" not in json.dumps(to_json(report)) + render(report) for report in shown)
    assert collect_session(store, A).progress == ("chain:0 llama-bench q4k: 4 of 4 cycles",)
    assert collect_session(store, A).summary == ""
    session.gates(after=True).end()
    assert "4242" in render(collect_session(store, A))
    assert "| q4k | pp512 | 4242 ± 0 (5 runs) |" in render(collect(store, "h200"))
    assert ordinary.plan.kind == "run"


def test_a_run_of_a_chain_does_not_replace_one_of_an_ordinary_session(store: Store) -> None:
    """One of many, perhaps of another day: beside the other cells of that session it would bend a curve."""
    Session(store, h200(bench=STREAM), A).build().gates().runs(numbers(77.0)).end()
    held(store, job_id=B)
    table = next(table for table in collect(store, "h200").tables if table.form == "single-stream")
    assert table.provenance.sessions == (A,)
    assert {row["avg_ts"].median for row in table.rows} == {77.0}  # type: ignore[union-attr]


def of_h200(store: Store) -> ArmsTable:
    """Return what single stream shows of the baseline."""
    (table,) = page(store, asked({"form": "single-stream", "experiment": "h200"})).tables
    assert isinstance(table, ArmsTable)
    return table


def test_all_valid_runs_of_a_chains_arm_count_as_one(store: Store) -> None:
    """Each by its median; no burn-in, no failed run, none of another session or of the other arm."""
    held(store, effect=0.5, job_id=A)
    session = session_of_two(store, B, bench=STREAM).build().gates()
    (chain,) = session.plan.chains
    for role, cycle in places(4):
        session.place(
            chain, role, cycle, 5.0 if role == "burn-in" else 1000.0 + 10 * cycle + 5000 * (role == CANDIDATE)
        )
    session.place(chain, BASELINE, 4, None)
    session.gates(after=True).end()
    table = of_h200(store)
    assert table.rows[0]["pp512"] == Quantity("avg_ts", "t/s", 1020.0, 5, pytest.approx(14.826), "runs")
    assert table.provenance.sessions == (B,)


def test_both_arms_of_an_aa_session_are_one(store: Store) -> None:
    """They are the same build, so that all of its runs count."""
    session = session_of_two(store, A, kind="noise", bench=STREAM).build().gates()
    session.chains(lambda step, role, cycle: 1000.0 + cycle).gates(after=True).end()
    numbers = [of_h200(store).rows[0][test] for test in ("pp512", "tg32")]
    assert {(number.n, number.of) for number in numbers} == {(9, "runs")}  # type: ignore[union-attr]


def test_what_speaks_against_runs_of_a_chain_is_said_once(store: Store) -> None:
    """With how many of them it was; temperatures are of all of them."""
    session = session_of_two(store, A, bench=STREAM).build().gates()
    (chain,) = session.plan.chains
    for role, cycle in places(4):
        capped = [{**CAPPED, "reason": f"SW power cap for {100 + cycle} ms"}] if cycle in (1, 3) else []
        clock = {**CLOCK, "median": 1900.0 + cycle}
        session.place(chain, role, cycle, 1000.0, telemetry=[clock], flags=capped)
    session.gates(after=True).end()
    table = of_h200(store)
    assert [flag.reason for flag in table.flags] == ["in 2 of 5 runs SW power cap for 101 ms, and 1 like it"]
    assert table.origins[0].conditions["clocks.sm"] == (1900.0, 1904.0)


def test_settings_that_differ_are_named(store: Store) -> None:
    """From the plan alone: the flag with its value, and what only one arm has."""
    session = session_of_two(store, A, bench=STREAM, candidate={"bench": (with_ubatch(512),)}).build().save()
    found = {(one.what, one.name): (one.baseline, one.candidate) for one in collect_session(store, A).differences}
    assert found["arguments", "chain:0 llama-bench"] == ("-ub 2048", "-ub 512")
    assert found["env", "GGML_CUDA_W4A16"] == ("-", "1")
    assert session.plan.kind == "ab"


def test_a_session_that_never_got_anywhere_says_so(store: Store) -> None:
    """It was recorded, and the host was never reached."""
    session_of_two(store, A, bench=STREAM)
    report = collect_session(store, A)
    assert (report.ended, report.progress) == (False, ("chain:0 llama-bench q4k: not begun",))
    assert "recorded, and nothing has been heard from the host yet" in render(report)


def with_ubatch(size: int) -> LlamaBench:
    """Return the single-stream entry with another setting."""
    return LlamaBench("q4k", (512,), (32,), {"n_ubatch": (size,)})
