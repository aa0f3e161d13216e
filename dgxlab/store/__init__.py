"""results.db: the lab's record, one SQLite file that is tracked like a notebook.

`Store` opens it, records intents and answers what was measured; `ingest` fills it from journals. `check` tells what is
wrong with a database, `merge` adds another one to it. Only this package imports sqlite_utils, and only to migrate.
"""

from dgxlab.store.check import check
from dgxlab.store.merge import merge
from dgxlab.store.records import Job, gate_digest, the_one
from dgxlab.store.store import OPEN_CHAINS, Store

__all__ = ["OPEN_CHAINS", "Job", "Store", "check", "gate_digest", "merge", "the_one"]
