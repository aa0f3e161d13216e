"""results.db: the lab's record, one SQLite file that is tracked like a notebook.

`Store` opens it, records intents and answers what was measured; `ingest` fills it from journals. `check` tells what is
wrong with a database by itself, `merging` adds another one to it. Only this package imports sqlite_utils, and only to
migrate.
"""

from dgxlab.store.check import check
from dgxlab.store.connect import Damaged, Locked, copies
from dgxlab.store.merge import merging, text
from dgxlab.store.records import Job, alias, device_row, gate_digest, named, the_one
from dgxlab.store.schema import ROOFLINE
from dgxlab.store.store import REJECTED, UNCOUNTED, Store

__all__ = [
    "REJECTED",
    "ROOFLINE",
    "UNCOUNTED",
    "Damaged",
    "Job",
    "Locked",
    "Store",
    "alias",
    "check",
    "copies",
    "device_row",
    "gate_digest",
    "merging",
    "named",
    "text",
    "the_one",
]
