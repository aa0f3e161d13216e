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
