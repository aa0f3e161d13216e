"""dgxlab schema."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer


def schema(
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Write here instead of stdout.")] = None,
) -> None:
    """Write the JSON Schema of experiment files, for editors.

    Example: dgxlab schema --output schema/experiment.schema.json
    """
    from dgxlab.spec import json_schema

    text = json.dumps(json_schema(), indent=2) + "\n"
    if output:
        output.write_text(text)
    else:
        sys.stdout.write(text)
