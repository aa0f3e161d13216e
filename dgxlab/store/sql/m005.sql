-- Append-only: a run's place in a chain of its job's plan.
CREATE TABLE chain_runs (
        run_id TEXT NOT NULL PRIMARY KEY REFERENCES runs (run_id) ON DELETE RESTRICT,
        chain TEXT NOT NULL,
        role TEXT NOT NULL CHECK (role IN ('burn-in', 'baseline', 'candidate')),
        cycle INTEGER NOT NULL CHECK (cycle >= (role <> 'baseline'))
    ) STRICT;

-- What chains say, computed from the evidence: replaced only by computing it again. No reference to cells: a chain that
-- never began has verdicts too, and its cells are only in the plan.
CREATE TABLE verdicts (
        job_id TEXT NOT NULL REFERENCES jobs (job_id) ON DELETE RESTRICT,
        chain TEXT NOT NULL,
        cell TEXT NOT NULL,
        metric TEXT NOT NULL,
        position INTEGER NOT NULL,
        host_id TEXT REFERENCES hosts (host_id) ON DELETE RESTRICT,
        model_id TEXT,
        baseline_arm TEXT NOT NULL,
        candidate_arm TEXT NOT NULL,
        candidate_cell TEXT NOT NULL,
        screen INTEGER NOT NULL CHECK (screen IN (0, 1)),
        better TEXT NOT NULL CHECK (better IN ('higher', 'lower')),
        verdict TEXT NOT NULL CHECK (verdict IN ('faster', 'slower', 'same', 'inconclusive', 'invalid')),
        promoted INTEGER NOT NULL CHECK (promoted = 0 OR (promoted = 1 AND verdict = 'faster' AND NOT screen)),
        effect REAL CHECK ((effect IS NULL) = (verdict = 'invalid')),
        ci_low REAL,
        ci_high REAL CHECK ((ci_low IS NULL) = (ci_high IS NULL)),
        confidence REAL NOT NULL,
        mde REAL,
        p REAL,
        spread REAL,
        k_to_settle INTEGER,
        cycles INTEGER NOT NULL CHECK (cycles >= 0),
        valid_cycles INTEGER NOT NULL CHECK (valid_cycles BETWEEN 0 AND cycles),
        baseline REAL,
        candidate REAL,
        noise_sigma REAL,
        noise_cycles INTEGER,
        noise_session TEXT,
        flaws TEXT NOT NULL CHECK (iif(json_valid(flaws), json_type(flaws) = 'object', 0)),
        reasons TEXT NOT NULL CHECK (iif(json_valid(reasons), json_type(reasons) = 'array', 0)),
        PRIMARY KEY (job_id, chain, cell, metric),
        FOREIGN KEY (job_id, model_id) REFERENCES inputs (job_id, model_id) ON DELETE RESTRICT
    ) STRICT;
