"""Raw output of tools that others ran: from a file to rows, with the provenance it has, and into the record.

`open_file` reads a file as exactly as its format allows or refuses it with line and reason; `record` keeps what was
read, and the file itself with it. Values are as printed, in the units of `units.METRICS` where the metric is one of
those: what test-backend-ops prints as 3.61 TFLOPS is 3.61e12 FLOPS, and its GB/s are called what they are, GiB/s.
"""

from dgxlab.imported.file import FORMATS, Imported, open_file, record, rows_of
from dgxlab.tools.reading import Reading, Row, Values

__all__ = ["FORMATS", "Imported", "Reading", "Row", "Values", "open_file", "record", "rows_of"]
