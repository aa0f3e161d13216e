-- Sessions
-- Newest first, with the number of runs that count.
SELECT substr(job_id, -6) AS session, datetime(intent_at, 'unixepoch') AS begun,
       datetime(finished_at, 'unixepoch') AS ended,
       round((finished_at - intent_at) / 60, 1) AS minutes, kind, name, host, state,
       (SELECT sum(status = 'valid' AND run_id NOT IN (SELECT run_id FROM flags WHERE hard)) || ' of ' || count(*)
        FROM runs WHERE runs.job_id = jobs.job_id) AS runs,
       reason AS rejected, error,
       (SELECT group_concat(note, '; ') FROM notes WHERE notes.job_id = jobs.job_id) AS notes
FROM jobs LEFT JOIN rejections USING (job_id)
WHERE :name = '' OR name = :name
ORDER BY intent_at DESC, job_id DESC
