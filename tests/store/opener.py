"""A child process that opens a database, and may kill itself meanwhile: python -m tests.store.opener DB [STEP].

Prints how far it is; opens, and so makes or migrates the database, when it is given a line on stdin. With STEP it kills
itself when SQLite has worked so long, counted in tens of its instructions; the last line says how long it worked.
"""

import os
import signal
import sqlite3
import sys
from pathlib import Path
from typing import Any

import sqlite_utils  # noqa: F401 - what a migration imports is not what is interrupted

from dgxlab.store import Store

TENS = 10


def main(path: Path, step: int) -> None:
    worked = 0

    def count() -> int:
        nonlocal worked
        worked += 1
        if worked == step:
            os.kill(os.getpid(), signal.SIGKILL)
        return 0

    connect = sqlite3.connect

    def counted(*args: Any, **options: Any) -> sqlite3.Connection:
        connection = connect(*args, **options)
        connection.set_progress_handler(count, TENS)
        return connection

    sqlite3.connect = counted  # type: ignore[assignment]
    print("ready", flush=True)  # noqa: T201
    sys.stdin.readline()
    Store.open(path).close()
    print(worked)  # noqa: T201


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0)
