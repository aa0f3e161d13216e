"""dgxlab schema."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dgxlab.cli._out import Out
from dgxlab.errors import UsageError, command


def schema(
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Write here instead of stdout.")] = None,
) -> None:
    """Write the JSON Schema of experiment files, for editors.

    Example: dgxlab schema --output schema/experiment.schema.json
    """
    import json

    from dgxlab.spec import json_schema

    text = json.dumps(json_schema(), indent=2) + "\n"
    if output is None:
        Out().result(None, text)
        return
    try:
        output.write_text(text)
    except OSError as error:
        raise UsageError(
            f"{output} cannot be written: {error.strerror}", next=command("ls", "-ld", output.parent)
        ) from error
