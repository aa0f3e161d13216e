-- Gates
-- The newest result of each experiment's gate on its build and device, those that failed first.
SELECT substr(job_id, -6) AS session, datetime(max(at), 'unixepoch') AS checked, arm AS experiment,
       coalesce(op || ' on ' || backend, gate) AS gate, status, passed, total, nullif(flaky, '[]') AS flaky, nullif(reasons, '[]') AS reasons, build_id
FROM gate_list
WHERE NOT rejected
GROUP BY build_id, device_id, gate_digest, arm
ORDER BY status = 'passed', max(at) DESC
