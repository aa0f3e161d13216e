-- Reports join the results of many jobs with one build on one device: each job's rows are found by the index alone.
DROP INDEX arms_device;

CREATE INDEX arms_device ON arms (device_id, tree);

DROP INDEX runs_build;

CREATE INDEX runs_build ON runs (build_id, job_id);

DROP INDEX gates_build;

CREATE INDEX gates_build ON gates (build_id, job_id);

DROP INDEX checks_build;

CREATE INDEX checks_build ON checks (build_id, job_id);
