CREATE INDEX arms_device ON arms (device_id);

CREATE INDEX gates_build ON gates (build_id, gate_digest);

CREATE INDEX runs_build ON runs (build_id);

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

-- What later gates must reach: what the first clean one gave that was not told it, by compute capability.
CREATE VIEW expectations AS
        SELECT pin, tree, gate_digest, compute_cap, op, backend, total, unsupported, cases, job_id
        FROM (SELECT *, row_number() OVER (PARTITION BY pin, tree, gate_digest, compute_cap
                                           ORDER BY cases IS NULL, job_id, gate_id) AS place
              FROM gates JOIN arms USING (job_id, arm, build_id) JOIN devices USING (device_id)
              WHERE status = 'passed' AND NOT dirty AND NOT overridden
              AND (expected IS NULL OR cases IS NOT NULL AND expected_cases IS NULL))
        WHERE place = 1;
