"""The tables of results.db, and what happens when the same key is written twice.

Keys are natural texts, so that two databases can be merged. What one job saw is keyed by that job: the same build or
model identity may be found by two jobs with other binaries, another path or other series names, and both are true.
What stands above `UPSERT` is what migrations make; once released it is not edited either.
JSON columns hold `model.canonical` text: equal values are equal texts. Times are unix seconds, `seconds` durations.
"""

from __future__ import annotations

from collections.abc import Mapping

APPLICATION_ID = 0x6467786C
"""`dgxl` in the file's header: tells this database from any other SQLite file."""

VERSION = 10
"""PRAGMA user_version of a database to which every migration was applied."""

SCHEMA = "4cb0cc529643fcd2"
"""`connect.schema_digest` of such a database: its tables, indexes, views and triggers."""

JOBS = (
    """CREATE TABLE hosts (
        host_id TEXT NOT NULL PRIMARY KEY,
        name TEXT NOT NULL,
        hostname TEXT NOT NULL,
        facts TEXT NOT NULL CHECK (json_valid(facts)),
        seen REAL NOT NULL
    ) STRICT""",
    """CREATE TABLE experiments (
        digest TEXT NOT NULL PRIMARY KEY,
        name TEXT NOT NULL,
        hypothesis TEXT NOT NULL,
        spec TEXT NOT NULL CHECK (json_valid(spec))
    ) STRICT""",
    """CREATE TABLE jobs (
        job_id TEXT NOT NULL PRIMARY KEY,
        kind TEXT NOT NULL,
        name TEXT NOT NULL,
        experiment TEXT REFERENCES experiments (digest) ON DELETE RESTRICT,
        host TEXT NOT NULL,
        host_id TEXT REFERENCES hosts (host_id) ON DELETE RESTRICT,
        plan TEXT NOT NULL CHECK (json_valid(plan)),
        plan_digest TEXT NOT NULL,
        intent_at REAL NOT NULL,
        state TEXT NOT NULL CHECK (state IN ('intended', 'running', 'done', 'failed', 'cancelled', 'lost')),
        exit_code INTEGER,
        error TEXT NOT NULL DEFAULT '',
        next TEXT NOT NULL DEFAULT '',
        details TEXT NOT NULL DEFAULT '',
        boot_id TEXT,
        agent_version TEXT,
        protocol INTEGER NOT NULL,
        journal_bytes INTEGER NOT NULL DEFAULT 0,
        journal_lines INTEGER NOT NULL DEFAULT 0,
        journal_seq INTEGER NOT NULL DEFAULT 0 CHECK (journal_seq >= journal_lines),
        dgxlab_version TEXT NOT NULL,
        facts TEXT CHECK (facts IS NULL OR json_valid(facts)),
        finished_at REAL
    ) STRICT""",
    "CREATE INDEX jobs_host ON jobs (host, state)",
)

EVIDENCE = (
    """CREATE TABLE arms (
        job_id TEXT NOT NULL REFERENCES jobs (job_id) ON DELETE RESTRICT,
        arm TEXT NOT NULL,
        build_id TEXT NOT NULL,
        pin TEXT NOT NULL,
        tree TEXT NOT NULL,
        commit_id TEXT NOT NULL,
        series TEXT NOT NULL CHECK (json_valid(series)),
        dirty INTEGER NOT NULL CHECK (dirty IN (0, 1)),
        cmake TEXT NOT NULL CHECK (json_valid(cmake)),
        toolchain TEXT NOT NULL CHECK (json_valid(toolchain)),
        binaries TEXT NOT NULL CHECK (json_valid(binaries)),
        libraries TEXT NOT NULL CHECK (json_valid(libraries)),
        cmake_cache TEXT NOT NULL,
        log TEXT NOT NULL,
        seconds REAL NOT NULL,
        reused INTEGER NOT NULL CHECK (reused IN (0, 1)),
        PRIMARY KEY (job_id, arm),
        UNIQUE (job_id, arm, build_id)
    ) STRICT""",
    "CREATE INDEX arms_build ON arms (build_id)",
    """CREATE TABLE inputs (
        job_id TEXT NOT NULL REFERENCES jobs (job_id) ON DELETE RESTRICT,
        model_id TEXT NOT NULL,
        name TEXT NOT NULL,
        path TEXT NOT NULL,
        size INTEGER NOT NULL,
        digest TEXT NOT NULL,
        recipe TEXT CHECK (recipe IS NULL OR json_valid(recipe)),
        seconds REAL NOT NULL,
        reused INTEGER CHECK (reused IN (0, 1)),
        PRIMARY KEY (job_id, model_id)
    ) STRICT""",
    "CREATE INDEX inputs_model ON inputs (model_id)",
    """CREATE TABLE cells (
        cell TEXT NOT NULL PRIMARY KEY,
        tool TEXT NOT NULL,
        label TEXT NOT NULL,
        params TEXT NOT NULL CHECK (json_valid(params)),
        fixed TEXT NOT NULL CHECK (json_valid(fixed))
    ) STRICT""",
    """CREATE TABLE gates (
        gate_id TEXT NOT NULL PRIMARY KEY,
        job_id TEXT NOT NULL REFERENCES jobs (job_id) ON DELETE RESTRICT,
        build_id TEXT NOT NULL,
        host_id TEXT NOT NULL REFERENCES hosts (host_id) ON DELETE RESTRICT,
        arm TEXT NOT NULL,
        op TEXT NOT NULL,
        backend TEXT NOT NULL,
        gate_digest TEXT NOT NULL,
        rc INTEGER,
        passed INTEGER,
        total INTEGER,
        unsupported INTEGER,
        expected INTEGER,
        status TEXT NOT NULL CHECK (status IN ('passed', 'failed', 'flaky')),
        reasons TEXT NOT NULL CHECK (json_valid(reasons)),
        flaky TEXT NOT NULL CHECK (json_valid(flaky)),
        failed TEXT NOT NULL CHECK (json_valid(failed)),
        argv TEXT NOT NULL CHECK (json_valid(argv)),
        env TEXT NOT NULL CHECK (json_valid(env)),
        raw TEXT NOT NULL CHECK (json_valid(raw)),
        seconds REAL NOT NULL,
        at REAL NOT NULL,
        FOREIGN KEY (job_id, arm, build_id) REFERENCES arms (job_id, arm, build_id) ON DELETE RESTRICT
    ) STRICT""",
    "CREATE INDEX gates_build ON gates (build_id, host_id, gate_digest)",
    """CREATE TABLE expectations (
        pin TEXT NOT NULL,
        tree TEXT NOT NULL,
        gate_digest TEXT NOT NULL,
        op TEXT NOT NULL,
        backend TEXT NOT NULL,
        total INTEGER NOT NULL CHECK (total > 0),
        unsupported INTEGER,
        job_id TEXT NOT NULL REFERENCES jobs (job_id) ON DELETE RESTRICT,
        PRIMARY KEY (pin, tree, gate_digest)
    ) STRICT""",
    """CREATE TABLE runs (
        run_id TEXT NOT NULL PRIMARY KEY,
        job_id TEXT NOT NULL REFERENCES jobs (job_id) ON DELETE RESTRICT,
        build_id TEXT NOT NULL,
        host_id TEXT NOT NULL REFERENCES hosts (host_id) ON DELETE RESTRICT,
        arm TEXT NOT NULL,
        tool TEXT NOT NULL,
        model_id TEXT,
        position INTEGER NOT NULL,
        argv TEXT NOT NULL CHECK (json_valid(argv)),
        env TEXT NOT NULL CHECK (json_valid(env)),
        env_digest TEXT NOT NULL,
        rc INTEGER,
        signal INTEGER,
        started REAL NOT NULL,
        seconds REAL NOT NULL,
        status TEXT NOT NULL CHECK (status IN ('valid', 'discarded', 'failed')),
        reason TEXT NOT NULL CHECK (status = 'valid' OR reason <> ''),
        before TEXT NOT NULL CHECK (json_valid(before)),
        after TEXT NOT NULL CHECK (json_valid(after)),
        raw TEXT NOT NULL CHECK (json_valid(raw)),
        FOREIGN KEY (job_id, arm, build_id) REFERENCES arms (job_id, arm, build_id) ON DELETE RESTRICT,
        FOREIGN KEY (job_id, model_id) REFERENCES inputs (job_id, model_id) ON DELETE RESTRICT
    ) STRICT""",
    "CREATE INDEX runs_job ON runs (job_id, position)",
    "CREATE INDEX runs_build ON runs (build_id, host_id)",
    """CREATE TABLE rows (
        run_id TEXT NOT NULL REFERENCES runs (run_id) ON DELETE RESTRICT,
        cell TEXT NOT NULL REFERENCES cells (cell) ON DELETE RESTRICT,
        raw TEXT NOT NULL CHECK (json_valid(raw)),
        PRIMARY KEY (run_id, cell)
    ) STRICT""",
    "CREATE INDEX rows_cell ON rows (cell)",
    # the key is most of a sample: without a rowid it is stored once, not twice
    """CREATE TABLE samples (
        run_id TEXT NOT NULL,
        cell TEXT NOT NULL,
        metric TEXT NOT NULL,
        ordinal INTEGER NOT NULL CHECK (ordinal >= 0),
        value REAL NOT NULL CHECK (value > -9e999 AND value < 9e999),
        unit TEXT NOT NULL,
        discarded TEXT CHECK (discarded <> ''),
        PRIMARY KEY (run_id, cell, metric, ordinal),
        FOREIGN KEY (run_id, cell) REFERENCES rows (run_id, cell) ON DELETE RESTRICT
    ) STRICT, WITHOUT ROWID""",
    """CREATE VIEW builds AS
        SELECT build_id, pin, tree, commit_id, series, dirty, cmake, toolchain, binaries, libraries, cmake_cache,
               seconds, job_id
        FROM arms AS a
        WHERE NOT EXISTS (
            SELECT 1 FROM arms AS b WHERE b.build_id = a.build_id AND (b.job_id, b.arm) < (a.job_id, a.arm))""",
    """CREATE VIEW models AS
        SELECT model_id, name, path, size, digest, recipe, job_id
        FROM inputs AS a
        WHERE NOT EXISTS (SELECT 1 FROM inputs AS b WHERE b.model_id = a.model_id AND b.job_id < a.job_id)""",
)

APPEND_ONLY = ("arms", "inputs", "gates", "runs", "rows", "samples")
"""Evidence: never changed and never deleted. A discard is a row with a reason, a correction a new row."""

TELEMETRY = {
    # a counter's growth during a run is one number; what nobody could tell has no row
    "telemetry": """CREATE TABLE telemetry (
        run_id TEXT NOT NULL REFERENCES runs (run_id) ON DELETE RESTRICT,
        device TEXT NOT NULL,
        name TEXT NOT NULL,
        unit TEXT NOT NULL,
        n INTEGER NOT NULL CHECK (n > 0),
        median REAL NOT NULL CHECK (median BETWEEN min AND max),
        min REAL NOT NULL CHECK (min > -9e999),
        max REAL NOT NULL CHECK (max < 9e999),
        PRIMARY KEY (run_id, device, name)
    ) STRICT, WITHOUT ROWID""",
    "flags": """CREATE TABLE flags (
        run_id TEXT NOT NULL REFERENCES runs (run_id) ON DELETE RESTRICT,
        device TEXT NOT NULL,
        kind TEXT NOT NULL,
        hard INTEGER NOT NULL CHECK (hard IN (0, 1)),
        reason TEXT NOT NULL CHECK (reason <> ''),
        PRIMARY KEY (run_id, device, kind)
    ) STRICT, WITHOUT ROWID""",
}
"""By table, each append-only: under which conditions a run took place, and what speaks against it."""

ROOFLINE = "roofline"
"""The one kind of flag that no host gives: ingest judges a run by what it knows of its GPU, in its own words."""

CHAIN_RUNS = """CREATE TABLE chain_runs (
        run_id TEXT NOT NULL PRIMARY KEY REFERENCES runs (run_id) ON DELETE RESTRICT,
        chain TEXT NOT NULL,
        role TEXT NOT NULL CHECK (role IN ('burn-in', 'baseline', 'candidate')),
        cycle INTEGER NOT NULL CHECK (cycle >= (role <> 'baseline'))
    ) STRICT"""
"""Append-only: a run's place in a chain of its job's plan."""

# no reference to cells: a chain that was never begun has its verdicts too, and its cells are only in the plan
VERDICTS = """CREATE TABLE verdicts (
        job_id TEXT NOT NULL REFERENCES jobs (job_id) ON DELETE RESTRICT,
        chain TEXT NOT NULL,
        cell TEXT NOT NULL,
        metric TEXT NOT NULL,
        position INTEGER NOT NULL,
        host_id TEXT REFERENCES hosts (host_id) ON DELETE RESTRICT,
        model_id TEXT,
        baseline_arm TEXT NOT NULL,
        candidate_arm TEXT NOT NULL,
        candidate_cell TEXT NOT NULL,
        screen INTEGER NOT NULL CHECK (screen IN (0, 1)),
        better TEXT NOT NULL CHECK (better IN ('higher', 'lower')),
        verdict TEXT NOT NULL CHECK (verdict IN ('faster', 'slower', 'same', 'inconclusive', 'invalid')),
        promoted INTEGER NOT NULL CHECK (promoted = 0 OR (promoted = 1 AND verdict = 'faster' AND NOT screen)),
        effect REAL CHECK ((effect IS NULL) = (verdict = 'invalid')),
        ci_low REAL,
        ci_high REAL CHECK ((ci_low IS NULL) = (ci_high IS NULL)),
        confidence REAL NOT NULL,
        mde REAL,
        p REAL,
        spread REAL,
        k_to_settle INTEGER,
        cycles INTEGER NOT NULL CHECK (cycles >= 0),
        valid_cycles INTEGER NOT NULL CHECK (valid_cycles BETWEEN 0 AND cycles),
        baseline REAL,
        candidate REAL,
        noise_sigma REAL,
        noise_cycles INTEGER,
        noise_session TEXT,
        flaws TEXT NOT NULL CHECK (iif(json_valid(flaws), json_type(flaws) = 'object', 0)),
        reasons TEXT NOT NULL CHECK (iif(json_valid(reasons), json_type(reasons) = 'array', 0)),
        PRIMARY KEY (job_id, chain, cell, metric),
        FOREIGN KEY (job_id, model_id) REFERENCES inputs (job_id, model_id) ON DELETE RESTRICT
    ) STRICT"""
"""What chains say, computed from the evidence: may be replaced by computing it again, by nothing else."""

_FIGURE = """
        figure TEXT NOT NULL PRIMARY KEY,
        source_doc TEXT NOT NULL CHECK (source_doc <> ''),
        host TEXT NOT NULL,
        engine TEXT NOT NULL,
        pin TEXT NOT NULL,
        model TEXT NOT NULL,
        quant TEXT NOT NULL,
        tool TEXT NOT NULL,
        test TEXT NOT NULL,
        metric TEXT NOT NULL,
        value {value},
        unit TEXT NOT NULL,
        stddev REAL CHECK (stddev > -9e999 AND stddev < 9e999),
        notes TEXT NOT NULL,
        line INTEGER NOT NULL CHECK (line > 0)
"""

PUBLISHED = {
    "published": f"""CREATE TABLE published (
        {_FIGURE.format(value="REAL NOT NULL CHECK (value > -9e999 AND value < 9e999)").strip()}
    ) STRICT""",
    "published_gates": f"""CREATE TABLE published_gates (
        {_FIGURE.format(value="TEXT NOT NULL").strip()}
    ) STRICT""",
}
"""By table, each append-only: what documents say, never mixed with what was measured. `records.figure_digest` makes the
key, of everything but the line."""

IMPORTS = """CREATE TABLE imports (
        import_id TEXT NOT NULL PRIMARY KEY CHECK (import_id = substr(sha256, 1, 16)),
        sha256 TEXT NOT NULL CHECK (length(sha256) = 64),
        size INTEGER NOT NULL CHECK (size > 0),
        tool TEXT NOT NULL,
        format TEXT NOT NULL,
        provenance TEXT NOT NULL CHECK (iif(json_valid(provenance), json_type(provenance) = 'object', 0)),
        notes TEXT NOT NULL CHECK (iif(json_valid(notes), json_type(notes) = 'array', 0)),
        content BLOB NOT NULL,
        name TEXT NOT NULL,
        at REAL NOT NULL
    ) STRICT"""
"""Files of raw output that other hands made: `content` is the whole file, deflated, `sha256` and `size` those of the
file itself. What it says never changes; who brought it first under what name is settled like a job's intent."""

IMPORTED = {
    "imported_rows": """CREATE TABLE imported_rows (
        import_id TEXT NOT NULL REFERENCES imports (import_id) ON DELETE RESTRICT,
        position INTEGER NOT NULL CHECK (position >= 0),
        label TEXT NOT NULL CHECK (label <> ''),
        params TEXT NOT NULL CHECK (iif(json_valid(params), json_type(params) = 'object', 0)),
        PRIMARY KEY (import_id, position)
    ) STRICT, WITHOUT ROWID""",
    "imported": """CREATE TABLE imported (
        import_id TEXT NOT NULL,
        position INTEGER NOT NULL,
        metric TEXT NOT NULL,
        ordinal INTEGER NOT NULL CHECK (ordinal >= 0),
        value REAL NOT NULL CHECK (value > -9e999 AND value < 9e999),
        unit TEXT NOT NULL,
        discarded TEXT CHECK (discarded <> ''),
        PRIMARY KEY (import_id, position, metric, ordinal),
        FOREIGN KEY (import_id, position) REFERENCES imported_rows (import_id, position) ON DELETE RESTRICT
    ) STRICT, WITHOUT ROWID""",
}
"""By table, each append-only: the rows of an imported file in its order, and the values in them as printed."""

CHECKS = (
    """CREATE TABLE checks (
        check_id TEXT NOT NULL PRIMARY KEY,
        job_id TEXT NOT NULL REFERENCES jobs (job_id) ON DELETE RESTRICT,
        build_id TEXT NOT NULL,
        host_id TEXT NOT NULL REFERENCES hosts (host_id) ON DELETE RESTRICT,
        arm TEXT NOT NULL,
        step TEXT NOT NULL,
        kind TEXT NOT NULL,
        gate TEXT NOT NULL CHECK (iif(json_valid(gate), json_type(gate) = 'object', 0)),
        gate_digest TEXT NOT NULL,
        inputs TEXT NOT NULL CHECK (iif(json_valid(inputs), json_type(inputs) = 'object', 0)),
        env TEXT NOT NULL CHECK (iif(json_valid(env), json_type(env) = 'object', 0)),
        commands TEXT NOT NULL CHECK (iif(json_valid(commands), json_type(commands) = 'array', 0)),
        readings TEXT NOT NULL CHECK (iif(json_valid(readings), json_type(readings) = 'object', 0)),
        status TEXT NOT NULL CHECK (status IN ('passed', 'failed')),
        reasons TEXT NOT NULL CHECK ((status = 'passed') = (json_array_length(reasons) = 0)),
        raw TEXT NOT NULL CHECK (iif(json_valid(raw), json_type(raw) = 'object', 0)),
        seconds REAL NOT NULL,
        at REAL NOT NULL,
        FOREIGN KEY (job_id, arm, build_id) REFERENCES arms (job_id, arm, build_id) ON DELETE RESTRICT
    ) STRICT""",
    "CREATE INDEX checks_build ON checks (build_id, host_id, gate_digest)",
)
"""Append-only: gates on a whole model. `commands` has each launch's argv and environment, `readings` what it showed;
`env` is the arm's, `inputs` says by name which models it read."""

DEVICES = """CREATE TABLE devices (
        device_id TEXT NOT NULL PRIMARY KEY,
        host_id TEXT NOT NULL,
        names TEXT NOT NULL CHECK (json_valid(names)),
        uuids TEXT NOT NULL CHECK (json_valid(uuids)),
        driver TEXT NOT NULL,
        compute_cap TEXT NOT NULL,
        cpus INTEGER NOT NULL CHECK (cpus >= 0)
    ) STRICT"""
"""What computed, as `model.Device` says it; an arm of a job has one."""

CASE_LISTS = """CREATE TABLE case_lists (
        cases TEXT NOT NULL PRIMARY KEY,
        lines TEXT NOT NULL CHECK (iif(json_valid(lines), json_type(lines) = 'array', 0))
    ) STRICT"""
"""Every case that parity gates printed, supported or not, sorted; `cases` is the digest of `lines`."""

HOST = "host_id TEXT NOT NULL REFERENCES hosts (host_id) ON DELETE RESTRICT,"

REBUILT: Mapping[str, Mapping[str, str]] = {
    "arms": {
        "build_id TEXT NOT NULL,": "build_id TEXT NOT NULL,\n        "
        "device_id TEXT NOT NULL REFERENCES devices (device_id) ON DELETE RESTRICT,"
    },
    "jobs": {"host_id TEXT REFERENCES hosts (host_id) ON DELETE RESTRICT,": "host_id TEXT,"},
    "gates": {
        HOST: "overridden INTEGER NOT NULL CHECK (overridden IN (0, 1)),\n        cases TEXT,",
        "expected INTEGER,": "expected INTEGER,\n        expected_cases TEXT,",
    },
    "checks": {HOST: ""},
    "runs": {HOST: ""},
    "verdicts": {"host_id TEXT REFERENCES hosts (host_id) ON DELETE RESTRICT,": ""},
}
"""By table, what m008 changes in its text: a device is known by (job_id, arm), and a host by the jobs that it did.

gates.cases is the digest of what was printed and expected_cases of what was demanded, both NULL where it is not known;
overridden: the command line changed what the gate demands.
"""

REINDEXED = (
    "CREATE INDEX arms_device ON arms (device_id)",
    "CREATE INDEX gates_build ON gates (build_id, gate_digest)",
    "CREATE INDEX runs_build ON runs (build_id)",
    "CREATE INDEX checks_build ON checks (build_id, gate_digest)",
)
"""In place of those that name a column that is gone."""

EXPECTATIONS = """CREATE VIEW expectations AS
        SELECT pin, tree, gate_digest, compute_cap, op, backend, total, unsupported, cases, job_id
        FROM (SELECT *, row_number() OVER (PARTITION BY pin, tree, gate_digest, compute_cap
                                           ORDER BY cases IS NULL, job_id, gate_id) AS place
              FROM gates JOIN arms USING (job_id, arm, build_id) JOIN devices USING (device_id)
              WHERE status = 'passed' AND NOT dirty AND NOT overridden
              AND (expected IS NULL OR cases IS NOT NULL AND expected_cases IS NULL))
        WHERE place = 1"""
"""What later gates must reach: what the first clean one gave that was not told it, by compute capability."""

SEALS = """CREATE TABLE seals (
        unit TEXT NOT NULL PRIMARY KEY,
        content TEXT NOT NULL CHECK (length(content) = 64),
        seal TEXT NOT NULL CHECK (length(seal) = 64)
    ) STRICT, WITHOUT ROWID"""
"""What `store.seals` keeps; a migration that changes a sealed table ends in `seals.seal_all`."""

REJECTIONS = """CREATE TABLE rejections (
        job_id TEXT NOT NULL PRIMARY KEY REFERENCES jobs (job_id) ON DELETE RESTRICT,
        reason TEXT NOT NULL CHECK (reason <> ''),
        at REAL NOT NULL
    ) STRICT"""
"""Append-only: the jobs whose evidence is set aside, and why. All of it stays in the record and counts for nothing."""

OWN_NOISE = (
    "ALTER TABLE verdicts ADD COLUMN same_low REAL",
    "ALTER TABLE verdicts ADD COLUMN same_high REAL CHECK ((same_low IS NULL) = (same_high IS NULL))",
    "ALTER TABLE verdicts ADD COLUMN noise REAL CHECK (noise >= 0)",
)
"""The interval that decides `same`, and the noise floor of the chain itself; NULL where an older protocol judges."""

UPSERT = {
    "devices": "ON CONFLICT (device_id) DO NOTHING",
    "case_lists": "ON CONFLICT (cases) DO NOTHING",
    "experiments": "ON CONFLICT (digest) DO NOTHING",
    # two clients may reject a job, each with its words: the first one's stay
    "rejections": """ON CONFLICT (job_id) DO UPDATE SET reason = excluded.reason, at = excluded.at
        WHERE (excluded.at, excluded.reason) < (rejections.at, rejections.reason)""",
    # a label is no part of a cell's identity: of two, one is kept by a rule that does not depend on the order
    "cells": """ON CONFLICT (cell) DO UPDATE SET label = excluded.label WHERE excluded.label < cells.label""",
    "inputs": "ON CONFLICT (job_id, model_id) DO NOTHING",
    # where a figure stands in the file is no part of it, and lines are added to the file
    "published": "ON CONFLICT (figure) DO UPDATE SET line = excluded.line WHERE excluded.line < published.line",
    "published_gates": """ON CONFLICT (figure) DO UPDATE SET line = excluded.line
        WHERE excluded.line < published_gates.line""",
    # who imported it first; with it goes the copy, which another zlib may have packed into other bytes
    "imports": """ON CONFLICT (import_id) DO UPDATE
        SET name = excluded.name, at = excluded.at, content = excluded.content
        WHERE (excluded.at, excluded.name, excluded.content) < (imports.at, imports.name, imports.content)""",
}
"""What to do with a key that is there already; a table that is not named here must not be given one."""
