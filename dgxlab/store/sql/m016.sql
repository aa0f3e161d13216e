-- Append-only: sessions of the same arms, one a device. The id is the digest of their ids.
CREATE TABLE fleets (
        fleet_id TEXT NOT NULL PRIMARY KEY,
        sessions TEXT NOT NULL CHECK (iif(json_valid(sessions), json_type(sessions) = 'array', 0))
    ) STRICT;

-- The verdicts over the devices of a fleet, computed from those of its sessions: replaced only by computing them again.
-- env and candidate_env are digests, as runs.env_digest.
CREATE TABLE fleet_verdicts (
        fleet_id TEXT NOT NULL REFERENCES fleets (fleet_id) ON DELETE RESTRICT,
        position INTEGER NOT NULL,
        cell TEXT NOT NULL,
        env TEXT NOT NULL,
        candidate_cell TEXT NOT NULL,
        candidate_env TEXT NOT NULL,
        metric TEXT NOT NULL,
        model_id TEXT NOT NULL,
        devices INTEGER NOT NULL CHECK (devices > 0),
        verdict TEXT NOT NULL CHECK (verdict IN ('faster', 'slower', 'same', 'inconclusive', 'invalid')),
        effect REAL CHECK ((effect IS NULL) = (verdict = 'invalid')),
        ci_low REAL,
        ci_high REAL CHECK ((ci_low IS NULL) = (ci_high IS NULL)),
        confidence REAL NOT NULL,
        between_devices REAL CHECK (between_devices >= 0),
        PRIMARY KEY (fleet_id, position)
    ) STRICT;
