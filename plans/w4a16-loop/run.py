"""Try each change of this folder on h200-w4a16-loop, as plans/w4a16-loop.md says. Options go to `dgxlab try`."""

import subprocess
import sys
from pathlib import Path

from dgxlab import series
from dgxlab.source import PinCache, cache_path
from dgxlab.spec import load

CHANGES, SPEC = Path(__file__).parent, Path("experiments/h200/h200-w4a16-loop.yaml")
TREE = cache_path().with_name("w4a16-loop")


def git(*words: str) -> None:
    """Run git in the checkout."""
    subprocess.run(["git", "-C", TREE, *words], check=True)


def check_out() -> None:
    """Make a checkout of the pin with the baseline's series."""
    baseline, cache = load(SPEC), PinCache(cache_path())
    cache.ensure(baseline.pin, baseline.sources, print)
    parts = [series.read(Path(baseline.root), name, baseline.pin) for name in baseline.series]
    commit = series.apply(cache, baseline.pin, parts).commit
    subprocess.run(["git", "init", "--quiet", TREE], check=True)
    (TREE / ".git/objects/info/alternates").write_text(f"{cache.path.resolve() / 'objects'}\n")
    if (shallow := cache.path / "shallow").exists():
        (TREE / ".git/shallow").write_bytes(shallow.read_bytes())
    git("checkout", "--quiet", "--force", "--detach", commit)


def main() -> None:
    """Apply each change alone, and try it."""
    check_out()
    for diff in sorted(CHANGES.glob("*.diff")):
        git("checkout", "--quiet", ".")
        git("apply", str(diff.resolve()))
        because = diff.read_text().splitlines()[0]
        asked = ["try", SPEC.stem, "--tree", TREE, "--because", because, *sys.argv[1:]]
        subprocess.run([sys.executable, "-m", "dgxlab", *asked], check=False)  # a try that is dropped has a status too


if __name__ == "__main__":
    main()
