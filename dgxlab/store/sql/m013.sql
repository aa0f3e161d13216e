-- What a model holds, as its GGUF header says, and how near its weights are to their source; NULL from older agents.
ALTER TABLE inputs ADD COLUMN contents TEXT CHECK (contents IS NULL OR json_valid(contents));

DROP VIEW models;

CREATE VIEW models AS
        SELECT model_id, name, path, size, digest, recipe, json_extract(contents, '$.architecture') AS architecture,
               json_extract(contents, '$.parameters') AS parameters, json_extract(contents, '$.type') AS type,
               json_extract(contents, '$.bits') AS bits, json_extract(contents, '$.requantised') AS requantised,
               json_extract(contents, '$.fidelity') AS fidelity, job_id
        FROM inputs AS a
        WHERE NOT EXISTS (SELECT 1 FROM inputs AS b WHERE b.model_id = a.model_id AND b.job_id < a.job_id);
