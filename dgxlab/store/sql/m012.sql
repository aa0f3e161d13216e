-- The tables, indexes and views of version 12. SQLite keeps each statement as it is written here, blanks included, and
-- `schema.SCHEMA` is a digest of them.

CREATE TABLE experiments (
        digest TEXT NOT NULL PRIMARY KEY,
        name TEXT NOT NULL,
        hypothesis TEXT NOT NULL,
        spec TEXT NOT NULL CHECK (json_valid(spec))
    ) STRICT;

-- Append-only: a model as a job read or made it. `recipe` is NULL for a file.
CREATE TABLE inputs (
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
    ) STRICT;

CREATE INDEX inputs_model ON inputs (model_id);

-- What can be measured, on any build and model.
CREATE TABLE cells (
        cell TEXT NOT NULL PRIMARY KEY,
        tool TEXT NOT NULL,
        label TEXT NOT NULL,
        params TEXT NOT NULL CHECK (json_valid(params)),
        fixed TEXT NOT NULL CHECK (json_valid(fixed))
    ) STRICT;

-- Append-only: a measured value, discarded with a reason.
CREATE TABLE samples (
        run_id TEXT NOT NULL,
        cell TEXT NOT NULL,
        metric TEXT NOT NULL,
        ordinal INTEGER NOT NULL CHECK (ordinal >= 0),
        value REAL NOT NULL CHECK (value > -9e999 AND value < 9e999),
        unit TEXT NOT NULL,
        discarded TEXT CHECK (discarded <> ''),
        PRIMARY KEY (run_id, cell, metric, ordinal),
        FOREIGN KEY (run_id, cell) REFERENCES rows (run_id, cell) ON DELETE RESTRICT
    ) STRICT, WITHOUT ROWID;

CREATE TABLE flags (
        run_id TEXT NOT NULL REFERENCES runs (run_id) ON DELETE RESTRICT,
        device TEXT NOT NULL,
        kind TEXT NOT NULL,
        hard INTEGER NOT NULL CHECK (hard IN (0, 1)),
        reason TEXT NOT NULL CHECK (reason <> ''),
        PRIMARY KEY (run_id, device, kind)
    ) STRICT, WITHOUT ROWID;

-- Append-only: a run's place in a chain of its job's plan.
CREATE TABLE chain_runs (
        run_id TEXT NOT NULL PRIMARY KEY REFERENCES runs (run_id) ON DELETE RESTRICT,
        chain TEXT NOT NULL,
        role TEXT NOT NULL CHECK (role IN ('burn-in', 'baseline', 'candidate')),
        cycle INTEGER NOT NULL CHECK (cycle >= (role <> 'baseline'))
    ) STRICT;

CREATE TABLE imports (
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
    ) STRICT;

-- What computed, as `model.Device` says it; an arm of a job has one.
CREATE TABLE devices (
        device_id TEXT NOT NULL PRIMARY KEY,
        host_id TEXT NOT NULL,
        names TEXT NOT NULL CHECK (json_valid(names)),
        uuids TEXT NOT NULL CHECK (json_valid(uuids)),
        driver TEXT NOT NULL,
        compute_cap TEXT NOT NULL,
        cpus INTEGER NOT NULL CHECK (cpus >= 0)
    ) STRICT;

-- `store.seals`.
CREATE TABLE seals (
        unit TEXT NOT NULL PRIMARY KEY,
        content TEXT NOT NULL CHECK (length(content) = 64),
        seal TEXT NOT NULL CHECK (length(seal) = 64)
    ) STRICT, WITHOUT ROWID;

-- Append-only: what a job built, and on which device it measured.
CREATE TABLE arms (
        job_id TEXT NOT NULL REFERENCES jobs (job_id) ON DELETE RESTRICT,
        arm TEXT NOT NULL,
        build_id TEXT NOT NULL,
        device_id TEXT NOT NULL REFERENCES devices (device_id) ON DELETE RESTRICT,
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
    ) STRICT;

CREATE INDEX arms_build ON arms (build_id);

-- Append-only: parity gates. `cases` is the digest of the list that was printed and `expected_cases` of the one that was
-- demanded, NULL where it is not known; `overridden`: the command line changed what the gate demands.
CREATE TABLE gates (
        gate_id TEXT NOT NULL PRIMARY KEY,
        job_id TEXT NOT NULL REFERENCES jobs (job_id) ON DELETE RESTRICT,
        build_id TEXT NOT NULL,
        overridden INTEGER NOT NULL CHECK (overridden IN (0, 1)),
        cases TEXT,
        arm TEXT NOT NULL,
        op TEXT NOT NULL,
        backend TEXT NOT NULL,
        gate_digest TEXT NOT NULL,
        rc INTEGER,
        passed INTEGER,
        total INTEGER,
        unsupported INTEGER,
        expected INTEGER,
        expected_cases TEXT,
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
    ) STRICT;

-- Append-only: gates on a whole model. `commands` has each launch's argv and environment, `readings` what it showed;
-- `env` is the arm's, `inputs` says by name which models it read.
CREATE TABLE checks (
        check_id TEXT NOT NULL PRIMARY KEY,
        job_id TEXT NOT NULL REFERENCES jobs (job_id) ON DELETE RESTRICT,
        build_id TEXT NOT NULL,
        
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
    ) STRICT;

CREATE TABLE verdicts (
        job_id TEXT NOT NULL REFERENCES jobs (job_id) ON DELETE RESTRICT,
        chain TEXT NOT NULL,
        cell TEXT NOT NULL,
        metric TEXT NOT NULL,
        position INTEGER NOT NULL,
        
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
        reasons TEXT NOT NULL CHECK (iif(json_valid(reasons), json_type(reasons) = 'array', 0)), same_low REAL, same_high REAL CHECK ((same_low IS NULL) = (same_high IS NULL)), noise REAL CHECK (noise >= 0),
        PRIMARY KEY (job_id, chain, cell, metric),
        FOREIGN KEY (job_id, model_id) REFERENCES inputs (job_id, model_id) ON DELETE RESTRICT
    ) STRICT;

CREATE INDEX arms_device ON arms (device_id);

CREATE INDEX gates_build ON gates (build_id, gate_digest);

CREATE INDEX checks_build ON checks (build_id, gate_digest);

CREATE VIEW builds AS
        SELECT build_id, pin, tree, commit_id, series, dirty, cmake, toolchain, binaries, libraries, cmake_cache,
               seconds, job_id
        FROM arms AS a
        WHERE NOT EXISTS (
            SELECT 1 FROM arms AS b WHERE b.build_id = a.build_id AND (b.job_id, b.arm) < (a.job_id, a.arm));

CREATE VIEW models AS
        SELECT model_id, name, path, size, digest, recipe, job_id
        FROM inputs AS a
        WHERE NOT EXISTS (SELECT 1 FROM inputs AS b WHERE b.model_id = a.model_id AND b.job_id < a.job_id);

-- Append-only: the jobs whose evidence is set aside, and why. All of it stays in the record and counts for nothing.
CREATE TABLE rejections (
        job_id TEXT NOT NULL PRIMARY KEY REFERENCES jobs (job_id) ON DELETE RESTRICT,
        reason TEXT NOT NULL CHECK (reason <> ''),
        at REAL NOT NULL
    ) STRICT;

-- What later gates must reach: what the first clean one gave that was not told it, by compute capability.
CREATE VIEW expectations AS
        SELECT pin, tree, gate_digest, compute_cap, op, backend, total, unsupported, cases, job_id
        FROM (SELECT *, row_number() OVER (PARTITION BY pin, tree, gate_digest, compute_cap
                                           ORDER BY cases IS NULL, job_id, gate_id) AS place
              FROM gates JOIN arms USING (job_id, arm, build_id) JOIN devices USING (device_id)
              WHERE job_id NOT IN (SELECT job_id FROM rejections) AND status = 'passed' AND NOT dirty AND NOT overridden
              AND (expected IS NULL OR cases IS NOT NULL AND expected_cases IS NULL))
        WHERE place = 1;

-- Append-only: lists of cases by their digest.
CREATE TABLE case_lists (
        cases TEXT NOT NULL PRIMARY KEY,
        lines BLOB NOT NULL
    ) STRICT;

CREATE TABLE jobs (
        job_id TEXT NOT NULL PRIMARY KEY,
        kind TEXT NOT NULL,
        name TEXT NOT NULL,
        experiment TEXT REFERENCES experiments (digest) ON DELETE RESTRICT,
        host TEXT NOT NULL,
        host_id TEXT,
        plan BLOB NOT NULL,
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
    ) STRICT;

CREATE INDEX jobs_host ON jobs (host, state);

CREATE TABLE rows (
        run_id TEXT NOT NULL REFERENCES runs (run_id) ON DELETE RESTRICT,
        cell TEXT NOT NULL REFERENCES cells (cell) ON DELETE RESTRICT,
        raw BLOB NOT NULL,
        PRIMARY KEY (run_id, cell)
    ) STRICT;

CREATE TABLE runs (
        run_id TEXT NOT NULL PRIMARY KEY,
        job_id TEXT NOT NULL REFERENCES jobs (job_id) ON DELETE RESTRICT,
        build_id TEXT NOT NULL,
        
        arm TEXT NOT NULL,
        tool TEXT NOT NULL,
        model_id TEXT,
        position INTEGER NOT NULL,
        argv BLOB NOT NULL,
        env TEXT NOT NULL CHECK (json_valid(env)),
        env_digest TEXT NOT NULL,
        rc INTEGER,
        signal INTEGER,
        started REAL NOT NULL,
        seconds REAL NOT NULL,
        status TEXT NOT NULL CHECK (status IN ('valid', 'discarded', 'failed')),
        reason TEXT NOT NULL CHECK (status = 'valid' OR reason <> ''),
        before BLOB NOT NULL,
        after BLOB NOT NULL,
        raw BLOB NOT NULL,
        FOREIGN KEY (job_id, arm, build_id) REFERENCES arms (job_id, arm, build_id) ON DELETE RESTRICT,
        FOREIGN KEY (job_id, model_id) REFERENCES inputs (job_id, model_id) ON DELETE RESTRICT
    ) STRICT;

CREATE INDEX runs_job ON runs (job_id, position);

CREATE INDEX runs_build ON runs (build_id);

-- A reading of telemetry is five numbers, and the texts that say of what are many times as long: each is stored once.
CREATE TABLE run_numbers (
    number INTEGER PRIMARY KEY,
    run_id TEXT NOT NULL UNIQUE REFERENCES runs (run_id) ON DELETE RESTRICT
) STRICT;

CREATE TABLE sensors (
    sensor INTEGER PRIMARY KEY,
    device TEXT NOT NULL,
    name TEXT NOT NULL,
    unit TEXT NOT NULL,
    UNIQUE (device, name, unit)
) STRICT;

CREATE TABLE readings (
    number INTEGER NOT NULL REFERENCES run_numbers (number) ON DELETE RESTRICT,
    sensor INTEGER NOT NULL REFERENCES sensors (sensor) ON DELETE RESTRICT,
    n INTEGER NOT NULL CHECK (n > 0),
    median REAL NOT NULL CHECK (median BETWEEN min AND max),
    min REAL NOT NULL CHECK (min > -9e999),
    max REAL NOT NULL CHECK (max < 9e999),
    PRIMARY KEY (number, sensor)
) STRICT, WITHOUT ROWID;

CREATE VIEW telemetry AS
    SELECT run_id, device, name, unit, n, median, min, max
    FROM run_numbers JOIN readings USING (number) JOIN sensors USING (sensor);

CREATE TRIGGER telemetry_insert INSTEAD OF INSERT ON telemetry BEGIN
    INSERT INTO run_numbers (run_id)
        SELECT NEW.run_id WHERE NOT EXISTS (SELECT 1 FROM run_numbers WHERE run_id = NEW.run_id);
    INSERT INTO sensors (device, name, unit)
        SELECT NEW.device, NEW.name, NEW.unit
        WHERE NOT EXISTS (SELECT 1 FROM sensors WHERE (device, name, unit) = (NEW.device, NEW.name, NEW.unit));
    INSERT INTO readings
        SELECT number, sensor, NEW.n, NEW.median, NEW.min, NEW.max FROM run_numbers, sensors
        WHERE run_id = NEW.run_id AND (device, name, unit) = (NEW.device, NEW.name, NEW.unit);
END;

CREATE TRIGGER telemetry_no_update INSTEAD OF UPDATE ON telemetry BEGIN
    SELECT RAISE(ABORT, 'telemetry is append-only: a correction is a new row');
END;

CREATE TRIGGER telemetry_no_delete INSTEAD OF DELETE ON telemetry BEGIN
    SELECT RAISE(ABORT, 'telemetry is append-only: a correction is a new row');
END;

-- A metric of a cell in a run: the median of the samples that count, how many, their scaled MAD. Each median is that of
-- the one or two samples in the middle. The subqueries are correlated, so that SQLite sorts the samples of those runs
-- alone that a query asks for.
CREATE VIEW measurements AS
    WITH counted AS (
        SELECT run_id, cell, metric, unit, count(*) AS n FROM samples WHERE discarded IS NULL
        GROUP BY run_id, cell, metric)
    SELECT c.run_id, jobs.name AS experiment, runs.job_id, runs.arm, runs.build_id, arms.device_id, jobs.host,
           runs.tool, runs.model_id, runs.env_digest, c.cell, cells.label, c.metric,
           (WITH ordered AS (
                SELECT value, row_number() OVER (ORDER BY value) AS place FROM samples AS s
                WHERE (s.run_id, s.cell, s.metric) = (c.run_id, c.cell, c.metric) AND discarded IS NULL)
            SELECT avg(value) FROM ordered WHERE place IN ((c.n + 1) / 2, c.n / 2 + 1)) AS value,
           c.unit, c.n,
           CASE WHEN c.n > 1 THEN (
               WITH ordered AS (
                   SELECT value, row_number() OVER (ORDER BY value) AS place FROM samples AS s
                   WHERE (s.run_id, s.cell, s.metric) = (c.run_id, c.cell, c.metric) AND discarded IS NULL),
               middle AS (SELECT avg(value) AS median FROM ordered WHERE place IN ((c.n + 1) / 2, c.n / 2 + 1)),
               distances AS (
                   SELECT abs(value - median) AS distance, row_number() OVER (ORDER BY abs(value - median)) AS place
                   FROM ordered, middle)
               SELECT 1.4826 * avg(distance) FROM distances WHERE place IN ((c.n + 1) / 2, c.n / 2 + 1)) END AS spread,
           runs.started AS at, runs.status, chain, role, cycle
    FROM counted AS c
    JOIN runs USING (run_id) JOIN arms USING (job_id, arm, build_id) JOIN jobs USING (job_id)
    JOIN cells USING (cell) LEFT JOIN chain_runs USING (run_id);

-- The newest measurement that counts, of each build, device, cell, model, environment and metric; chains are left out.
CREATE VIEW latest AS
    SELECT * FROM (
        SELECT *, row_number() OVER (PARTITION BY build_id, device_id, cell, model_id, env_digest, metric
                                     ORDER BY at DESC, run_id DESC) AS place
        FROM measurements
        WHERE status = 'valid' AND chain IS NULL AND job_id NOT IN (SELECT job_id FROM rejections))
    WHERE place = 1;

-- Gates of both kinds; `newest` on their build and device, those of rejected jobs apart.
CREATE VIEW gate_list AS
    WITH every AS (
        SELECT gate_id AS key, job_id, arm, build_id, gate_digest, op, backend, NULL AS gate, at, status, passed,
               total, overridden, reasons, flaky FROM gates
        UNION ALL
        SELECT check_id, job_id, arm, build_id, gate_digest, NULL, NULL, gate, at, status, NULL,
               NULL, 0, reasons, '[]' FROM checks),
    known AS (SELECT *, job_id IN (SELECT job_id FROM rejections) AS rejected FROM every)
    SELECT known.*, device_id, row_number() OVER (PARTITION BY build_id, device_id, gate_digest, rejected
                                                  ORDER BY at DESC, key DESC) = 1 AS newest
    FROM known JOIN arms USING (job_id, arm, build_id);

-- Verdicts with their session and the baseline's device.
CREATE VIEW verdict_list AS
    SELECT v.*, kind, jobs.name AS session, host, protocol, intent_at, device_id, label
    FROM verdicts AS v JOIN jobs USING (job_id) LEFT JOIN cells USING (cell)
    LEFT JOIN arms ON arms.job_id = v.job_id AND arm = baseline_arm;
