-- Append-only: what the user says about a session.
CREATE TABLE notes (
        job_id TEXT NOT NULL REFERENCES jobs (job_id) ON DELETE RESTRICT,
        at REAL NOT NULL,
        note TEXT NOT NULL CHECK (note <> ''),
        PRIMARY KEY (job_id, at, note)
    ) STRICT, WITHOUT ROWID;
