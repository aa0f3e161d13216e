"""dgxlab pin: llama.cpp's commits as pins."""

from __future__ import annotations

from itertools import chain

from typer import Argument, Option

from dgxlab.cli._app import App, readable_experiments
from dgxlab.cli._out import Out

app = App("Name llama.cpp's commits.")


@app.add
def id_(
    name: str = Argument(help="A tag, a branch, or the beginning of a commit's id."),
    source: list[str] | None = Option(None, help="Where to look; by default where this project's specs say."),
    *,
    out: Out,
) -> None:
    """Print the pin that a tag, a branch or a commit is, for a spec.

    Example: dgxlab pin id b6900
    """
    from dgxlab.model import UPSTREAM
    from dgxlab.source import PinCache, full_id

    known = source or list(dict.fromkeys(chain.from_iterable(spec.sources for spec in readable_experiments(out.note))))
    pin = full_id(name, known or [UPSTREAM], PinCache(), out.note)
    out.result({"name": name, "pin": pin}, f"pin: {pin}  # {name}")
