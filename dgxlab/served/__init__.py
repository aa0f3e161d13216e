"""The record in a browser, by datasette: tables with descriptions, queries to start from, readable times.

It is only read, and served on the loopback alone. datasette is an extra, `dgxlab[browser]`, imported
inside the functions that need it.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dgxlab.errors import SpecError, UsageError, command, needs
from dgxlab.store.connect import named_errors, open_existing, version
from dgxlab.store.schema import VERSION

if TYPE_CHECKING:
    from datasette.app import Datasette

HERE = Path(__file__).parent
LOOPBACK = "127.0.0.1"
NAME = "record"  # of the database in datasette's addresses, whatever the file is called
FLOOR = "datasette>=0.65,<1"
SETTINGS = {"sql_time_limit_ms": 20_000, "max_returned_rows": 5000, "num_sql_threads": 2, "suggest_facets": False}
HIDDEN = ("_sqlite_migrations", "readings", "run_numbers", "sensors")  # tables behind a view, or of the migrations


def tables() -> Mapping[str, str]:
    """Return what one row of each table and view is."""
    described: Mapping[str, str] = json.loads((HERE / "tables.json").read_text())
    return described


def queries() -> dict[str, dict[str, str]]:
    """Return the canned queries by name, as datasette takes them: a file's comments are its title and description."""
    by_name = {}
    for path in sorted(HERE.glob("*.sql")):
        lines = path.read_text().splitlines()
        title, *about = [line.removeprefix("-- ") for line in lines if line.startswith("-- ")]
        sql = "\n".join(line for line in lines if not line.startswith("-- "))
        by_name[path.stem] = {"title": title, "description": " ".join(about), "sql": sql}
    return by_name


def application(path: Path) -> Datasette:
    """Return datasette with the record at `path`, opened read-only.

    Raises:
        UsageError: if datasette is missing.
        SpecError: if there is no record, or it has an older schema: only commands that write bring it up to date.
    """
    with needs(FLOOR, "datasette serves the record"):
        from datasette.app import Datasette
        from datasette.database import Database
    from dgxlab.served import hooks

    with named_errors(path), contextlib.closing(open_existing(path)) as connection:
        if (number := version(connection, path)) < VERSION:
            older = f"{path} has schema {number}, and is served from schema {VERSION} on"
            raise SpecError(older, next=command("dgxlab", "db", "check", path))
    described: dict[str, dict[str, Any]] = {name: {"description": text} for name, text in tables().items()}
    for name in HIDDEN:
        described.setdefault(name, {})["hidden"] = True
    about = {
        "title": f"dgxlab: {path.name}",
        "description": "Read-only. Times are in UTC; CSV and JSON have unix seconds.",
    }
    metadata = {**about, "databases": {NAME: {"queries": queries(), "tables": described}}}
    served = Datasette([], metadata=metadata, settings=SETTINGS)
    hooks.register()
    # a write-ahead log needs files beside the record; without them, it is read as if nothing else wrote to it
    served.add_database(Database(served, str(path), is_mutable=os.access(path.parent, os.W_OK)), name=NAME)
    return served


def serve(path: Path, port: int, tell: Callable[[str], None]) -> None:
    """Serve the record on the loopback until Ctrl-C; `tell` takes the address once it answers there.

    A `port` of 0 is any free one.

    Raises UsageError if datasette is missing, or the port is in use, and SpecError as `application`.
    """
    served = application(path)
    import uvicorn

    try:
        listening = socket.create_server((LOOPBACK, port))
    except OSError as error:
        again = command("dgxlab", "serve-record", "--port", "0")
        raise UsageError(f"port {port} cannot be used: {os.strerror(error.errno or 0)}", next=again) from error
    with listening, contextlib.suppress(KeyboardInterrupt):
        tell(f"http://{LOOPBACK}:{listening.getsockname()[1]}/{NAME}")
        uvicorn.Server(uvicorn.Config(served.app(), log_level="warning")).run([listening])
    served.databases[NAME].close()
    with contextlib.closing(open_existing(path)) as connection:  # the last to close removes the write-ahead log
        version(connection, path)
