-- What is stale
-- Cells whose newest run is of an older build, driver or protocol than their experiment has had on that host since.
-- A cell that the experiment no longer has stays here.
WITH
counted AS (
    SELECT * FROM jobs JOIN arms USING (job_id)
    WHERE NOT dirty AND job_id NOT IN (SELECT job_id FROM rejections)),
newest AS (
    SELECT * FROM (
        SELECT *, row_number() OVER (PARTITION BY arm, host ORDER BY intent_at DESC, job_id DESC) AS place FROM counted)
    WHERE place = 1),
measured AS (
    SELECT * FROM (
        SELECT *, row_number() OVER (PARTITION BY arm, host, name, cell, env_digest ORDER BY started DESC) AS place
        FROM (
            SELECT c.arm, c.host, inputs.name, rows.cell, env_digest, started, c.job_id, c.build_id, device_id, protocol
            FROM counted AS c JOIN runs USING (job_id, arm) JOIN rows USING (run_id)
            LEFT JOIN inputs USING (job_id, model_id)
            WHERE status = 'valid'))
    WHERE place = 1)
SELECT substr(m.job_id, -6) AS session, datetime(m.started, 'unixepoch') AS measured, m.arm AS experiment,
       m.host, label AS cell, m.name AS model,
       substr(iif(m.build_id <> n.build_id, ', another build in ' || substr(n.job_id, -6), '')
              || iif(old.driver <> new.driver, ', driver ' || new.driver || ' since, not ' || old.driver, '')
              || iif(m.protocol < (SELECT max(protocol) FROM jobs), ', protocol ' || m.protocol, ''), 3) AS because
FROM measured AS m JOIN newest AS n USING (arm, host) JOIN cells USING (cell)
JOIN devices AS old ON old.device_id = m.device_id JOIN devices AS new ON new.device_id = n.device_id
WHERE m.build_id <> n.build_id OR old.driver <> new.driver OR m.protocol < (SELECT max(protocol) FROM jobs)
ORDER BY m.arm, m.host, label
