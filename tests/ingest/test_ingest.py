"""Journals into the store: what is kept of each event, and what is refused."""

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from dgxlab.errors import RemoteError, UsageError
from dgxlab.ingest import COLD, ingest
from dgxlab.model import Device, Expectation, canonical, digest, events, model_id, to_json
from dgxlab.store import Store, check
from tests.journals import (
    CAPPED,
    CHECK,
    CLOCK,
    FROM_ELSEWHERE,
    T0,
    TABLES,
    THROTTLED,
    TINY,
    Journal,
    arm,
    cell,
    chain_step,
    compared,
    device,
    dump,
    facts,
    intend,
    plan,
    session_plan,
    source,
    whole,
)

JOB = "20261120-120000-toy-1"


def measured(store: Store, journal: Journal) -> list[events.Event]:
    intend(store, journal)
    return ingest(store, journal.plan.job_id, journal.lines())


def begun(*arms: Any) -> Journal:
    """Return the beginning of a journal, up to where it measures."""
    return Journal(plan(JOB, arms)).job().build().model()


def test_a_whole_job(store: Store) -> None:
    journal = whole(JOB, runs=2, samples=3)
    assert measured(store, journal) == [events.read(event) for event in journal.events]
    before = dump(store)
    assert ingest(store, JOB, journal.lines()) == ingest(store, JOB, []) == []
    assert dump(store) == before
    counts = {table: len(rows) for table, rows in dump(store).items()}
    of_runs = dict.fromkeys(("runs", "rows", "telemetry", "flags"), 2)
    of_others = dict.fromkeys(("chain_runs", "verdicts", "checks", "case_lists"), 0)
    none = dict.fromkeys(FROM_ELSEWHERE, 0)
    del counts["seals"]
    assert counts == {**dict.fromkeys(TABLES, 1), **of_runs, **of_others, **none, "samples": 8}
    assert check(store) == []
    job = store.job(JOB)
    assert (job.state, job.exit_code, job.finished_at, job.journal_bytes) == ("done", 0, T0 + 6, len(journal.text()))
    assert (job.host_id, job.boot_id, job.agent_version) == ("host-a", "boot-of-host-a", "0.1.0")
    assert job.facts == json.loads(canonical(facts()))


def test_a_gate_on_a_model_is_kept_as_it_was_judged(store: Store) -> None:
    measured(store, begun().check(0.003).check(limit_s=1.0).check(gate=replace(CHECK, kld_ratio_at_most=0.75)))
    failed, again, looser = store.rows("SELECT * FROM checks ORDER BY at")
    assert (failed["status"], failed["step"], failed["kind"]) == ("failed", "gate:1", "perplexity")
    assert json.loads(failed["readings"])["arm"]["kld"] == 0.003
    assert "is 0.75 times" in json.loads(failed["reasons"])[0]
    assert (again["status"], again["reasons"]) == ("passed", "[]")
    assert failed["gate_digest"] == again["gate_digest"] != looser["gate_digest"]
    assert store.check_passed(failed["build_id"], device(), failed["gate_digest"], {"tiny": model_id(TINY)})
    assert not store.check_passed(failed["build_id"], device(), failed["gate_digest"], {"tiny": "another"})
    assert check(store) == []


def test_a_run_keeps_everything(store: Store) -> None:
    # a byte that was no UTF-8 travels as half a surrogate pair, and becomes a question mark
    measured(store, begun().run([8.0, 9.0], argv=["llama-bench", "a\udc80b", "\U0001f600"]))
    (run,) = store.rows("SELECT * FROM runs")
    assert (run["run_id"], run["position"], run["status"]) == (f"{JOB}/3", 0, "valid")
    assert store.devices(JOB) == {run["arm"]: Device.of(to_json(facts()), {})}
    assert json.loads(run["argv"]) == ["llama-bench", "a?b", "\U0001f600"]
    assert json.loads(run["raw"])["stderr"]["sha256"] == digest("run.err")
    assert (json.loads(run["before"]), json.loads(run["after"])) == ({"load": 0.25}, {"load": 0.5})
    assert store.rows("SELECT raw FROM rows") == [{"raw": '{"avg_ts":8.0,"n_gen":0,"n_prompt":512}'}]
    samples = store.rows("SELECT metric, ordinal, value, unit, discarded FROM samples ORDER BY ordinal")
    assert samples == [
        {"metric": "avg_ts", "ordinal": 0, "value": 4.0, "unit": "t/s", "discarded": COLD},
        {"metric": "avg_ts", "ordinal": 1, "value": 8.0, "unit": "t/s", "discarded": None},
        {"metric": "avg_ts", "ordinal": 2, "value": 9.0, "unit": "t/s", "discarded": None},
    ]
    (kept,) = store.rows("SELECT * FROM cells")
    assert (kept["cell"], kept["tool"], kept["label"]) == (cell().key, "llama-bench", "pp512")
    assert kept["params"] == '{"n_gen":0,"n_prompt":512}'


def test_the_conditions_of_a_run(store: Store) -> None:
    measured(store, begun().run(telemetry=[CLOCK], flags=[CAPPED, THROTTLED]))
    assert store.rows("SELECT * FROM telemetry") == [{"run_id": f"{JOB}/3", **CLOCK}]
    assert store.rows("SELECT * FROM flags ORDER BY hard") == [
        {"run_id": f"{JOB}/3", **flag, "hard": int(bool(flag["hard"]))} for flag in (CAPPED, THROTTLED)
    ]
    assert store.rows("SELECT status FROM runs") == [{"status": "valid"}]


def test_a_run_has_its_place_in_a_chain(store: Store) -> None:
    journal = compared(JOB)
    assert measured(store, journal) == [events.read(event) for event in journal.events]
    runs = [event for event in journal.events if event["event"] == "run"]
    assert store.rows("SELECT * FROM chain_runs ORDER BY length(run_id), run_id") == [
        {"run_id": f"{JOB}/{run['seq']}", **{name: run[name] for name in ("chain", "role", "cycle")}} for run in runs
    ]
    assert store.job(JOB).journal_seq == len(journal.events)


def test_an_arm_is_what_the_plan_says(store: Store) -> None:
    mine = source(["w4a16"], tree="f" * 40, dirty=True)
    stamped = source(["an older name"], tree="f" * 40)
    measured(store, Journal(plan(JOB, [arm(made_from=mine)])).job().build(source=stamped, reused=True, dirty=False))
    (row,) = store.rows("SELECT * FROM arms")
    assert (row["pin"], row["tree"], row["commit_id"]) == (mine.pin, mine.tree, mine.commit)
    assert (row["dirty"], row["reused"]) == (1, 1)
    assert json.loads(row["series"]) == [{"name": "w4a16", "digest": digest("w4a16")}]
    assert json.loads(row["binaries"]) == {"llama-bench": digest("llama-bench")}


def test_a_model_that_two_arms_share_is_kept_once(store: Store) -> None:
    journal = begun().model(name="again")
    del journal.events[2]["reused"]
    measured(store, journal)
    assert store.rows("SELECT name, reused FROM inputs") == [{"name": "tiny", "reused": None}]


@pytest.mark.parametrize(
    ("journal", "total"),
    [
        (begun().gate(), 1103),
        (begun().gate(1102), None),
        (begun().gate(expect=Expectation(1103, 1103)), None),
        (begun().gate(1102, status="flaky", reasons=[]), None),
        (Journal(plan(JOB, [arm(made_from=source(dirty=True))])).job().build().gate(), None),
    ],
)
def test_which_gate_records_the_count(store: Store, journal: Journal, total: int | None) -> None:
    measured(store, journal)
    assert [row["total"] for row in store.rows("SELECT total FROM expectations")] == ([total] if total else [])


def test_a_recorded_count_stays(store: Store) -> None:
    for name, passed in (("job-2", 1103), ("job-3", 9), ("job-1", 1103)):
        journal = Journal(plan(name)).job().build().gate(passed, total=passed, status="passed", reasons=[], failed=[])
        measured(store, journal)
    assert store.rows("SELECT total, unsupported, job_id FROM expectations") == [
        {"total": 1103, "unsupported": 306, "job_id": "job-1"}
    ]


@pytest.mark.parametrize(("status", "code"), [("done", 0), ("failed", 5), ("cancelled", 130)])
def test_how_a_job_ends(store: Store, status: str, code: int) -> None:
    journal = begun().run(status="failed", reason="killed by signal 9", rc=None, signal=9)
    for message in ("the run failed", "the gate failed"):
        journal.add("error", exit_code=code, message=message, next="less raw/x", details="a\nb")
    measured(store, journal.end(status, code))
    job = store.job(JOB)
    assert (job.state, job.exit_code, job.error, job.next) == (status, code, "the gate failed", "less raw/x")
    (run,) = store.rows("SELECT * FROM runs")
    assert (run["status"], run["rc"], run["signal"], run["reason"]) == ("failed", None, 9, "killed by signal 9")


def test_events_that_are_not_kept_are_counted(store: Store) -> None:
    journal = Journal(plan(JOB)).add("lock", state="held", path="/var/lock/x", owner="").job()
    journal.add("telepathy", thoughts=[1, 2]).add("progress", id="x", done=1, total=2, note="").build()
    assert [event.event for event in measured(store, journal)] == ["lock", "job", "", "progress", "build"]
    assert store.job(JOB).journal_seq == 5
    assert store.rows("SELECT count(*) AS n FROM arms") == [{"n": 1}]


def test_an_unknown_job_is_refused(store: Store) -> None:
    with pytest.raises(UsageError, match="knows no job"):
        ingest(store, JOB, whole(JOB).lines())


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        (b"{\n", "line 5 .* cannot be used: "),
        (b"\n", "line 5 .* cannot be used: "),
        (b"[1]\n", "line 5 .*: \\[1\\] is not an object"),
        (b"\xff\xfe\n", "line 5 .* cannot be used: "),
        (b"[" * 100_000 + b"\n", "line 5 .* cannot be used: "),
        (b'{"seq":4,"t":NaN,"event":"x"}\n', "line 5 .*: t: nan is not number"),
        (b'{"seq":4,"t":1e999,"event":"x"}\n', "line 5 .*: t: inf is not"),
        (b'{"seq":4,"event":"x"}\n', "line 5 .*: it lacks 't'"),
        (b'{"seq":-1,"t":1,"event":"x"}\n', "line 5 .*: seq: -1 is not within 0"),
        (b'{"seq":true,"t":1,"event":"x"}\n', "line 5 .*: seq: True is not"),
        (b'{"seq":"4","t":1,"event":"x"}\n', "line 5 .*: seq: '4' is not"),
        (b'{"seq":4,"t":1}\n', "line 5 .*: it lacks 'event'"),
        (b'{"seq":4,"t":1,"event":"x"}', "line 5 .* cannot be used: it has no end"),
        (b'{"seq":5,"t":1,"event":"x"}\n', "jumps from line 4 to line 6"),
    ],
)
def test_a_malformed_line_is_named(store: Store, line: bytes, sentence: str) -> None:
    journal = whole(JOB)
    intend(store, journal)
    before = dump(store)
    with pytest.raises(RemoteError, match=sentence) as caught:
        ingest(store, JOB, [*journal.lines()[:4], line, *journal.lines()[5:]])
    assert JOB in caught.value.message
    assert dump(store) == before


NO_CLOCK: tuple[dict[str, Any], ...] = ({"median": 2000.0}, {"n": 0}, {"median": None}, {"unit": ""})
NO_FLAG = ({**CAPPED, "reason": ""}, {**CAPPED, "hard": 2}, "SW power cap")


def changed(change: Callable[[dict[str, Any]], object], number: int = 4) -> Journal:
    """Return a whole journal with one of its events changed: 0 job, 1 build, 2 model, 3 gate, 4 and 5 runs, 6 end."""
    journal = whole(JOB)
    change(journal.events[number])
    return journal


def sample(value: Any) -> Journal:
    return changed(lambda event: event["results"][0]["measurements"][0].update(samples=[value]))


def placed(**place: Any) -> Journal:
    """Return a journal whose run has this place in a chain, in place of baseline 0 of chain:1."""
    step = chain_step()
    journal = Journal(session_plan(JOB, step)).built().place(step, "baseline", 0, 100.0)
    journal.events[-1] |= place
    return journal


@pytest.mark.parametrize(
    ("journal", "sentence"),
    [
        (changed(lambda e: e.pop("argv")), "line 5 .* cannot be used: run: it lacks 'argv'"),
        (changed(lambda e: e.update(status="fine")), "line 5 .* status: .fine. is not one of valid"),
        (changed(lambda e: e.update(status="discarded", reason="")), "line 5 .* it is discarded without a reason"),
        (changed(lambda e: e.update(build_id="unknown")), "line 5 .* FOREIGN KEY"),
        (changed(lambda e: e.update(model_id="unknown")), "line 5 .* FOREIGN KEY"),
        (changed(lambda e: e.update(seconds="long")), "line 5 .* seconds: 'long' is not number"),
        (changed(lambda e: e.update(rc=2**70)), "line 5 .* rc: "),
        (changed(lambda e: e.update(tool={})), "line 5 .* tool: "),
        (changed(lambda e: e.update(results=None)), "line 5 .* results: None is not a list"),
        (changed(lambda e: e.update(cells={})), "line 5 .* results of cells that it does not name"),
        (changed(lambda e: e["cells"].update({"0" * 16: cell().__dict__})), "cell 0+ is not the digest"),
        (changed(lambda e: e["results"].append(e["results"][0])), "line 5 .* UNIQUE constraint failed"),
        (sample("9.5"), "samples: .9.5. is not number"),
        (sample(True), "samples: True is not number"),
        (sample(None), "samples: None is not number"),
        (sample(10**400), "line 5 .* 1000.* is not integer"),
        (sample(0.0), "samples: 0 is not within"),
        (sample(-0.5), "samples: -0.5 is not within"),
        (changed(lambda e: e.update(job_id="another"), 0), "line 1 .* it is of job another"),
        (changed(lambda e: e.update(plan_digest="0" * 64), 0), "line 1 .* with plan 0000"),
        (changed(lambda e: e.update(facts={}), 0), "first line .* facts: "),
        (changed(lambda e: e["source"].update(tree="0" * 40), 1), "line 2 .* its tree is 0+, the plan says"),
        (changed(lambda e: e.update(arm="nosuch"), 1), "line 2 .* there is no 'nosuch'"),
        (changed(lambda e: e.update(event="step", id="x", kind="x", state="x"), 1), "line 4 .* FOREIGN KEY"),
        (changed(lambda e: e.update(event="unheard of"), 0), "line 2 .* there is no 'host_id'"),
        (changed(lambda e: e.update(status="asleep"), 6), "line 7 .* status: .asleep. is not one of"),
        (placed(chain="chain:2"), "the plan has no baseline 0 of chain:2 with arm toy"),
        (placed(role="candidate", cycle=1), "the plan has no candidate 1 of chain:1 with arm toy"),
        (placed(role="bystander"), "role: must be of the form"),
        (placed(role="burn-in"), "its burn-in has no number"),
        (placed(cycle=-1), "cycle: -1 is not within 0"),
        (placed(cycle=None), "its place in the chain is not told"),
        (placed(cycle="first"), "cycle: .first. is not"),
        *((begun().run(telemetry=[{**CLOCK, **wrong}]), "line 4 .* cannot be used: run: ") for wrong in NO_CLOCK),
        (begun().run(telemetry=[CLOCK, CLOCK]), "line 4 .* cannot be used: run: "),
        (begun().run(telemetry=[{"device": "host"}]), "line 4 .* cannot be used: run: "),
        *((begun().run(flags=[wrong]), "line 4 .* cannot be used: run: ") for wrong in NO_FLAG),
    ],
)
def test_an_unusable_event_is_named(store: Store, journal: Journal, sentence: str) -> None:
    intend(store, journal)
    before = dump(store)
    with pytest.raises(RemoteError, match=sentence):
        ingest(store, JOB, journal.lines())
    assert dump(store) == before
