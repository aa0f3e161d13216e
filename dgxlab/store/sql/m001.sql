CREATE TABLE hosts (
        host_id TEXT NOT NULL PRIMARY KEY,
        name TEXT NOT NULL,
        hostname TEXT NOT NULL,
        facts TEXT NOT NULL CHECK (json_valid(facts)),
        seen REAL NOT NULL
    ) STRICT;

CREATE TABLE experiments (
        digest TEXT NOT NULL PRIMARY KEY,
        name TEXT NOT NULL,
        hypothesis TEXT NOT NULL,
        spec TEXT NOT NULL CHECK (json_valid(spec))
    ) STRICT;

CREATE TABLE jobs (
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
    ) STRICT;

CREATE INDEX jobs_host ON jobs (host, state);
