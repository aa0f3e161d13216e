"""What the user's config.yaml wants when a job has ended: a command of theirs, the terminal's bell."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable
from typing import TYPE_CHECKING

from dgxlab.cli._out import Out, clean, ring
from dgxlab.errors import one_line
from dgxlab.project import user_folder

if TYPE_CHECKING:
    from dgxlab.store import Job

_LIMIT_S = 20.0  # max time of the user's command: a report must not wait for a network


def on_end(out: Out) -> Callable[[Job, str], None]:
    """Return a function to call with a job that has ended and with its result in words.

    Raises SpecError if config.yaml is wrong, so call it before anything is measured.
    """
    path = user_folder("XDG_CONFIG_HOME", ".config") / "config.yaml"
    if not path.exists():
        return lambda job, result: None
    from dgxlab.spec.config import load_config

    config = load_config(path)

    def tell(job: Job, result: str) -> None:
        if config.bell:
            ring()
        if config.on_end:
            _run(config.on_end, job, clean(one_line(result)), out)

    return tell


def _run(argv: list[str], job: Job, result: str, out: Out) -> None:
    """Run the user's command; its failure is only a note."""
    text = f"{job.name} on {job.host} {job.state}" + (f": {result}" if result else "")
    words = {"job": job.job_id, "name": job.name, "kind": job.kind, "host": job.host, "state": job.state, "text": text}
    filled = [re.sub(r"\{(\w+)\}", lambda match: words.get(match[1], match[0]), word) for word in argv]
    try:
        ended = subprocess.run(
            filled,
            input=json.dumps({"text": text}).encode() + b"\n",
            capture_output=True,
            timeout=_LIMIT_S,
            check=False,
        )
        lines = ended.stderr.decode(errors="replace").strip().splitlines()
        why = f"exit status {ended.returncode}" + (f", {lines[-1]}" if lines else "") if ended.returncode else ""
    except (OSError, subprocess.SubprocessError) as error:
        why = str(error)
    if why:
        out.note(one_line(f"on_end of your config.yaml failed: {why}"))
