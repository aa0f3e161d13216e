-- Append-only: the tries of loops. A ledger is the tries with one baseline on one host.
CREATE TABLE tries (
        try_id TEXT NOT NULL PRIMARY KEY,
        baseline TEXT NOT NULL,
        host TEXT NOT NULL,
        at REAL NOT NULL,
        because TEXT NOT NULL CHECK (because <> ''),
        pin TEXT NOT NULL,
        tree TEXT NOT NULL,
        diff_digest TEXT NOT NULL,
        diff BLOB NOT NULL,
        lines INTEGER NOT NULL,
        parent TEXT REFERENCES tries (try_id) ON DELETE RESTRICT
    ) STRICT;

CREATE TABLE try_sessions (
        try_id TEXT NOT NULL REFERENCES tries (try_id) ON DELETE RESTRICT,
        job_id TEXT NOT NULL REFERENCES jobs (job_id) ON DELETE RESTRICT,
        stage TEXT NOT NULL CHECK (stage IN ('screen', 'chain', 'held-out')),
        PRIMARY KEY (try_id, job_id)
    ) STRICT, WITHOUT ROWID;

CREATE TABLE try_ends (
        try_id TEXT NOT NULL PRIMARY KEY REFERENCES tries (try_id) ON DELETE RESTRICT,
        at REAL NOT NULL,
        seconds REAL NOT NULL,
        ended TEXT NOT NULL CHECK (ended IN ('build', 'gate', 'screen', 'chain', 'overfitted', 'promoted')),
        why TEXT NOT NULL,
        p REAL,
        level REAL,
        wealth REAL,
        after TEXT REFERENCES tries (try_id) ON DELETE RESTRICT
    ) STRICT;

CREATE VIEW try_list AS
        SELECT row_number() OVER (PARTITION BY baseline, host ORDER BY tries.at, tries.try_id) AS number,
               tries.try_id, baseline, host, tries.at, because, pin, tree, diff_digest, lines, parent,
               ended, why, p, level, wealth, after, seconds,
               EXISTS (SELECT 1 FROM try_sessions AS s JOIN rejections USING (job_id) WHERE s.try_id = tries.try_id) AS rejected
        FROM tries LEFT JOIN try_ends USING (try_id);
