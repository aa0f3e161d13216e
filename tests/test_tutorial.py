"""docs/tutorial.md, executed word for word on the real llama.cpp."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from dgxlab.source import PinCache
from tests.conftest import PIN, PROJECT, Bench

UPSTREAM = "https://github.com/ggml-org/llama.cpp"
BLOCK = re.compile(r'(?ms)^```(\w+)(?: title="([^"]+)")?\n(.*?)^```$')


@pytest.mark.llama
@pytest.mark.alone
def test_the_tutorial_ends_with_a_verdict_in_a_document(
    llama_bin: Path, make_bench: type[Bench], pin_cache: PinCache, tmp_path: Path
) -> None:
    """Every command exits with 0; upstream is the pin that the tests have, the host's root is theirs too."""
    project = tmp_path / "dgxlab"
    shutil.copytree(PROJECT / "experiments", project / "experiments")
    (project / ".dgxlab-root").touch()
    (project / ".venv" / "bin").mkdir(parents=True)
    (project / ".venv" / "bin" / "activate").write_text(f"PATH={Path(sys.executable).parent}:$PATH\n")
    home = tmp_path / "home"
    (home / ".dgxlab").symlink_to(make_bench().root)
    (home / ".cache" / "dgxlab").mkdir(parents=True)
    (home / ".cache" / "dgxlab" / "llama.cpp.git").symlink_to(pin_cache.path)
    (home / ".gitconfig").write_text("[user]\n\tname = Reader\n\temail = reader@example.org\n")
    checkout = tmp_path / "upstream"
    subprocess.run(["git", "clone", "--quiet", "--no-checkout", pin_cache.path, checkout], check=True)
    subprocess.run(["git", "-C", checkout, "fetch", "--quiet", "origin", f"refs/dgxlab/pins/{PIN}"], check=True)

    script = ["set -euo pipefail"]
    for language, title, text in BLOCK.findall((PROJECT / "docs" / "tutorial.md").read_text()):
        if title:
            (project / title).parent.mkdir(exist_ok=True)
            (project / title).write_text(text)
        elif language == "sh":
            script.append(text.replace(UPSTREAM, str(checkout)))
    env = {**os.environ, "HOME": str(home)}
    ran = subprocess.run(["bash", "-c", "\n".join(script)], cwd=project, env=env, capture_output=True, text=True)  # noqa: PLW1510
    assert ran.returncode == 0, ran.stdout + ran.stderr
    table = (project / "plans" / "repacking.md").read_text()
    assert re.search(r"(?m)^\| pp256 \| (faster|slower|same|inconclusive) \|", table)
    assert re.search(r"(?m)^\| tg32 \| (faster|slower|same|inconclusive) \|", table)
