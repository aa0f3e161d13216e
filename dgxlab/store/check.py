"""A database by itself: the file, the references, the seals, the evidence, and every identity computed again."""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Iterator
from typing import Any

from dgxlab.agent.parse.judge import judge_check
from dgxlab.model import check_from_json, digest, plan_digest
from dgxlab.store.connect import named_errors
from dgxlab.store.records import device_from, device_row, experiment_row, figure_digest
from dgxlab.store.schema import PUBLISHED
from dgxlab.store.seals import broken
from dgxlab.store.store import Store

EVIDENCE = {
    "sample {key} belongs to no row of a run": """
        SELECT run_id || ' ' || cell || ' ' || metric AS key FROM samples AS s
        WHERE NOT EXISTS (SELECT 1 FROM rows AS r WHERE r.run_id = s.run_id AND r.cell = s.cell)
        GROUP BY run_id, cell, metric""",
    "run {key} is valid and has no counted sample": """
        SELECT run_id AS key FROM runs WHERE status = 'valid' AND NOT EXISTS (
            SELECT 1 FROM samples AS s WHERE s.run_id = runs.run_id AND s.discarded IS NULL)""",
    "cell {key} has a row in a valid run and no counted sample": """
        SELECT rows.cell || ' of run ' || run_id AS key FROM rows JOIN runs USING (run_id)
        WHERE status = 'valid' AND NOT EXISTS (
            SELECT 1 FROM samples AS s WHERE s.run_id = rows.run_id AND s.cell = rows.cell AND s.discarded IS NULL)
        AND EXISTS (SELECT 1 FROM samples AS s WHERE s.run_id = rows.run_id AND s.discarded IS NULL)""",
    "sample {key} is not a finite number": """
        SELECT run_id || ' ' || cell || ' ' || metric || ' ' || ordinal AS key FROM samples
        WHERE value IS NULL OR abs(value) = 9e999""",
    "the samples of {key} have different units": """
        SELECT run_id || ' ' || cell || ' ' || metric AS key FROM samples
        GROUP BY run_id, cell, metric HAVING count(DISTINCT unit) > 1""",
    "the samples of {key} are not numbered from 0 without a gap": """
        SELECT run_id || ' ' || cell || ' ' || metric AS key FROM samples
        GROUP BY run_id, cell, metric HAVING max(ordinal) <> count(*) - 1""",
    "telemetry {key} is no range around its median": """
        SELECT run_id || ' ' || device || ' ' || name AS key FROM telemetry
        WHERE n < 1 OR NOT median BETWEEN min AND max OR abs(min) = 9e999 OR abs(max) = 9e999""",
    "build {key} was made from different trees or cmake definitions": """
        SELECT build_id AS key FROM arms GROUP BY build_id
        HAVING count(DISTINCT json_array(pin, tree, cmake)) > 1""",
    "gate {key} passed without passing all of a positive number of cases": """
        SELECT gate_id AS key FROM gates WHERE status = 'passed'
        AND NOT (coalesce(passed, 0) > 0 AND passed = total AND total = coalesce(expected, total))""",
    "run {key} has a place in a chain that its job's plan does not have": """
        SELECT run_id AS key FROM chain_runs AS c JOIN runs USING (run_id) JOIN jobs USING (job_id)
        WHERE NOT EXISTS (
            SELECT 1 FROM json_each(jobs.plan, '$.steps') AS step
            WHERE json_extract(step.value, '$.kind') = 'chain' AND json_extract(step.value, '$.id') = c.chain
            AND json_extract(step.value, iif(role = 'candidate', '$.candidate.arm', '$.baseline.arm')) = runs.arm)""",
    "imported file {key} has no value": """
        SELECT import_id AS key FROM imports WHERE NOT EXISTS (
            SELECT 1 FROM imported AS i WHERE i.import_id = imports.import_id)""",
    "imported row {key} has no value": """
        SELECT import_id || ' ' || position AS key FROM imported_rows AS r WHERE NOT EXISTS (
            SELECT 1 FROM imported AS i WHERE i.import_id = r.import_id AND i.position = r.position)""",
    "the rows of imported file {key} are not numbered from 0 without a gap": """
        SELECT import_id AS key FROM imported_rows GROUP BY import_id HAVING max(position) <> count(*) - 1""",
    "imported value {key} is not a finite number": """
        SELECT import_id || ' ' || position || ' ' || metric || ' ' || ordinal AS key FROM imported
        WHERE value IS NULL OR abs(value) = 9e999""",
    "the imported values of {key} have different units": """
        SELECT import_id || ' ' || position || ' ' || metric AS key FROM imported
        GROUP BY import_id, position, metric HAVING count(DISTINCT unit) > 1""",
    "the imported values of {key} are not numbered from 0 without a gap": """
        SELECT import_id || ' ' || position || ' ' || metric AS key FROM imported
        GROUP BY import_id, position, metric HAVING max(ordinal) <> count(*) - 1""",
    "published figure {key} is not a finite number": """
        SELECT figure AS key FROM published WHERE value IS NULL OR abs(value) = 9e999""",
    "job {key} is done and has no exit code": """
        SELECT job_id AS key FROM jobs WHERE state = 'done' AND exit_code IS NULL""",
}
"""A sentence for each row that the query finds."""


def check(store: Store) -> list[str]:
    """Return a sentence for everything that is wrong with the database; an empty list is a sound one.

    Raises:
        SpecError: if the file is too damaged to be asked.
    """
    with named_errors(store.path):
        sealed = broken(store.connection)
        return [*_file(store), *_references(store), *sealed, *_evidence(store), *_identities(store)]


def _file(store: Store) -> list[str]:
    found = store.rows("PRAGMA integrity_check")
    return [f"{store.path}: {row['integrity_check']}" for row in found if row["integrity_check"] != "ok"]


def _references(store: Store) -> list[str]:
    found = store.rows(
        """SELECT "table", parent, count(*) AS broken FROM pragma_foreign_key_check GROUP BY 1, 2 ORDER BY 1, 2"""
    )
    return [f"{row['broken']} rows of {row['table']} refer to {row['parent']} that are not there" for row in found]


def _evidence(store: Store) -> list[str]:
    return [sentence.format(**row) for sentence, sql in EVIDENCE.items() for row in store.rows(f"{sql} ORDER BY key")]


def _identities(store: Store) -> list[str]:
    """Compute every key that is a digest from the content beside it."""
    wrong = []
    for row in store.rows("SELECT cell, tool, params, fixed FROM cells ORDER BY cell"):
        if digest([row["tool"], _load(row["params"]), _load(row["fixed"])], 16) != row["cell"]:
            wrong.append(f"cell {row['cell']} is not the digest of its parameters")
    for row in store.rows("SELECT * FROM experiments ORDER BY digest"):
        if experiment_row({"name": None, "hypothesis": None, **_load(row["spec"])}) != row:
            wrong.append(f"experiment {row['digest']} is not what its spec says")
    for row in store.rows("SELECT * FROM devices ORDER BY device_id"):
        if device_row(device_from(row)) != row:
            wrong.append(f"device {row['device_id']} is not the digest of what it is")
    for row in store.rows("SELECT cases, lines FROM case_lists ORDER BY cases"):
        if digest(_load(row["lines"])) != row["cases"]:
            wrong.append(f"case list {row['cases']} is not the digest of its lines")
    for row in store.rows("SELECT job_id, plan, plan_digest FROM jobs ORDER BY job_id"):
        if plan_digest(_load(row["plan"])) != row["plan_digest"]:
            wrong.append(f"the plan of job {row['job_id']} is not what its digest says")
    return [*wrong, *_checks(store), *_figures(store), *_imports(store)]


def _checks(store: Store) -> Iterator[str]:
    """Judge every gate on a model again."""
    for row in store.rows("SELECT check_id, gate, readings, reasons FROM checks ORDER BY check_id"):
        gate = check_from_json(_load(row["gate"]))
        if list(judge_check(gate, _load(row["readings"]))) != _load(row["reasons"]):
            yield f"gate {row['check_id']} is not what its readings say"


def _figures(store: Store) -> Iterator[str]:
    for table in PUBLISHED:
        for row in store.rows(f"SELECT * FROM {table} ORDER BY figure"):  # noqa: S608 - names of our own
            if figure_digest(row) != row["figure"]:
                yield f"figure {row['figure']} of {table} is not the digest of what it says"


def _imports(store: Store) -> Iterator[str]:
    for row in store.rows("SELECT import_id, sha256, size, content FROM imports ORDER BY import_id"):
        try:
            content = zlib.decompress(row["content"])
        except zlib.error:
            yield f"the copy of imported file {row['import_id']} cannot be unpacked"
            continue
        if (len(content), hashlib.sha256(content).hexdigest()) != (row["size"], row["sha256"]):
            yield f"the copy of imported file {row['import_id']} is not the file that was imported"


def _load(text: str) -> Any:
    return json.loads(text)
