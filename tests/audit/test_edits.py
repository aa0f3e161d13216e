"""Whatever another program does to a record is found: every column of every table, and what a person would think of."""

# ruff: noqa: S608 - names of tables and columns are the record's own

import pytest

from dgxlab import audit
from dgxlab.store import Damaged, Store, seals

UNCHECKED = ("_sqlite_migrations",)
"""When a migration was applied is no evidence."""

AB = "20261122-110457"
LAST = "SELECT max(job_id) FROM jobs"
ONE_RUN = "(SELECT min(run_id) FROM runs WHERE tool = 'llama-bench')"
OPS_RUN = "(SELECT min(run_id) FROM runs WHERE tool = 'backend-ops')"


def is_noticed(store: Store) -> bool:
    """Whether a record is not as it was: by the seals, which are quick, or by what can be computed from its rows."""
    try:
        return any(True for _ in seals.broken(store.connection)) or bool(audit.check(store))
    except Damaged:
        return True


def test_the_piece_is_sound(piece: Store) -> None:
    assert audit.check(piece) == []
    empty = [table for table in tables(piece) if not piece.rows(f"SELECT 1 FROM {table} LIMIT 1")]
    assert empty == ["fleet_verdicts", "fleets", "notes", "rejections", "tries", "try_ends", "try_sessions"]


def test_the_shipped_record_is_sound(shipped: Store) -> None:
    assert audit.check(shipped) == []


def tables(store: Store) -> list[str]:
    rows = store.rows("SELECT name FROM sqlite_schema WHERE type = 'table' ORDER BY name")
    return [row["name"] for row in rows if row["name"] not in UNCHECKED]


def test_every_edit_of_a_column_is_found(piece: Store) -> None:
    missed, edits = [], 0
    for table in tables(piece):
        for column in piece.rows("SELECT name, type FROM pragma_table_info(?)", (table,)):
            name = column["name"]
            changed = {
                "TEXT": f"{name} || ' '",
                "INTEGER": f"{name} + 1000",
                "REAL": f"iif({name} = 0, 0.5, {name} * 1.001)",
                "BLOB": "zeroblob(9)",
            }[column["type"]]
            key = piece.rows("SELECT group_concat(name) AS key FROM pragma_table_info(?) WHERE pk", (table,))[0]["key"]
            where = f"({key}) = (SELECT {key} FROM {table} WHERE {name} IS NOT NULL LIMIT 1)"
            piece.connection.execute("SAVEPOINT edit")
            done = piece.connection.execute(f"UPDATE {table} SET {name} = {changed} WHERE {where}").rowcount
            if done and not is_noticed(piece):
                missed.append(f"{table}.{name}")
            edits += done
            piece.connection.execute("ROLLBACK TO edit")
    assert missed == []
    assert edits >= 150


def test_every_deleted_row_is_found(piece: Store) -> None:
    for table in tables(piece):
        for end in ("min", "max"):
            key = piece.rows("SELECT name FROM pragma_table_info(?) WHERE pk = 1", (table,))[0]["name"]
            piece.connection.execute("SAVEPOINT edit")
            deleted = piece.connection.execute(f"DELETE FROM {table} WHERE {key} = (SELECT {end}({key}) FROM {table})")
            assert is_noticed(piece) or not deleted.rowcount, f"the {end} of {table}"
            piece.connection.execute("ROLLBACK TO edit")


def whole(job: str) -> list[str]:
    """Return statements that delete a job with all its rows and its seal, given SQL for its id."""
    parts = ("rows", "samples", "telemetry", "flags", "chain_runs")
    return [
        f"CREATE TEMP TABLE gone AS SELECT ({job}) AS job_id",
        *(f"DELETE FROM {t} WHERE run_id IN (SELECT run_id FROM runs JOIN gone USING (job_id))" for t in parts),
        *(
            f"DELETE FROM {t} WHERE job_id IN (SELECT job_id FROM gone)"
            for t in ("arms", "inputs", "gates", "checks", "runs", "verdicts", "jobs")
        ),
        "DELETE FROM seals WHERE unit IN (SELECT 'job/' || job_id FROM gone)",
    ]


def replaced(column: str, what: str, where: str = "") -> list[str]:
    """Return the statement that replaces something in the texts of a deflated column."""
    table, _, name = column.partition(".")
    return [f"UPDATE {table} SET {name} = deflated(replace(inflated({name}), {what})) {where}"]


SEALED_ONLY = {
    "samples and the tool's row changed together": [
        *replaced("rows.raw", '\'"time_us":"\', \'"time_us":"1\'', f"WHERE run_id = {OPS_RUN}"),
        f"UPDATE samples SET value = ('1' || value) + 0.0 WHERE run_id = {OPS_RUN} AND metric = 'time_us'",
    ],
    "the first job deleted with its seal": whole("SELECT min(job_id) FROM jobs"),
    "the last job deleted with its seal": whole(LAST),
    "the last job deleted, its seal kept": whole(LAST)[:-1],
    "a last run deleted with all its rows": [
        f"DELETE FROM {table} WHERE run_id = (SELECT run_id FROM runs WHERE job_id = ({LAST}) ORDER BY position DESC)"
        for table in ("rows", "samples", "telemetry", "flags", "chain_runs", "runs")
    ],
    "an imported file deleted with its seal": [
        "DELETE FROM imports",
        "DELETE FROM seals WHERE unit LIKE 'import/%'",
    ],
    "all seals deleted": ["DELETE FROM seals"],
    "a seal added": ["INSERT INTO seals SELECT 'job/x', content, seal FROM seals LIMIT 1"],
    "telemetry deleted": ["DELETE FROM telemetry WHERE name = 'clocks.sm'"],
    "a flag deleted": ["DELETE FROM flags WHERE kind = 'sw_power_cap'"],
}
"""What the seals alone find, besides an edit of any one column or a row."""

EDITS = {
    "samples": """
        value = value * 1.1; value = value / 2 WHERE unit = 'us'; discarded = NULL; unit = 'ms' WHERE unit = 'us';
        metric = 'speed' WHERE metric = 'avg_ts'""",
    "runs": """
        env = '{"A":"1"}'; env_digest = '0123456789abcdef'; rc = 1; rc = NULL, signal = 9;
        status = 'valid' WHERE status = 'discarded'; tool = 'batched-bench' WHERE tool = 'llama-bench';
        model_id = NULL; position = position + 1; before = deflated(json_set(inflated(before), '$.boot_id', 'x'))""",
    "chain_runs": """
        cycle = 9 WHERE cycle = 2; role = 'burn-in' WHERE role = 'baseline' AND cycle = 1; chain = 'chain:9'""",
    "gates": """
        passed = 1, total = 1, expected = 1; expected = NULL; expected_cases = '0123456789abcdef'; overridden = 1;
        unsupported = 0; rc = 1; status = 'failed'; failed = '["MUL_MAT(x)"]'; flaky = '["MUL_MAT(x)"]'; op = 'ADD';
        backend = 'CPU'; argv = replace(argv, 'MUL_MAT', 'ADD'); env = '{"GGML_CUDA_W4A16":"0"}';
        gate_digest = '0123456789abcdef'""",
    "checks": """
        readings = replace(readings, '"n_gen":64', '"n_gen":63'); status = 'failed', reasons = '["x"]';
        gate = json_set(gate, '$.limit_s', 1.0); inputs = '{}'; commands = replace(commands, '--temp', '--top-k');
        commands = replace(commands, '"rc":0', '"rc":1'); env = '{}'; step = 'gate:9'""",
    "arms": """
        pin = replace(pin, 'e', 'f'); tree = replace(tree, '2', '3'); series = '[]'; dirty = 1 - dirty;
        cmake = json_set(cmake, '$.GGML_CUDA_FA', 'ON'); toolchain = json_set(toolchain, '$.cc', 'clang')""",
    "inputs": """recipe = json_set(recipe, '$.n_layer', 99); path = '/other' || path""",
    "jobs": """
        facts = replace(facts, 'NVIDIA H200', 'NVIDIA B200');
        facts = replace(facts, '"uuid":"GPU-', '"uuid":"GPU-0'); host_id = 'other'; boot_id = 'other';
        state = 'done' WHERE state = 'failed'; exit_code = 4 WHERE state = 'done'; name = 'other'; kind = 'gate';
        protocol = 3 - protocol""",
    "experiments": """name = 'other'; hypothesis = 'other'; spec = json_set(spec, '$.name', 'other')""",
    "devices": """names = '["NVIDIA B200"]'""",
    "cells": """params = json_set(params, '$.n_prompt', 99); label = 'other'""",
    "verdicts": """verdict = 'same'; effect = effect * 2; promoted = 1 WHERE verdict = 'faster'""",
    "imports": """content = zeroblob(9); size = size + 1""",
}
"""By table, changes of a column in all rows."""

COMPUTED = {
    **{f"{t}: {edit.strip()}": [f"UPDATE {t} SET {edit}"] for t, edits in EDITS.items() for edit in edits.split(";")},
    "one sample scaled": [f"UPDATE samples SET value = value * 2 WHERE run_id = {ONE_RUN} AND ordinal = 1"],
    "a slow sample discarded": [
        f"UPDATE samples SET discarded = 'an outlier' WHERE run_id = {ONE_RUN} AND ordinal = 2"
    ],
    "cold samples deleted": ["DELETE FROM samples WHERE discarded IS NOT NULL"],
    "two samples swapped": [
        f"UPDATE samples SET ordinal = 100 + ordinal WHERE run_id = {ONE_RUN}",
        f"UPDATE samples SET ordinal = 5 - (ordinal - 100) WHERE run_id = {ONE_RUN}",
    ],
    "a sample added": ["INSERT INTO samples SELECT run_id, cell, 'flops', 7, 1, 'FLOPS', NULL FROM rows LIMIT 1"],
    "the tool's row changed": replaced("rows.raw", "'samples_ns\":[', 'samples_ns\":[1'"),
    "a row deleted with its samples": [
        f"DELETE FROM {t} WHERE (run_id, cell) = (SELECT run_id, max(cell) FROM rows WHERE run_id = {OPS_RUN})"
        for t in ("samples", "rows")
    ],
    "a row given to another cell": [
        "UPDATE rows SET cell = (SELECT max(cell) FROM cells) WHERE cell = (SELECT min(cell) FROM rows)"
    ],
    "a run's arguments changed": replaced("runs.argv", "'-ngl', '-nkvo'", "WHERE tool = 'llama-bench'"),
    "a run's program changed": replaced("runs.argv", "'/builds/', '/other/'"),
    "a valid run made discarded": [
        f"UPDATE runs SET status = 'discarded', reason = 'x' WHERE run_id LIKE '{AB}%' AND position = 9"
    ],
    "a run given to the other arm": [
        f"UPDATE runs SET arm = (SELECT max(arm) FROM arms WHERE arms.job_id = runs.job_id) WHERE run_id LIKE '{AB}%'"
    ],
    "a run in the middle deleted with all its rows": [
        f"DELETE FROM {table} WHERE run_id = (SELECT run_id FROM runs WHERE job_id LIKE '{AB}%' AND position = 5)"
        for table in ("rows", "samples", "telemetry", "flags", "chain_runs", "runs")
    ],
    "a run beside another GPU": replaced("runs.after", "'GPU-', 'GPU-0'"),
    "a run's raw file of another step": replaced("runs.raw", "'raw/run-', 'raw/walk-'"),
    "a run taken out of its chain": ["DELETE FROM chain_runs WHERE cycle = 1"],
    "telemetry of another GPU": [
        "UPDATE telemetry SET device = 'GPU-0' WHERE device LIKE 'GPU-%' AND name = 'clocks.sm'"
    ],
    "an arm on another device": ["UPDATE arms SET device_id = (SELECT max(device_id) FROM devices)"],
    "a plan changed": replaced("jobs.plan", '\'"-r","\', \'"-r","1\''),
    "an experiment deleted": [
        "DELETE FROM experiments WHERE digest = (SELECT json_extract(inflated(plan), '$.baseline') FROM jobs"
        f" WHERE job_id LIKE '{AB}%')"
    ],
    "a cell added": ["INSERT INTO cells SELECT '0', tool, label, params, fixed FROM cells LIMIT 1"],
    "a case list of other cases": ["INSERT INTO case_lists VALUES ('0', deflated('[]'))"],
    "a verdict deleted": ["DELETE FROM verdicts WHERE position = 0"],
}
"""What is found although everything was sealed again."""


@pytest.mark.parametrize("edit", [*SEALED_ONLY, *COMPUTED])
def test_an_edit_is_found(piece: Store, edit: str) -> None:
    before = piece.connection.total_changes
    for statement in {**SEALED_ONLY, **COMPUTED}[edit]:
        piece.connection.execute(statement)
    assert piece.connection.total_changes > before
    if edit in COMPUTED:
        seals.seal_all(piece.connection)
    assert is_noticed(piece)
