-- Append-only: gates on a whole model. `commands` has each launch's argv and environment, `readings` what it showed;
-- `env` is the arm's, `inputs` says by name which models it read.
CREATE TABLE checks (
        check_id TEXT NOT NULL PRIMARY KEY,
        job_id TEXT NOT NULL REFERENCES jobs (job_id) ON DELETE RESTRICT,
        build_id TEXT NOT NULL,
        host_id TEXT NOT NULL REFERENCES hosts (host_id) ON DELETE RESTRICT,
        arm TEXT NOT NULL,
        step TEXT NOT NULL,
        kind TEXT NOT NULL,
        gate TEXT NOT NULL CHECK (iif(json_valid(gate), json_type(gate) = 'object', 0)),
        gate_digest TEXT NOT NULL,
        inputs TEXT NOT NULL CHECK (iif(json_valid(inputs), json_type(inputs) = 'object', 0)),
        env TEXT NOT NULL CHECK (iif(json_valid(env), json_type(env) = 'object', 0)),
        commands TEXT NOT NULL CHECK (iif(json_valid(commands), json_type(commands) = 'array', 0)),
        readings TEXT NOT NULL CHECK (iif(json_valid(readings), json_type(readings) = 'object', 0)),
        status TEXT NOT NULL CHECK (status IN ('passed', 'failed')),
        reasons TEXT NOT NULL CHECK ((status = 'passed') = (json_array_length(reasons) = 0)),
        raw TEXT NOT NULL CHECK (iif(json_valid(raw), json_type(raw) = 'object', 0)),
        seconds REAL NOT NULL,
        at REAL NOT NULL,
        FOREIGN KEY (job_id, arm, build_id) REFERENCES arms (job_id, arm, build_id) ON DELETE RESTRICT
    ) STRICT;

CREATE INDEX checks_build ON checks (build_id, host_id, gate_digest);
