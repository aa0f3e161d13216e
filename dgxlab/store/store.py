"""The store itself: transactions, intents, and the questions that a run asks before it measures."""

# ruff: noqa: S608 - names of tables and columns are our own, values are always bound

from __future__ import annotations

import contextlib
import json
import sqlite3
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from dgxlab.errors import UsageError
from dgxlab.model import PROTOCOL, SESSIONS, Device, Expectation, Experiment, ParityGate, Plan, canonical
from dgxlab.store.connect import Tell, backup, connect, damaged, is_fresh, named_errors, transaction
from dgxlab.store.records import RANK, Job, device_from, experiment_row, job_row, named
from dgxlab.store.schema import DEFLATED, UPSERT, deflated, inflated
from dgxlab.store.seals import Seals

REJECTED = "SELECT job_id FROM rejections"
"""The jobs whose evidence was set aside."""
UNCOUNTED = f"""SELECT job_id FROM jobs WHERE kind IN {SESSIONS} AND state IN ('intended', 'running')
                UNION ALL {REJECTED}"""
"""Those of which no run counts: sessions whose chains go on, which are not shown either, and rejected ones."""
JOBS = """SELECT jobs.*, coalesce(reason, '') AS rejected FROM jobs LEFT JOIN rejections USING (job_id)"""

Wanted = tuple[str, str, str]
"""What a cell is up to date for: Cell.key, model_id ("" for none), env_digest."""


class Store:
    """An open results.db. `with Store.open(path) as store:` closes it, which leaves the one file and nothing beside it.

    Attributes:
        path: The database file.
        connection: SQLite's, for `check`, `merge` and tests; everybody else uses the methods.
    """

    def __init__(self, connection: sqlite3.Connection, path: Path) -> None:
        self.connection = connection
        self.path = path
        self._seals = Seals(connection)
        self._tell: Tell | None = None

    @classmethod
    def open(cls, path: Path, *, create: bool = True) -> Store:
        """Open the database, make it if it is not there, bring it to the current schema.

        Raises:
            SpecError: if it is not ours, too new, damaged, or on a network file system; or not there without `create`.
            Locked: if others keep it locked.
        """
        return cls(connect(path, create=create), path)

    def __enter__(self) -> Store:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Fold the write-ahead log into the file, so that the file alone is the whole database, and close it."""
        with contextlib.suppress(sqlite3.Error):
            self.connection.execute("PRAGMA busy_timeout = 0")  # while others use it: the last one to close does it
            self.connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        self.connection.close()

    def back_up(self) -> None:
        """Copy the database beside itself, unless nothing is in it or a copy is younger than a day.

        Raises:
            Damaged: if it cannot be copied because pages of it are damaged.
            SpecError: if the copy cannot be written.
        """
        if self.rows("SELECT 1 FROM jobs LIMIT 1") and not is_fresh(self.path):
            with named_errors(self.path):
                backup(self.connection, self.path)

    # -- reading and writing ------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def transaction(self) -> Iterator[None]:
        """Write all of a block or nothing of it; a block inside another belongs to the outer one.

        Raises:
            Locked: if another program writes for too long.
            SpecError: if the disk is full, or the file is damaged or not written, as `connect.transaction` says.
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
        """Wait for minutes in this block where another program holds the database, and tell of it meanwhile."""
        before, self._tell = self._tell, tell
        try:
            yield
        finally:
            self._tell = before

    def seal(self) -> None:
        """Seal what was written so far in this transaction; its end does it anyway."""
        self._seals.close()

    def rows(self, sql: str, params: Sequence[Any] | Mapping[str, Any] = ()) -> list[dict[str, Any]]:
        """Answer one SELECT; what the record holds deflated is given as text.

        Raises:
            Damaged: if the file is damaged, or such a text.
            SpecError: if it writes.
            sqlite3.OperationalError: if the SQL is wrong.
        """
        with named_errors(self.path):
            self.connection.execute("PRAGMA query_only = ON")
            try:
                cursor = self.connection.execute(sql, params)
                names = [column[0] for column in cursor.description or ()]
                return [dict(zip(names, _texts(row), strict=True)) for row in cursor]
            except ValueError as error:
                raise damaged(self.path, str(error)) from error
            finally:
                self.connection.execute("PRAGMA query_only = OFF")

    def put(self, table: str, row: Mapping[str, Any]) -> None:
        """Insert a row by column name; what happens to a key that is there already is in `schema.UPSERT`.

        Raises:
            sqlite3.IntegrityError: if the row breaks a constraint.
        """
        self.put_many(table, tuple(row), [tuple(row.values())])

    def put_many(self, table: str, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
        """Insert rows that all have these columns."""
        marks = ",".join("?" * len(columns))
        sql = f"INSERT INTO {table} ({','.join(columns)}) VALUES ({marks}) {UPSERT.get(table, '')}"
        packed = [columns.index(name) for name in DEFLATED.get(table, ()) if name in columns]
        rows = (
            [[deflated(v) if i in packed else v for i, v in enumerate(row)] for row in rows] if packed else list(rows)
        )
        with self.transaction():
            self._seals.writing(table, columns, rows)
            self.connection.executemany(sql, rows)

    def update_job(self, job_id: str, **columns: Any) -> None:
        """Set columns of a job, whatever they were; `set_state` is the careful way to change its state."""
        columns |= {name: deflated(columns[name]) for name in DEFLATED["jobs"] if name in columns}
        names = ",".join(f"{name} = ?" for name in columns)
        with self.transaction():
            self._seals.writing("jobs", ("job_id",), [(job_id,)])
            self.connection.execute(f"UPDATE jobs SET {names} WHERE job_id = ?", (*columns.values(), job_id))

    def know(self, experiment: Experiment) -> None:
        """Record what an experiment says, unless it is known."""
        self.put("experiments", experiment_row(experiment.spec))

    # -- jobs ---------------------------------------------------------------------------------------------------------

    def intend(
        self, plan: Plan, experiment: Experiment | None, host_name: str, dgxlab_version: str, *, found: str = ""
    ) -> Job:
        """Record that a job is about to be started; call it before the first network call.

        Doing it again changes nothing.

        Args:
            experiment: None for the one that the plan names, where the plan or the record says what it is.
            found: The plan as canonical text where the job was found, started by another client or forgotten by this
                one: what it measured is as old as it is.

        Raises:
            UsageError: if the id belongs to another plan.
            ValueError: if the plan is of another experiment.
        """
        if experiment is not None and experiment.digest != plan.experiment:
            raise ValueError(f"the plan is of experiment {plan.experiment}, not of {experiment.digest}")
        with self.transaction():
            if experiment is not None:
                self.know(experiment)
            for spec in plan.specs:
                self.put("experiments", experiment_row(spec))
            known = self.find_job(plan.job_id)
            if known is None:
                recorded = self.rows("SELECT digest FROM experiments WHERE digest = ?", (plan.experiment,))
                digest = plan.experiment if recorded else None
                self.put("jobs", job_row(plan, digest, host_name, dgxlab_version, found=found))
            elif known.plan_digest != plan.digest:
                raise UsageError(f"the job id {plan.job_id} belongs to another plan", next="dgxlab jobs")
            elif experiment is not None:
                self.update_job(plan.job_id, experiment=experiment.digest)
            return self.job(plan.job_id)

    def job(self, job_id: str) -> Job:
        """Return a job.

        Raises:
            UsageError: if there is none of that id.
        """
        if job := self.find_job(job_id):
            return job
        raise UsageError(f"{self.path} knows no job {job_id}", next="dgxlab jobs")

    def find_job(self, job_id: str) -> Job | None:
        """Return a job, None if there is none of that id."""
        rows = self.rows(f"{JOBS} WHERE job_id = ?", (job_id,))
        return Job.from_row(rows[0]) if rows else None

    def job_ids(self, text: str) -> list[str]:
        """Return the ids that a text may mean, in order: the whole id, its beginning or its alias; "" means all."""
        return named((str(row["job_id"]) for row in self.rows("SELECT job_id FROM jobs ORDER BY job_id")), text)

    def jobs(self, *, host: str | None = None, states: Sequence[str] = tuple(RANK)) -> list[Job]:
        """Return the jobs in these states, the latest intent first; `host` is a name in hosts.yaml."""
        rows = self.rows(
            f"""{JOBS} WHERE state IN (SELECT value FROM json_each(:states))
               AND (:host IS NULL OR host = :host) ORDER BY intent_at DESC, job_id DESC""",
            {"states": canonical(states), "host": host},
        )
        return [Job.from_row(row) for row in rows]

    def unfinished(self, host: str) -> list[Job]:
        """Return the jobs for a host whose end is not known, the latest first; never of a rejected one."""
        return [job for job in self.jobs(host=host, states=("intended", "running")) if not job.rejected]

    def latest_job(self) -> Job | None:
        """Return the latest job that left evidence: a gate or a run."""
        rows = self.rows(
            f"""{JOBS} WHERE rejections.job_id IS NULL
               AND (EXISTS (SELECT 1 FROM runs WHERE runs.job_id = jobs.job_id)
                    OR EXISTS (SELECT 1 FROM gates WHERE gates.job_id = jobs.job_id)
                    OR EXISTS (SELECT 1 FROM checks WHERE checks.job_id = jobs.job_id))
               ORDER BY intent_at DESC, job_id DESC LIMIT 1"""
        )
        return Job.from_row(rows[0]) if rows else None

    def devices(self, job_id: str) -> dict[str, Device]:
        """Return what each arm of a job computed on, by the arm's name; an arm that was never built has none."""
        rows = self.rows("SELECT * FROM devices JOIN arms USING (device_id) WHERE job_id = ?", (job_id,))
        return {row["arm"]: device_from(row) for row in rows}

    def set_state(
        self, job_id: str, state: str, *, exit_code: int | None = None, error: str = "", next: str = ""
    ) -> Job:
        """Move a job on, for what its journal cannot say (staging failed, lost); one that has come further stays.

        What is not given here stays as the journal told it.

        Returns:
            The job as it is now.
        """
        told = {"exit_code": exit_code, "error": error or None, "next": next or None}
        with self.transaction():
            if RANK[state] > RANK[self.job(job_id).state]:
                self.update_job(job_id, state=state, **{k: v for k, v in told.items() if v is not None})
            return self.job(job_id)

    # -- verdicts -----------------------------------------------------------------------------------------------------

    def verdicts(self, job_id: str) -> list[dict[str, Any]]:
        """Return the rows of a job's verdicts, in the order of its plan."""
        return self.rows("SELECT * FROM verdicts WHERE job_id = ? ORDER BY position", (job_id,))

    def put_verdicts(self, job_id: str, rows: Sequence[Mapping[str, Any]]) -> None:
        """Make these the verdicts of a job; where they are so already nothing is written."""
        with self.transaction():
            if self.verdicts(job_id) == list(rows):
                return
            self._seals.writing("verdicts", ("job_id",), [(job_id,)])
            self.connection.execute("DELETE FROM verdicts WHERE job_id = ?", (job_id,))
            for row in rows:
                self.put("verdicts", row)

    # -- what is known already ----------------------------------------------------------------------------------------

    def up_to_date(
        self, build_id: str, device_id: str, cells: Iterable[Wanted], protocol: int = PROTOCOL
    ) -> set[Wanted]:
        """Return those of `cells` for which a valid run with counted samples exists; a chain's needs a verdict too."""
        rows = self.rows(
            f"""SELECT DISTINCT rows.cell, coalesce(runs.model_id, '') AS model_id, runs.env_digest
               FROM runs JOIN jobs USING (job_id) JOIN arms USING (job_id, arm) JOIN rows USING (run_id)
               LEFT JOIN chain_runs AS c USING (run_id)
               WHERE runs.build_id = ? AND device_id = ? AND runs.status = 'valid' AND jobs.protocol = ?
               AND job_id NOT IN ({UNCOUNTED})
               AND (c.chain IS NULL OR EXISTS (SELECT 1 FROM verdicts AS v
                                               WHERE v.job_id = runs.job_id AND v.chain = c.chain
                                               AND v.verdict <> 'invalid' AND rows.cell IN (v.cell, v.candidate_cell)))
               AND EXISTS (SELECT 1 FROM samples AS s
                           WHERE s.run_id = rows.run_id AND s.cell = rows.cell AND s.discarded IS NULL)""",
            (build_id, device_id, protocol),
        )
        return {(row["cell"], row["model_id"], row["env_digest"]) for row in rows}.intersection(cells)

    def gate_passed(
        self, build_id: str, device_id: str, gate_digest: str, gate: ParityGate, protocol: int = PROTOCOL
    ) -> bool:
        """Tell whether the latest verdict of a gate on this build and device is a pass, with the counts and cases."""
        row = self._latest("gates", "gate_id", "true", (build_id, device_id, gate_digest, protocol))
        if row is None or row["status"] == "failed":
            return False
        counted = gate.expect is None or gate.expect.total == row["total"]
        return counted and gate.cases in ("", row["cases"]) and gate.unsupported in (None, row["unsupported"])

    def check_passed(
        self, build_id: str, device_id: str, gate_digest: str, inputs: Mapping[str, str], protocol: int = PROTOCOL
    ) -> bool:
        """Tell whether the latest verdict of a gate on these models, this build and device is a pass."""
        asked = (build_id, device_id, gate_digest, protocol, canonical(inputs))
        row = self._latest("checks", "check_id", "inputs = ?", asked)
        return row is not None and row["status"] == "passed"

    def _latest(self, table: str, key: str, where: str, asked: Sequence[Any]) -> dict[str, Any] | None:
        rows = self.rows(
            f"""SELECT {table}.* FROM {table} JOIN jobs USING (job_id) JOIN arms USING (job_id, arm, build_id)
               WHERE job_id NOT IN ({REJECTED}) AND build_id = ? AND device_id = ? AND gate_digest = ?
               AND jobs.protocol = ? AND {where} ORDER BY at DESC, {key} DESC LIMIT 1""",
            asked,
        )
        return rows[0] if rows else None

    def expectation(
        self, pin: str, tree: str, gate_digest: str, compute_cap: str
    ) -> tuple[Expectation, int | None, str] | None:
        """Return what the first clean gate recorded.

        Args:
            compute_cap: Device.compute_cap: which cases are supported depends on it.

        Returns:
            Its count, how many cases were unsupported (None: unknown), the digest of all cases ("": unknown).
        """
        rows = self.rows(
            """SELECT total, unsupported, cases FROM expectations
               WHERE pin = ? AND tree = ? AND gate_digest = ? AND compute_cap = ?""",
            (pin, tree, gate_digest, compute_cap),
        )
        if not rows:
            return None
        (row,) = rows
        return Expectation(row["total"], row["total"]), row["unsupported"], row["cases"] or ""

    def case_list(self, cases: str) -> list[str] | None:
        """Return the sorted cases that a gate printed, given their digest; None where the record does not have them."""
        rows = self.rows("SELECT lines FROM case_lists WHERE cases = ?", (cases,))
        return json.loads(rows[0]["lines"]) if rows else None


def _texts(row: tuple[Any, ...]) -> Iterable[Any]:
    return [inflated(value) if type(value) is bytes else value for value in row] if bytes in map(type, row) else row
