-- A reading of telemetry is five numbers, and the texts that say of what are many times as long: each is stored once.
CREATE TABLE run_numbers (
    number INTEGER PRIMARY KEY,
    run_id TEXT NOT NULL UNIQUE REFERENCES runs (run_id) ON DELETE RESTRICT
) STRICT;

CREATE TABLE sensors (
    sensor INTEGER PRIMARY KEY,
    device TEXT NOT NULL,
    name TEXT NOT NULL,
    unit TEXT NOT NULL,
    UNIQUE (device, name, unit)
) STRICT;

CREATE TABLE readings (
    number INTEGER NOT NULL REFERENCES run_numbers (number) ON DELETE RESTRICT,
    sensor INTEGER NOT NULL REFERENCES sensors (sensor) ON DELETE RESTRICT,
    n INTEGER NOT NULL CHECK (n > 0),
    median REAL NOT NULL CHECK (median BETWEEN min AND max),
    min REAL NOT NULL CHECK (min > -9e999),
    max REAL NOT NULL CHECK (max < 9e999),
    PRIMARY KEY (number, sensor)
) STRICT, WITHOUT ROWID;

INSERT INTO run_numbers (run_id) SELECT DISTINCT run_id FROM telemetry ORDER BY run_id;

INSERT INTO sensors (device, name, unit) SELECT DISTINCT device, name, unit FROM telemetry ORDER BY device, name;

INSERT INTO readings
    SELECT number, sensor, n, median, min, max
    FROM telemetry JOIN run_numbers USING (run_id) JOIN sensors USING (device, name, unit);

DROP TABLE telemetry;

CREATE VIEW telemetry AS
    SELECT run_id, device, name, unit, n, median, min, max
    FROM run_numbers JOIN readings USING (number) JOIN sensors USING (sensor);

CREATE TRIGGER telemetry_insert INSTEAD OF INSERT ON telemetry BEGIN
    INSERT INTO run_numbers (run_id)
        SELECT NEW.run_id WHERE NOT EXISTS (SELECT 1 FROM run_numbers WHERE run_id = NEW.run_id);
    INSERT INTO sensors (device, name, unit)
        SELECT NEW.device, NEW.name, NEW.unit
        WHERE NOT EXISTS (SELECT 1 FROM sensors WHERE (device, name, unit) = (NEW.device, NEW.name, NEW.unit));
    INSERT INTO readings
        SELECT number, sensor, NEW.n, NEW.median, NEW.min, NEW.max FROM run_numbers, sensors
        WHERE run_id = NEW.run_id AND (device, name, unit) = (NEW.device, NEW.name, NEW.unit);
END;

CREATE TRIGGER telemetry_no_update INSTEAD OF UPDATE ON telemetry BEGIN
    SELECT RAISE(ABORT, 'telemetry is append-only: a correction is a new row');
END;

CREATE TRIGGER telemetry_no_delete INSTEAD OF DELETE ON telemetry BEGIN
    SELECT RAISE(ABORT, 'telemetry is append-only: a correction is a new row');
END;

-- The files themselves are in `imports`, and the figures come with dgxlab: both are read from there.
DROP TABLE imported;

DROP TABLE imported_rows;

DROP TABLE published;

DROP TABLE published_gates;
