"""Gates beside test-backend-ops: the commands of one step, run in order and judged together."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from resource import RLIM_INFINITY
from typing import Any

from dgxlab.agent.failure import full_disk
from dgxlab.agent.job import sha256
from dgxlab.agent.measure import Bench, Launch
from dgxlab.agent.text import text
from dgxlab.model import CheckCommand, CheckStep, to_json
from dgxlab.tools import judge_check, read_check

ATTEMPTS = 3
"""llama.cpp's logger can lose what a program printed just before it exited, with status 0."""

Fill = Callable[[Sequence[str], Mapping[str, str]], list[str]]
"""Replaces a command's placeholders, given those of its step."""


def run_check(bench: Bench, step: CheckStep, fill: Fill) -> dict[str, Any]:
    """Run a step's commands, none after one that failed, and judge them; returns fields of its `check` event."""
    stem = step.id.replace(":", "-")
    words, logits, files = bench.raw / f"{stem}.txt", bench.raw.parent / f"{stem}.logits", bench.raw.parent / stem
    commands: list[dict[str, Any]] = []
    readings: dict[str, dict[str, Any]] = {}
    raw: dict[str, Any] = {}
    if step.text:
        words.write_text(text(step.text.words, step.text.seed), encoding="utf-8")
        raw["text"] = {"path": f"raw/{words.name}", "sha256": sha256(words), "size": words.stat().st_size}
    try:
        _write(files, step.files)
        for command in step.commands:
            argv = fill(command.argv, {"text": str(words), "logits": str(logits), "files": str(files)})
            for name, launched in _launches(bench, step, command, argv):
                told = {"role": command.role, "argv": argv, "env": dict(command.env), "rc": launched.ended.rc}
                commands.append({**told, "seconds": launched.ended.seconds})
                raw |= {f"{name} {stream}": file for stream, file in launched.raw().items()}
                readings[command.role] = _read(step, command, launched) | _engaged(step, launched)
                if not readings[command.role].get("cut"):
                    break
            if "problem" in readings[command.role]:
                break
    finally:
        # gigabytes where the model is large; both are made again from what is kept
        logits.unlink(missing_ok=True)
        shutil.rmtree(files, ignore_errors=True)
    reasons = judge_check(step.gate, readings)
    return {
        "kind": step.gate.name,
        "gate": to_json(step.gate),
        "commands": commands,
        "readings": readings,
        "status": "failed" if reasons else "passed",
        "reasons": list(reasons),
        "raw": raw,
        "seconds": sum(command["seconds"] for command in commands),
    }


def _launches(
    bench: Bench, step: CheckStep, command: CheckCommand, argv: Sequence[str]
) -> Iterator[tuple[str, Launch]]:
    """Launch a command as often as it may be, each time under a name of its own."""
    for number in range(ATTEMPTS):
        name = f"{command.role}-{number}" if number else command.role
        # logits are written, and kernels compiled
        yield name, bench.launch(f"{step.id}-{name}", argv, command.env, step.limit_s, file_limit=RLIM_INFINITY)


def _write(folder: Path, files: Mapping[str, str]) -> None:
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content, encoding="utf-8")


def _read(step: CheckStep, command: CheckCommand, launched: Launch) -> dict[str, Any]:
    stdout = b"" if launched.ended.too_long else launched.stdout.read_bytes()
    reading = read_check(step.gate, command.role, stdout, launched.errors())
    if launched.ended.ok or reading.get("failed"):  # tests that failed say more than how make ended
        return reading
    program = Path(command.argv[0]).name
    ended = launched.ended.sentence(program, step.limit_s)
    return {"problem": f"{ended}: {launched.last_words()}{full_disk(launched.stdout.parent)}"}


def _engaged(step: CheckStep, launched: Launch) -> dict[str, Any]:
    """Return whether the path under test said that it ran, {} where the gate claims none."""
    marker = getattr(step.gate, "engaged", "")
    return {"engaged": marker in launched.errors()} if marker else {}
