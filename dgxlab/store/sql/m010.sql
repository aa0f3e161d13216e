-- The interval that decides `same`, and the noise floor of the chain itself; NULL where an older protocol judges.
ALTER TABLE verdicts ADD COLUMN same_low REAL;

ALTER TABLE verdicts ADD COLUMN same_high REAL CHECK ((same_low IS NULL) = (same_high IS NULL));

ALTER TABLE verdicts ADD COLUMN noise REAL CHECK (noise >= 0);
