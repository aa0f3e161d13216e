-- What computed, as `model.Device` says it; an arm of a job has one.
CREATE TABLE devices (
        device_id TEXT NOT NULL PRIMARY KEY,
        host_id TEXT NOT NULL,
        names TEXT NOT NULL CHECK (json_valid(names)),
        uuids TEXT NOT NULL CHECK (json_valid(uuids)),
        driver TEXT NOT NULL,
        compute_cap TEXT NOT NULL,
        cpus INTEGER NOT NULL CHECK (cpus >= 0)
    ) STRICT;

-- Every case that parity gates printed, supported or not, sorted; `cases` is the digest of `lines`.
CREATE TABLE case_lists (
        cases TEXT NOT NULL PRIMARY KEY,
        lines TEXT NOT NULL CHECK (iif(json_valid(lines), json_type(lines) = 'array', 0))
    ) STRICT;

-- `store.seals` writes it.
CREATE TABLE seals (
        unit TEXT NOT NULL PRIMARY KEY,
        content TEXT NOT NULL CHECK (length(content) = 64),
        seal TEXT NOT NULL CHECK (length(seal) = 64)
    ) STRICT, WITHOUT ROWID;
