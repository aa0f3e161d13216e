-- Gates
-- The newest result of each gate on its build and device, those that failed first.
SELECT substr(job_id, -6) AS session, datetime(at, 'unixepoch') AS checked, arm AS experiment,
       coalesce(op || ' on ' || backend, gate) AS gate, status, passed, total, nullif(flaky, '[]') AS flaky, nullif(reasons, '[]') AS reasons, build_id
FROM gate_list
WHERE newest AND NOT rejected
ORDER BY status = 'passed', at DESC
