-- Append-only: the jobs whose evidence is set aside, and why. All of it stays in the record and counts for nothing.
CREATE TABLE rejections (
        job_id TEXT NOT NULL PRIMARY KEY REFERENCES jobs (job_id) ON DELETE RESTRICT,
        reason TEXT NOT NULL CHECK (reason <> ''),
        at REAL NOT NULL
    ) STRICT;

DROP VIEW expectations;

-- Without rejected jobs.
CREATE VIEW expectations AS
        SELECT pin, tree, gate_digest, compute_cap, op, backend, total, unsupported, cases, job_id
        FROM (SELECT *, row_number() OVER (PARTITION BY pin, tree, gate_digest, compute_cap
                                           ORDER BY cases IS NULL, job_id, gate_id) AS place
              FROM gates JOIN arms USING (job_id, arm, build_id) JOIN devices USING (device_id)
              WHERE job_id NOT IN (SELECT job_id FROM rejections) AND status = 'passed' AND NOT dirty AND NOT overridden
              AND (expected IS NULL OR cases IS NOT NULL AND expected_cases IS NULL))
        WHERE place = 1;
