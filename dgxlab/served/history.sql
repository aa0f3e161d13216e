-- History of a cell
-- Every run that counts of the cells whose name contains a text, such as pp512; experiment and host may be left empty.
SELECT datetime(at, 'unixepoch') AS measured, substr(job_id, -6) AS session, arm AS experiment, m.host,
       m.label AS cell, inputs.name AS model, metric, round(value, 4) AS value, unit, n, round(spread, 4) AS spread, substr(pin, 1, 12) AS pin,
       substr(tree, 1, 12) AS tree, driver, chain
FROM measurements AS m JOIN arms USING (job_id, arm, build_id, device_id) JOIN devices USING (device_id)
LEFT JOIN inputs USING (job_id, model_id)
WHERE cell IN (SELECT cell FROM cells WHERE instr(label, :cell)) AND status = 'valid' AND coalesce(role, '') <> 'burn-in'
      AND (:experiment = '' OR arm = :experiment) AND (:host = '' OR m.host = :host)
      AND run_id NOT IN (SELECT run_id FROM flags WHERE hard)
      AND job_id NOT IN (SELECT job_id FROM rejections)
      AND job_id NOT IN (SELECT job_id FROM jobs WHERE kind <> 'run' AND state IN ('intended', 'running'))
ORDER BY m.label, metric, m.host, at
