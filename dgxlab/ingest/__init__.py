"""A job's journal into the store: what the host saw, and what cannot be true of it.

`ingest` folds lines in, each once. A run whose numbers exceed the peaks of its GPU is kept and gets a soft flag;
`beyond` says it again of any run, also of those that an older dgxlab read.
"""

from dgxlab.ingest.fold import COLD, SAMPLE, ingest, samples_of
from dgxlab.ingest.guard import beyond

__all__ = ["COLD", "SAMPLE", "beyond", "ingest", "samples_of"]
