"""When a chain is over: the same answer for the agent that holds it and the client that judges it."""

from dataclasses import replace

import pytest

from dgxlab.chains import ChainRun, Over, chain_of, comparisons, over
from dgxlab.ingest import ingest
from dgxlab.judgement import judge
from dgxlab.model import BASELINE, CANDIDATE
from dgxlab.model.reasons import Code, reason
from dgxlab.store import Store
from tests.journals import Journal, chain_step, intend, session_plan

UNENGAGED = str(reason(Code.NOT_ENGAGED, marker="w4a16:", program="llama-bench"))
STRANGER = f"{reason(Code.STRANGER, processes='pid 7')}; {UNENGAGED}"
STEP = chain_step()


def runs(cycles: int, *, idle: int = 0, flawed: int = 0) -> list[ChainRun]:
    """Return what ran in a chain of so many cycles, of which the first candidates were idle or flawed."""
    (comparison,) = comparisons(STEP)
    values = {(comparison.baseline, comparison.metric): 100.0, (comparison.candidate, comparison.metric): 110.0}
    ran = [ChainRun(BASELINE, 0, values)]
    for cycle in range(1, cycles + 1):
        wrong = "it is wrong" if cycle <= max(idle, flawed) else ""
        ran += [ChainRun(CANDIDATE, cycle, values, wrong, idle=cycle <= idle), ChainRun(BASELINE, cycle, values)]
    return ran


@pytest.mark.parametrize(
    ("ran", "expected"),
    [
        (runs(1, idle=1), None),
        (runs(2, idle=1), None),
        (runs(2, flawed=2), None),
        (runs(2, idle=2), Over.IDLE),
        (runs(6), Over.COMPLETE),
        (runs(6, flawed=1), None),
        (runs(6, flawed=5), Over.HOPELESS),
    ],
)
def test_why_no_further_cycle_follows(ran: list[ChainRun], expected: Over | None) -> None:
    (comparison,) = comparisons(STEP)
    assert over(STEP, [chain_of(STEP, comparison, ran)], ran) is expected


@pytest.mark.parametrize(
    ("told", "expected"),
    [
        (UNENGAGED, "the path under test ran in none of the first 2 cycles"),
        (STRANGER, "the chain was cut after 2 of 6"),
    ],
)
def test_the_verdict_says_why_the_chain_is_over(store: Store, told: str, expected: str) -> None:
    journal = Journal(session_plan("J", STEP)).built().gates().place(STEP, BASELINE, 0, 100.0)
    for cycle in (1, 2):
        journal.place(STEP, CANDIDATE, cycle, 110.0, status="discarded", reason=told).place(
            STEP, BASELINE, cycle, 100.0
        )
    intend(store, journal)
    ingest(store, "J", journal.end("failed", 5).lines())
    (judged,) = judge(store, "J")
    assert judged.verdict.verdict == "invalid"
    assert judged.verdict.reasons[0].startswith(expected)


def test_a_cell_that_was_refused_costs_its_comparison_the_cycle() -> None:
    ran = runs(6)
    ran[1] = replace(ran[1], values={("another cell", "avg_ts"): 1.0}, refused="B128: HTTP 500")
    (comparison,) = comparisons(STEP)
    assert chain_of(STEP, comparison, ran).flaws == {1: "candidate 1 B128: HTTP 500"}
    ran[1] = replace(runs(6)[1], refused="B128: HTTP 500")
    assert chain_of(STEP, comparison, ran).flaws == {}
