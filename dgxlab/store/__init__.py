"""results.db: the lab's record, one SQLite file tracked in git.

`Store` opens, reads and writes it; dgxlab.ingest fills it from journals. `check` finds problems within a database,
`merging` adds another database. Only this package imports sqlite_utils, and only to migrate.
"""

from dgxlab.store.check import check
from dgxlab.store.connect import Damaged, Locked, copies
from dgxlab.store.merge import merging, textconv
from dgxlab.store.records import Job, alias, device_row, gate_digest, matching_ids, only_match
from dgxlab.store.schema import ROOFLINE
from dgxlab.store.store import FLAWED, RECORDED, REJECTED, UNCOUNTED, UNFIT, WARM_UP, Store
