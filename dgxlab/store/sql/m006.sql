-- Append-only: what documents say.
CREATE TABLE published (
        figure TEXT NOT NULL PRIMARY KEY,
        source_doc TEXT NOT NULL CHECK (source_doc <> ''),
        host TEXT NOT NULL,
        engine TEXT NOT NULL,
        pin TEXT NOT NULL,
        model TEXT NOT NULL,
        quant TEXT NOT NULL,
        tool TEXT NOT NULL,
        test TEXT NOT NULL,
        metric TEXT NOT NULL,
        value REAL NOT NULL CHECK (value > -9e999 AND value < 9e999),
        unit TEXT NOT NULL,
        stddev REAL CHECK (stddev > -9e999 AND stddev < 9e999),
        notes TEXT NOT NULL,
        line INTEGER NOT NULL CHECK (line > 0)
    ) STRICT;

CREATE TABLE published_gates (
        figure TEXT NOT NULL PRIMARY KEY,
        source_doc TEXT NOT NULL CHECK (source_doc <> ''),
        host TEXT NOT NULL,
        engine TEXT NOT NULL,
        pin TEXT NOT NULL,
        model TEXT NOT NULL,
        quant TEXT NOT NULL,
        tool TEXT NOT NULL,
        test TEXT NOT NULL,
        metric TEXT NOT NULL,
        value TEXT NOT NULL,
        unit TEXT NOT NULL,
        stddev REAL CHECK (stddev > -9e999 AND stddev < 9e999),
        notes TEXT NOT NULL,
        line INTEGER NOT NULL CHECK (line > 0)
    ) STRICT;

-- Files that other programs wrote: `content` is the whole file, deflated, `sha256` and `size` those of the file itself.
-- name, at and content are settled when two databases are merged; the rest never changes.
CREATE TABLE imports (
        import_id TEXT NOT NULL PRIMARY KEY CHECK (import_id = substr(sha256, 1, 16)),
        sha256 TEXT NOT NULL CHECK (length(sha256) = 64),
        size INTEGER NOT NULL CHECK (size > 0),
        tool TEXT NOT NULL,
        format TEXT NOT NULL,
        provenance TEXT NOT NULL CHECK (iif(json_valid(provenance), json_type(provenance) = 'object', 0)),
        notes TEXT NOT NULL CHECK (iif(json_valid(notes), json_type(notes) = 'array', 0)),
        content BLOB NOT NULL,
        name TEXT NOT NULL,
        at REAL NOT NULL
    ) STRICT;

-- Append-only: the rows of an imported file in its order, and the values in them as printed.
CREATE TABLE imported_rows (
        import_id TEXT NOT NULL REFERENCES imports (import_id) ON DELETE RESTRICT,
        position INTEGER NOT NULL CHECK (position >= 0),
        label TEXT NOT NULL CHECK (label <> ''),
        params TEXT NOT NULL CHECK (iif(json_valid(params), json_type(params) = 'object', 0)),
        PRIMARY KEY (import_id, position)
    ) STRICT, WITHOUT ROWID;

CREATE TABLE imported (
        import_id TEXT NOT NULL,
        position INTEGER NOT NULL,
        metric TEXT NOT NULL,
        ordinal INTEGER NOT NULL CHECK (ordinal >= 0),
        value REAL NOT NULL CHECK (value > -9e999 AND value < 9e999),
        unit TEXT NOT NULL,
        discarded TEXT CHECK (discarded <> ''),
        PRIMARY KEY (import_id, position, metric, ordinal),
        FOREIGN KEY (import_id, position) REFERENCES imported_rows (import_id, position) ON DELETE RESTRICT
    ) STRICT, WITHOUT ROWID;
