-- What a try changes in what it is compared with; `diff` is over the pin, and so has the baseline's series too. NULL in rows
-- of an older dgxlab, whose `lines` are those of `diff`.
ALTER TABLE tries ADD COLUMN change BLOB;

DROP VIEW try_list;

CREATE VIEW try_list AS
        SELECT row_number() OVER (PARTITION BY baseline, host ORDER BY tries.at, tries.try_id) AS number,
               tries.try_id, baseline, host, tries.at, because, pin, tree, diff_digest, lines,
               CASE WHEN change IS NULL THEN 'pin' WHEN parent IS NULL THEN 'baseline' ELSE 'parent' END AS diff_over, parent,
               ended, why, p, level, wealth, after, seconds,
               EXISTS (SELECT 1 FROM try_sessions AS s JOIN rejections USING (job_id) WHERE s.try_id = tries.try_id) AS rejected
        FROM tries LEFT JOIN try_ends USING (try_id);
