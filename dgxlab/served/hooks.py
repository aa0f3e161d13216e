"""What datasette asks of this program while it serves: connections, the text of a cell, who may ask."""

from __future__ import annotations

import sqlite3
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from typing import Any

from datasette import hookimpl
from datasette.plugins import pm
from datasette.utils.asgi import Response

from dgxlab.served import LOOPBACK
from dgxlab.store.connect import prepare
from dgxlab.store.schema import inflated

TIMES = ("at", "intent_at", "started", "finished_at")  # columns of unix seconds

HOSTS = (LOOPBACK, "localhost")
"""Names under which it may be asked for: a page of another site, whose name leads here, is refused."""

App = Callable[[Any, Any, Any], Awaitable[None]]


def register() -> None:
    """Give datasette these hooks."""
    module = __import__(__name__, fromlist=["hooks"])
    if not pm.is_registered(module):
        pm.register(module)


@hookimpl
def prepare_connection(conn: sqlite3.Connection) -> None:
    """Let SQL read deflated texts: `inflated(raw)`."""
    prepare(conn)


@hookimpl
def render_cell(value: Any, column: str) -> str | None:
    """Show times in UTC, and deflated texts as what they are."""
    if column in TIMES and isinstance(value, float):
        return f"{datetime.fromtimestamp(value, UTC):%Y-%m-%d %H:%M:%S}"
    if isinstance(value, bytes):
        try:
            return inflated(value)
        except ValueError:  # an imported file
            return None
    return None


@hookimpl
def asgi_wrapper() -> Callable[[App], App]:
    """Refuse requests for another host's name."""

    def wrapped(app: App) -> App:
        async def checked(scope: Any, receive: Any, send: Any) -> None:
            names = [value.decode("latin-1") for name, value in scope.get("headers", ()) if name == b"host"]
            if scope["type"] == "http" and not any(name.partition(":")[0] in HOSTS for name in names):
                await Response.text(f"This is only at {LOOPBACK}.", status=403).asgi_send(send)
            else:
                await app(scope, receive, send)

        return checked

    return wrapped
