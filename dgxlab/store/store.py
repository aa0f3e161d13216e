"""The store: an open results.db, with transactions, jobs, and what a plan asks before anything is measured."""

# ruff: noqa: S608 - names of tables and columns are our own, values are always bound

from __future__ import annotations

import contextlib
import json
import sqlite3
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from dgxlab import __version__
from dgxlab.errors import SpecError, UsageError
from dgxlab.model import PROTOCOL, SESSIONS, Check, Device, Expectation, GateStep, ParityGate, Plan, canonical
from dgxlab.store.connect import Tell, backup, connect, copies, damaged, named_errors, transaction
from dgxlab.store.records import RANK, Job, device_from, experiment_row, gate_digest, job_row, matching_ids, only_match
from dgxlab.store.schema import DEFLATED, UPSERT, deflated, inflated
from dgxlab.store.seals import Seals

REJECTED = "SELECT job_id FROM rejections"  # the jobs whose results do not count
UNCOUNTED = f"""SELECT job_id FROM jobs WHERE kind IN {SESSIONS} AND state IN ('intended', 'running')
                UNION ALL {REJECTED}"""
"""The jobs whose runs do not count: rejected ones, and sessions that have not ended, whose results are hidden."""
JOBS = """SELECT jobs.*, coalesce(reason, '') AS rejected, (SELECT json_group_array(note) FROM notes
                 WHERE notes.job_id = jobs.job_id) AS notes
          FROM jobs LEFT JOIN rejections USING (job_id)"""
FLAWED = "SELECT run_id FROM flags WHERE hard"
"""The runs that a hard event disturbed: tables mark them, and what has no room for a mark leaves them out."""
WARM_UP = "was a warm-up"
UNFIT = f"""CASE WHEN runs.job_id IN ({REJECTED}) THEN 'was rejected with its session'
                  WHEN runs.job_id IN ({UNCOUNTED}) THEN 'is of a session that has not ended'
                  WHEN runs.status <> 'valid' THEN iif(runs.status = 'failed', 'failed', 'was discarded')
                  WHEN role = 'burn-in' THEN '{WARM_UP}'
                  WHEN runs.run_id IN ({FLAWED}) THEN 'had a hard event' END"""
"""Why what has no room for a mark leaves out one of `runs`, given its `role` in a chain; NULL for one that counts."""
RECORDED = "json_array(e.total, e.unsupported, e.cases)"
"""Of `expectations AS e`: what a parity gate must reach that does not say it."""
FRESH_S = 86400.0  # a younger copy is recent enough

RunRow = Mapping[str, Any]
CellKey = tuple[str, str, str]  # a cell on a model in an environment: Cell.key, model_id ("" for none), env_digest


class Store:
    """An open results.db; `with Store.open(path) as store:` closes it at the end of the block."""

    def __init__(self, connection: sqlite3.Connection, path: Path) -> None:
        self.connection = connection
        self.path = path
        self._seals = Seals(connection)
        self._tell: Tell | None = None

    @classmethod
    def open(cls, path: Path, *, create: bool = True) -> Store:
        """Open the database and migrate it to the current schema; `create` it if it is missing.

        Raises:
            SpecError: if it is not ours, too new, damaged, on a network file system, or missing without `create`.
            Locked: if another program keeps it locked.
        """
        return cls(connect(path, create=create), path)

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *ended: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the database, and merge the write-ahead log into it: it is then a single file again."""
        with contextlib.suppress(sqlite3.Error):
            self.connection.execute("PRAGMA busy_timeout = 0")  # while others use it: the last one to close does it
            self.connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        self.connection.close()

    def back_up(self) -> None:
        """Write a backup copy (`connect.backup`), unless there is no job yet or the newest copy is under a day old."""
        fresh = any(time.time() - copy.stat().st_mtime < FRESH_S for copy in copies(self.path)[-1:])
        if self.rows("SELECT 1 FROM jobs LIMIT 1") and not fresh:
            with named_errors(self.path):
                backup(self.connection, self.path)

    @contextlib.contextmanager
    def transaction(self) -> Iterator[None]:
        """Run a block as one transaction (`connect.transaction`), and seal its rows at the end.

        A transaction inside another one is part of that.
        """
        if self.connection.in_transaction:
            yield
            return
        try:
            with transaction(self.connection, self.path, self._tell):
                yield
                self._seals.close()
        finally:
            self._seals.forget()

    @contextlib.contextmanager
    def waiting(self, tell: Tell) -> Iterator[None]:
        """In this block, transactions wait up to ten minutes for another program, and call `tell` with a sentence."""
        before, self._tell = self._tell, tell
        try:
            yield
        finally:
            self._tell = before

    def seal(self) -> None:
        """Seal the rows written so far in this transaction, so that a check within it sees correct seals."""
        self._seals.close()

    def rows(self, sql: str, params: Sequence[Any] | Mapping[str, Any] = ()) -> list[dict[str, Any]]:
        """Return the rows of a SELECT by column name, with deflated values as text; raises Damaged if unreadable."""
        # not by PRAGMA query_only: after it SQLite compiles every statement again
        if not sql.lstrip().startswith(("SELECT", "WITH", "PRAGMA")):
            raise ValueError(f"only a SELECT or a PRAGMA is read: {sql}")
        with named_errors(self.path):
            cursor = self.connection.execute(sql, params)
            names = [column[0] for column in cursor.description]
            try:
                return [dict(zip(names, _texts(row), strict=True)) for row in cursor]
            except ValueError as error:
                raise damaged(self.path, str(error)) from error

    def put(self, table: str, row: Mapping[str, Any]) -> None:
        """Insert a row, by column name; `schema.UPSERT` says what happens if its key exists."""
        self.put_many(table, tuple(row), [tuple(row.values())])

    def put_many(self, table: str, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
        """Insert rows, whose values are in the order of `columns`; an existing key is treated as in `put`."""
        marks = ",".join("?" * len(columns))
        sql = f"INSERT INTO {table} ({','.join(columns)}) VALUES ({marks}) {UPSERT.get(table, '')}"
        packed = [columns.index(name) for name in DEFLATED.get(table, ()) if name in columns]
        rows = [[deflated(v) if i in packed else v for i, v in enumerate(row)] if packed else row for row in rows]
        with self.transaction():
            self._seals.writing(table, columns, rows)
            self.connection.executemany(sql, rows)

    def update_job(self, job_id: str, **columns: Any) -> None:
        """Set columns of a job, unchecked; to change its state use `set_state`."""
        columns |= {name: deflated(columns[name]) for name in DEFLATED["jobs"] if name in columns}
        names = ",".join(f"{name} = ?" for name in columns)
        with self.transaction():
            self._seals.writing("jobs", ("job_id",), [(job_id,)])
            self.connection.execute(f"UPDATE jobs SET {names} WHERE job_id = ?", (*columns.values(), job_id))

    def intend(self, plan: Plan, host_name: str, dgxlab_version: str = __version__, *, staged: str = "") -> Job:
        """Record a job that is about to be started, before the first network call; a second call changes nothing.

        `staged` is the text of the plan on the host, for a job that another client has started there.

        Raises UsageError if another plan has the same job id.
        """
        with self.transaction():
            for spec in plan.specs:
                self.put("experiments", experiment_row(spec))
            known = self.find_job(plan.job_id)
            if known is None:
                # the plan of an older dgxlab has no specs
                digest = plan.experiment if self.experiment(plan.experiment) else None
                self.put("jobs", job_row(plan, digest, host_name, dgxlab_version, staged=staged))
            elif known.plan_digest != plan.digest:
                raise UsageError(f"the job id {plan.job_id} belongs to another plan", next="dgxlab jobs")
            return self.job(plan.job_id)

    def job(self, job_id: str) -> Job:
        """Return the job with this id; raises UsageError if there is none."""
        if job := self.find_job(job_id):
            return job
        raise UsageError(f"{self.path} knows no job {job_id}", next="dgxlab sessions")

    def find_job(self, job_id: str) -> Job | None:
        """Return the job with this id, or None."""
        return next(iter(self._jobs("WHERE job_id = ?", (job_id,))), None)

    def job_ids(self, text: str) -> list[str]:
        """Return the ids that a user's text names (`matching_ids`), in order; "" names all."""
        return matching_ids((str(row["job_id"]) for row in self.rows("SELECT job_id FROM jobs ORDER BY job_id")), text)

    def named(self, text: str) -> str:
        """Return the id of the only job that a user's text names; raises UsageError as `only_match`."""
        return only_match(self.job_ids(text), text, next="dgxlab sessions")

    def jobs(self) -> list[Job]:
        """Return all jobs, the newest first."""
        return self._jobs("ORDER BY intent_at DESC, job_id DESC")

    def unfinished(self, host: str | None = None) -> list[Job]:
        """Return the jobs on a host (its name in hosts.yaml), or any, whose end is unknown, the newest first.

        Lost and rejected jobs are not among them.
        """
        return self._jobs(
            """WHERE host = coalesce(?, host) AND state IN ('intended', 'running') AND rejections.job_id IS NULL
               ORDER BY intent_at DESC, job_id DESC""",
            (host,),
        )

    def _jobs(self, where: str, params: Sequence[Any] | Mapping[str, Any] = ()) -> list[Job]:
        return [Job.from_row(row) for row in self.rows(f"{JOBS} {where}", params)]

    def devices(self, job_id: str) -> dict[str, Device]:
        """Return the device of each arm of a job, by the arm's name; arms that were never built are left out."""
        rows = self.rows("SELECT * FROM devices JOIN arms USING (device_id) WHERE job_id = ?", (job_id,))
        return {row["arm"]: device_from(row) for row in rows}

    def set_state(
        self, job_id: str, state: str, *, exit_code: int | None = None, error: str = "", next: str = ""
    ) -> Job:
        """Set a job's state, unless it has one of the same or a higher RANK, and return the job.

        For states that a journal cannot report, such as lost. Arguments left out keep the values of their columns.
        """
        columns = {"exit_code": exit_code, "error": error or None, "next": next or None}
        with self.transaction():
            if RANK[state] > RANK[self.job(job_id).state]:
                self.update_job(job_id, state=state, **{k: v for k, v in columns.items() if v is not None})
            return self.job(job_id)

    def verdicts(self, job_id: str) -> list[dict[str, Any]]:
        """Return the rows of a job's verdicts, in the order of its plan."""
        return self.rows("SELECT * FROM verdicts WHERE job_id = ? ORDER BY position", (job_id,))

    def replace(self, table: str, key: str, value: str, rows: Sequence[Mapping[str, Any]]) -> None:
        """Replace the rows of a table of verdicts that have this value in `key`; writes nothing if they are equal."""
        where = f"FROM {table} WHERE {key} = ?"
        with self.transaction():
            if self.rows(f"SELECT * {where} ORDER BY position", (value,)) == list(rows):
                return
            self._seals.writing(table, (key,), [(value,)])
            self.connection.execute(f"DELETE {where}", (value,))
            for row in rows:
                self.put(table, row)

    def experiment(self, digest: str | None) -> dict[str, Any] | None:
        """Return the row of an experiment; None if it is unknown."""
        return next(iter(self.rows("SELECT * FROM experiments WHERE digest = ?", (digest,))), None)

    def up_to_date(
        self, build_id: str, device_id: str, cells: Iterable[CellKey], markers: Mapping[str, Iterable[str]] = {}
    ) -> set[CellKey]:
        """Return those of `cells` that have counted samples of a valid run of this PROTOCOL on this build and device.

        A run of a chain is enough only if the chain has a verdict on the cell that is not invalid. By tool, `markers`
        are what a run must have had on stderr.
        """
        rows = self.rows(
            f"""SELECT DISTINCT rows.cell, coalesce(runs.model_id, '') AS model_id, runs.env_digest, job_id, arm, tool
               FROM runs JOIN jobs USING (job_id) JOIN arms USING (job_id, arm) JOIN rows USING (run_id)
               LEFT JOIN chain_runs AS c USING (run_id)
               WHERE runs.build_id = ? AND device_id = ? AND runs.status = 'valid' AND jobs.protocol = ?
               AND job_id NOT IN ({UNCOUNTED})
               AND (c.chain IS NULL OR EXISTS (SELECT 1 FROM verdicts AS v
                                               WHERE v.job_id = runs.job_id AND v.chain = c.chain
                                               AND v.verdict <> 'invalid' AND rows.cell IN (v.cell, v.candidate_cell)))
               AND EXISTS (SELECT 1 FROM samples AS s
                           WHERE s.run_id = rows.run_id AND s.cell = rows.cell AND s.discarded IS NULL)""",
            (build_id, device_id, PROTOCOL),
        )
        proved = self.proved(rows, markers)
        return {(row["cell"], row["model_id"], row["env_digest"]) for row in proved}.intersection(cells)

    def proved(self, runs: Iterable[RunRow], markers: Mapping[str, Iterable[str]]) -> list[RunRow]:
        """Return the valid runs that had these markers, by tool, on stderr, as the plans of their jobs required.

        A run of a plan that an older dgxlab wrote and this one cannot read had none.
        """

        @cache
        def required(job_id: str, arm: str) -> Mapping[str, tuple[str, ...]]:
            try:
                return self.job(job_id).plan.markers(arm)
            except SpecError:
                return {}

        def had(run: RunRow) -> tuple[str, ...]:
            return required(run["job_id"], run["arm"]).get(run["tool"], ())

        return [run for run in runs if not (asked := markers.get(run["tool"])) or {*asked} <= {*had(run)}]

    def latest_gate(self, build_id: str, device_id: str, gate_digest: str, gate: ParityGate) -> dict[str, Any] | None:
        """Return the row of a parity gate's newest result on this build and device, `judged_alike` alone."""
        recorded = f"""(SELECT {RECORDED} FROM expectations AS e JOIN devices USING (compute_cap)
                        WHERE devices.device_id = arms.device_id
                        AND (e.pin, e.tree, e.gate_digest) = (arms.pin, arms.tree, gates.gate_digest)) AS recorded"""
        rows = self._results(f"gates.*, {recorded}", "gates", "gate_id", "true", (build_id, device_id, gate_digest))
        return next((row for row in rows if self.judged_alike(row, gate)), None)

    def judged_alike(self, row: Mapping[str, Any], gate: ParityGate | Check) -> bool:
        """Return whether a result of the same parity gate, whatever it had to reach, says how `gate` ended.

        `row` is its row of `gates`, with RECORDED of its source as `recorded`. Where no case failed, a result may be
        good for some counts, or one list of cases, alone.
        """
        if row["total"] is None or (row["status"] == "failed" and row["passed"] != row["total"]):
            return True
        assert isinstance(gate, ParityGate)
        total, unsupported, cases = json.loads(row["recorded"] or "[null, null, null]")
        if total is not None:  # an older agent recorded no cases
            gate = gate.completed(Expectation(total, total), unsupported, cases if cases and row["cases"] else "")

        def reached(*asked: object) -> list[bool]:
            got = (row["total"], row["unsupported"], row["cases"])
            return [wanted in (None, value) for wanted, value in zip(asked, got, strict=True)]

        had = reached(row["expected"], self._unsupported(row), row["expected_cases"])
        return had == reached(gate.expect and gate.expect.total, gate.unsupported, gate.cases or None)

    def _unsupported(self, row: Mapping[str, Any]) -> int | None:
        """Return how many unsupported cases a failed parity gate had to have; None if that is open or not known."""
        if row["status"] != "failed":
            return None
        with contextlib.suppress(SpecError):
            steps = [step for step in self.job(row["job_id"]).plan.steps if isinstance(step, GateStep)]
            same = (s.gate for s in steps if (s.arm, gate_digest(s.gate, s.env)) == (row["arm"], row["gate_digest"]))
            return next((gate.unsupported for gate in same if isinstance(gate, ParityGate)), None)
        return None

    def gate_passed(self, build_id: str, device_id: str, gate_digest: str, gate: ParityGate) -> bool:
        """Return whether a parity gate's newest result on this build and device is a pass with the expected counts."""
        row = self.latest_gate(build_id, device_id, gate_digest, gate)
        return row is not None and row["status"] != "failed"

    def check_passed(self, build_id: str, device_id: str, gate_digest: str, inputs: Mapping[str, str]) -> bool:
        """Return whether the newest result of a gate, other than a parity gate, is a pass on this build and device.

        Only results with these inputs count: the model_id of each of the gate's models, the digest of each source file.
        """
        asked = (build_id, device_id, gate_digest, canonical(inputs))
        rows = self._results("status", "checks", "check_id", "inputs = ?", asked)
        return bool(rows) and rows[0]["status"] == "passed"

    def _results(self, columns: str, table: str, key: str, where: str, asked: Sequence[Any]) -> list[dict[str, Any]]:
        """Return the results of a gate that count on a build and device, the newest first."""
        return self.rows(
            f"""SELECT {columns} FROM {table} JOIN jobs USING (job_id) JOIN arms USING (job_id, arm, build_id)
               WHERE job_id NOT IN ({REJECTED}) AND build_id = ? AND device_id = ? AND gate_digest = ?
               AND jobs.protocol = {PROTOCOL} AND {where} ORDER BY at DESC, {key} DESC""",
            asked,
        )

    def expectation(
        self, pin: str, tree: str, gate_digest: str, compute_cap: str
    ) -> tuple[Expectation, int | None, str] | None:
        """Return what a parity gate is expected to print: the count, the unsupported cases, the digest of its cases.

        These are the values of the first clean result on any device of this compute capability; None without any.
        """
        rows = self.rows(
            """SELECT total, unsupported, cases FROM expectations
               WHERE pin = ? AND tree = ? AND gate_digest = ? AND compute_cap = ?""",
            (pin, tree, gate_digest, compute_cap),
        )
        for row in rows:
            return Expectation(row["total"], row["total"]), row["unsupported"], row["cases"] or ""
        return None

    def case_list(self, cases: str) -> list[str] | None:
        """Return the sorted cases that a gate printed, given their digest; None if the record does not have them."""
        rows = self.rows("SELECT lines FROM case_lists WHERE cases = ?", (cases,))
        return json.loads(rows[0]["lines"]) if rows else None


def _texts(row: tuple[Any, ...]) -> Iterable[Any]:
    return [inflated(value) if type(value) is bytes else value for value in row] if bytes in map(type, row) else row
