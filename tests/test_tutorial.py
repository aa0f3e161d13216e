"""docs/tutorial.md, executed word for word on the real llama.cpp, and the way from an empty folder to a verdict."""

import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dgxlab.source import PinCache
from tests.conftest import PROJECT, Bench

BLOCK = re.compile(r'(?ms)^```(\w+)(?: title="([^"]+)")?\n(.*?)^```$')


VERDICT = r"(faster|slower|same|inconclusive)"


def reader(home: Path, bench: Bench, pin_cache: PinCache) -> dict[str, str]:
    """Return the environment of a reader whose host folder and pins are the tests'."""
    (home / ".dgxlab").symlink_to(bench.root)
    (home / ".cache" / "dgxlab").mkdir(parents=True)
    (home / ".cache" / "dgxlab" / "llama.cpp.git").symlink_to(pin_cache.path)
    (home / ".gitconfig").write_text("[user]\n\tname = Reader\n\temail = reader@example.org\n")
    # last, as for a job on this machine: another cmake would be another build
    return {**os.environ, "HOME": str(home), "PATH": f"{os.environ['PATH']}:{Path(sys.executable).parent}"}


@pytest.mark.llama
@pytest.mark.alone
def test_an_empty_folder_has_a_verdict_after_five_commands(
    llama_bin: Path, make_bench: type[Bench], pin_cache: PinCache, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The build is there already. How long it took is printed, not asserted."""
    lab = tmp_path / "lab"
    lab.mkdir()
    env = reader(tmp_path / "home", make_bench(), pin_cache)
    ab, update = "dgxlab ab stock one-thread", "dgxlab report --update plans/first.md"
    commands = ["dgxlab init --cpu", "dgxlab doctor", "dgxlab plan stock one-thread", ab, update]
    begin = time.monotonic()
    script = "\n".join(["set -e", *commands])
    ran = subprocess.run(["bash", "-c", script], cwd=lab, env=env, capture_output=True, text=True)  # noqa: PLW1510
    with capsys.disabled():
        print(f"\n{len(commands)} commands, from an empty folder to a verdict: {time.monotonic() - begin:.0f} s")  # noqa: T201
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert re.search(rf"(?m)^\| pp128 \| {VERDICT} \|", (lab / "plans" / "first.md").read_text())


@pytest.mark.llama
@pytest.mark.alone
def test_the_tutorial_ends_with_a_verdict_in_a_document(
    llama_bin: Path, make_bench: type[Bench], pin_cache: PinCache, tmp_path: Path
) -> None:
    """Every command exits with 0; the pins and the host's root are the tests'."""
    project = tmp_path / "dgxlab"
    shutil.copytree(PROJECT / "experiments", project / "experiments")
    (project / ".dgxlab-root").touch()
    (project / ".venv" / "bin").mkdir(parents=True)
    (project / ".venv" / "bin" / "activate").write_text(f"PATH={Path(sys.executable).parent}:$PATH\n")
    env = reader(tmp_path / "home", make_bench(), pin_cache)

    script = ["set -euo pipefail"]
    for language, title, text in BLOCK.findall((PROJECT / "docs" / "tutorial.md").read_text()):
        if title:
            (project / title).parent.mkdir(exist_ok=True)
            (project / title).write_text(text)
        elif language == "sh":
            script.append(text)
    ran = subprocess.run(["bash", "-c", "\n".join(script)], cwd=project, env=env, capture_output=True, text=True)  # noqa: PLW1510
    assert ran.returncode == 0, ran.stdout + ran.stderr
    table = (project / "plans" / "repacking.md").read_text()
    assert re.search(rf"(?m)^\| pp256 \| {VERDICT} \|", table)
    assert re.search(rf"(?m)^\| tg32 \| {VERDICT} \|", table)
