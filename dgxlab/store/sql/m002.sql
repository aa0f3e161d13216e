CREATE TABLE arms (
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
    ) STRICT;

CREATE INDEX arms_build ON arms (build_id);

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

CREATE TABLE cells (
        cell TEXT NOT NULL PRIMARY KEY,
        tool TEXT NOT NULL,
        label TEXT NOT NULL,
        params TEXT NOT NULL CHECK (json_valid(params)),
        fixed TEXT NOT NULL CHECK (json_valid(fixed))
    ) STRICT;

CREATE TABLE gates (
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
    ) STRICT;

CREATE INDEX gates_build ON gates (build_id, host_id, gate_digest);

CREATE TABLE expectations (
        pin TEXT NOT NULL,
        tree TEXT NOT NULL,
        gate_digest TEXT NOT NULL,
        op TEXT NOT NULL,
        backend TEXT NOT NULL,
        total INTEGER NOT NULL CHECK (total > 0),
        unsupported INTEGER,
        job_id TEXT NOT NULL REFERENCES jobs (job_id) ON DELETE RESTRICT,
        PRIMARY KEY (pin, tree, gate_digest)
    ) STRICT;

CREATE TABLE runs (
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
    ) STRICT;

CREATE INDEX runs_job ON runs (job_id, position);

CREATE INDEX runs_build ON runs (build_id, host_id);

CREATE TABLE rows (
        run_id TEXT NOT NULL REFERENCES runs (run_id) ON DELETE RESTRICT,
        cell TEXT NOT NULL REFERENCES cells (cell) ON DELETE RESTRICT,
        raw TEXT NOT NULL CHECK (json_valid(raw)),
        PRIMARY KEY (run_id, cell)
    ) STRICT;

CREATE INDEX rows_cell ON rows (cell);

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
