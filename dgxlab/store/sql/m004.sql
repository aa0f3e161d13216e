-- Append-only: a counter's growth during a run is one number; what was not measured has no row.
CREATE TABLE telemetry (
        run_id TEXT NOT NULL REFERENCES runs (run_id) ON DELETE RESTRICT,
        device TEXT NOT NULL,
        name TEXT NOT NULL,
        unit TEXT NOT NULL,
        n INTEGER NOT NULL CHECK (n > 0),
        median REAL NOT NULL CHECK (median BETWEEN min AND max),
        min REAL NOT NULL CHECK (min > -9e999),
        max REAL NOT NULL CHECK (max < 9e999),
        PRIMARY KEY (run_id, device, name)
    ) STRICT, WITHOUT ROWID;

-- Append-only: reasons to doubt a run.
CREATE TABLE flags (
        run_id TEXT NOT NULL REFERENCES runs (run_id) ON DELETE RESTRICT,
        device TEXT NOT NULL,
        kind TEXT NOT NULL,
        hard INTEGER NOT NULL CHECK (hard IN (0, 1)),
        reason TEXT NOT NULL CHECK (reason <> ''),
        PRIMARY KEY (run_id, device, kind)
    ) STRICT, WITHOUT ROWID;
