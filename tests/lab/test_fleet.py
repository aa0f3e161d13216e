"""The same request on several hosts at once, and their report; the hosts are this machine with other settings."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from dgxlab import audit, judgement, report
from dgxlab.errors import HostError, UsageError
from dgxlab.judgement import fleets
from dgxlab.lab import Lab
from dgxlab.lab.fleet import Member, run_all, spread
from dgxlab.lab.request import Request
from dgxlab.model import HostEntry, Session
from dgxlab.report.ask import of_experiment
from dgxlab.store import Store, seals
from dgxlab.transport.host import Host
from dgxlab.transport.local import LocalTransport
from tests.lab.conftest import ToyLab, quiet

NAMES = ("a", "b", "c")


def on_all(own: ToyLab, request: Request) -> list[Member]:
    """Run a request on hosts that are devices of their own; c cannot be reached."""

    def connect(name: str) -> Host:
        if name == "c":
            raise HostError("host c is away", next="dgxlab doctor c")
        entry = HostEntry(name, env={"TOY_NODE": name})
        return Host(LocalTransport(str(own.root), name), entry)

    @contextmanager
    def open_lab() -> Iterator[Lab]:
        with Store.open(Path(own.lab.store.path)) as store:
            yield replace(own.lab, store=store, connect=connect)

    return run_all(open_lab, [request.at(name) for name in NAMES], lambda request: quiet)


def test_a_run_on_three_hosts_of_which_one_is_away(own: ToyLab) -> None:
    request = Request("run", own.experiment())
    members = on_all(own, request)
    assert [member.host for member in members] == list(NAMES)
    outcomes = [member.outcome for member in members if member.outcome]
    assert [outcome.measured for outcome in outcomes] == [outcomes[0].planned] * 2
    assert str(members[2].error) == "host c is away"
    assert len({outcome.device.id for outcome in outcomes}) == 2
    ask = of_experiment(request.experiment, outcomes[0].source, outcomes[0].device)
    asks = [ask.on(member.host, member.outcome.device.id) for member in members if member.outcome]
    page = report.collect_fleet(own.lab.store, asks)
    assert page.summary == "2 of 2 devices measured"
    apart, devices = page.tables[:2]
    assert [row["devices"] for row in apart.rows] == [2] * len(apart.rows)
    assert [row["device"] for row in devices.rows] == ["a", "b"]
    text = report.render_page(page)
    assert "no device stands out" in text
    assert "| a |" in text
    later = report.page(own.lab.store, report.query({"form": "fleet", "experiment": request.experiment.name}))
    assert [sorted(map(str, table.rows)) for table in later.tables] == [
        sorted(map(str, table.rows)) for table in page.tables
    ]
    again = on_all(own, request)
    assert [member.outcome.measured for member in again if member.outcome] == [0, 0]


def test_a_session_on_each_host_and_a_verdict_over_them(own: ToyLab) -> None:
    spec = own.experiment(session=Session(cycles=8), gates=())
    members = on_all(own, Request("ab", replace(spec, name="other", env={"TOY_X": "1"}), spec))
    jobs = {member.host: member.outcome.job_id for member in members if member.outcome}
    assert list(jobs) == ["a", "b"]
    fleets.record(own.lab.store, jobs)
    page = report.collect_fleet_sessions(own.lab.store, jobs)
    pooled, devices = page.tables
    assert page.summary.startswith("over 2 devices: ")
    on_both = [row for row in pooled.rows if row["devices"] == 2]  # a busy machine may make a chain invalid
    assert on_both
    assert {row["verdict"] for row in on_both} <= {"faster", "slower", "same", "inconclusive"}
    assert [row["device"] for row in devices.rows] == ["a", "b"]
    assert "pooled as random effects" in report.render_page(page)
    asked = {"form": "fleet", "experiment": "other", "baseline": spec.name}
    assert {row["cell"]: row["effect"] for row in report.page(own.lab.store, report.query(asked)).tables[0].rows} == {
        row["cell"]: row["effect"] for row in pooled.rows
    }
    with pytest.raises(UsageError, match="has no verdict on 'nosuch'"):
        report.page(own.lab.store, report.query({**asked, "experiment": "nosuch"}))
    _the_record_keeps_it(own.lab.store, jobs)


def _the_record_keeps_it(store: Store, jobs: Mapping[str, str]) -> None:
    """Reports read the recorded verdict, checks compute it again, and so does setting a session aside."""
    assert audit.check(store) == []
    with Store.open(Path(f"{store.path}-other"), create=True) as other:
        assert audit.merge(other, Path(store.path))["fleets"] == 1
        assert other.rows("SELECT * FROM fleet_verdicts") == store.rows("SELECT * FROM fleet_verdicts") != []
    judgement.reject(store, jobs["b"], "another program ran")
    assert {row["devices"] for row in store.rows("SELECT devices FROM fleet_verdicts")} == {1}
    assert audit.check(store) == []
    edits = (
        ("UPDATE fleet_verdicts SET devices = 3", "are not those that its sessions give"),
        ("DELETE FROM fleet_verdicts", "are not those that its sessions give"),
        ("INSERT INTO fleets VALUES ('x', '[]')", "fleet x is not named after its sessions"),
    )
    for sql, sentence in edits:
        store.connection.execute("SAVEPOINT edit")
        store.connection.execute(sql)
        assert any(True for _ in seals.broken(store.connection))
        assert sentence in "".join(fleets.check(store))
        store.connection.execute("ROLLBACK TO edit")


def test_what_a_host_has_measured_stays_there(own: ToyLab) -> None:
    """The others are given to the hosts that have the fewest."""
    sweep = [Request("run", own.experiment(name=f"sweep-{n}", env={"TOY_N": str(n)})) for n in range(4)]
    hosts = ("local", "other", "third")
    assert [each.experiment.host for each in spread(own.lab.store, sweep, hosts)] == [*hosts, "local"]
    own.run_well(sweep[2].experiment)
    assert [each.experiment.host for each in spread(own.lab.store, sweep, hosts)] == [
        "other",
        "third",
        "local",
        "local",
    ]
