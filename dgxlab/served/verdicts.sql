-- Verdicts of A/B sessions and screens
-- Newest session first. Effects are of the candidate, in percent of the baseline, with the interval that decides.
SELECT substr(job_id, -6) AS session, datetime(intent_at, 'unixepoch') AS begun, host, baseline_arm,
       candidate_arm, label AS cell, metric, verdict, round(100 * effect, 2) AS effect_percent,
       round(100 * iif(verdict = 'same', coalesce(same_low, ci_low), ci_low), 2) AS low,
       round(100 * iif(verdict = 'same', coalesce(same_high, ci_high), ci_high), 2) AS high, promoted, valid_cycles || ' of ' || cycles AS cycles, reason AS rejected
FROM verdict_list LEFT JOIN rejections USING (job_id)
WHERE kind <> 'noise' AND (:verdict = '' OR verdict = :verdict)
ORDER BY intent_at DESC, job_id, position
