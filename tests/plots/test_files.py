"""The files: PNG of the size asked for, the same bytes each time, whole or not there, and a word where none can be."""

from __future__ import annotations

import struct
import subprocess
import sys
import tomllib
import zlib
from pathlib import Path

import matplotlib as mpl
import pytest

from dgxlab import plots
from dgxlab.errors import UsageError
from dgxlab.plots import paper
from dgxlab.report import collect
from dgxlab.store import Store
from tests.conftest import PROJECT
from tests.plots.test_chain import A, B, held
from tests.report.worlds import whole


def chunks(content: bytes) -> list[tuple[bytes, bytes]]:
    """Read a PNG as its standard says, every checksum checked."""
    assert content[:8] == b"\x89PNG\r\n\x1a\n"
    parts, at = [], 8
    while at < len(content):
        length, kind = struct.unpack(">I4s", content[at : at + 8])
        data = content[at + 8 : at + 8 + length]
        assert struct.unpack(">I", content[at + 8 + length : at + 12 + length])[0] == zlib.crc32(kind + data)
        parts.append((kind, data))
        at += 12 + length
    assert parts[-1] == (b"IEND", b"")
    return parts


def test_they_are_png_of_the_size_asked_for(store: Store, tmp_path: Path) -> None:
    """Nine inches wide; nothing in them tells when or with what they were made."""
    whole(store)
    written = plots.draw(collect(store, "h200"), tmp_path / "pictures", "h200")
    assert [path.name for path in written] == ["h200-ops.png", "h200-concurrency.png"]
    assert sorted(written) == sorted((tmp_path / "pictures").iterdir())
    for path in written:
        parts = chunks(path.read_bytes())
        width, height = struct.unpack(">II", parts[0][1][:8])
        assert width == paper.WIDTH * paper.DPI
        assert 480 < height < 800
        assert {kind for kind, _ in parts} <= {b"IHDR", b"pHYs", b"IDAT", b"IEND"}


def test_the_same_record_gives_the_same_bytes(store: Store, tmp_path: Path) -> None:
    """Whatever the user's own settings are; and those are left alone."""
    held(store)
    first = plots.chain(store, A, tmp_path / "one.png").read_bytes()
    with mpl.rc_context({"font.size": 20.0, "axes.grid": False, "lines.linewidth": 9.0, "savefig.dpi": 10}):
        second = plots.chain(store, A, tmp_path / "two.png").read_bytes()
        assert mpl.rcParams["font.size"] == 20.0
    assert first == second
    held(store, B)
    assert first != plots.chain(store, B, tmp_path / "other.png").read_bytes()


def test_an_earlier_picture_is_replaced_whole(store: Store, tmp_path: Path) -> None:
    """Nothing else is left in the folder; one that cannot be written is a sentence."""
    held(store)
    path = tmp_path / "pictures" / "chain.png"
    path.parent.mkdir()
    path.write_bytes(b"an old one")
    plots.chain(store, A, path)
    chunks(path.read_bytes())
    assert list(path.parent.iterdir()) == [path]
    with pytest.raises(UsageError, match="cannot be written: ") as error:
        plots.chain(store, A, path / "below-a-file.png")
    assert error.value.next == f"ls -ld {path}"


def test_strange_letters_do_not_stop_it(tmp_path: Path) -> None:
    """What looks like mathematics is text; a letter that the font does not have is a box."""
    with paper.new(1.0) as figure:
        paper.head(figure, "$x_1$ \\frac{ 漢字\n\x1b[31m", [])
    assert [text.get_text() for text in figure.texts] == ["$x_1$ \\frac{ 漢字  [31m", ""]
    chunks(paper.write(figure, tmp_path / "strange.png").read_bytes())


def test_without_matplotlib_the_command_that_installs_it(store: Store, tmp_path: Path) -> None:
    """And only who draws needs it: importing this package does not."""
    held(store)
    whole(store, "20261120-093000-h200-c")
    code = """
import sys
from pathlib import Path
class Absent:
    def find_spec(self, name, *rest):
        if name.startswith("matplotlib"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Absent())
from dgxlab import plots
from dgxlab.errors import UsageError
from dgxlab.report import collect
from dgxlab.store import Store
with Store.open(Path(sys.argv[1])) as store:
    drawn, made = Path("x.png"), collect(store, "h200")
    for ask in (lambda: plots.chain(store, sys.argv[2], drawn), lambda: plots.draw(made, Path(), "x")):
        try:
            ask()
        except UsageError as error:
            print(error.message, error.next, sep="\\n")
    print(plots.draw(collect(store, job_id=sys.argv[2]), Path(), "x"))
"""
    command = [sys.executable, "-c", code, str(store.path), A]
    ran = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path)
    refusal = [
        "pictures are drawn with matplotlib, and there is no module matplotlib",
        f"{sys.executable} -m pip install '{paper.FLOOR}'",
    ]
    assert ran.stdout.splitlines() == [*refusal, *refusal, "[]"]
    assert not list(tmp_path.glob("*.png"))


def test_the_floor_is_that_of_the_extra() -> None:
    """The command installs what the package asks for; the tests have the same."""
    project = tomllib.loads((PROJECT / "pyproject.toml").read_text())
    assert project["project"]["optional-dependencies"]["plots"] == [paper.FLOOR]
    assert paper.FLOOR in project["dependency-groups"]["test"]


def test_drawing_changes_nothing_for_others(tmp_path: Path) -> None:
    """No window, no global figure: pyplot is never loaded, nor is matplotlib before something is drawn."""
    code = """
import sys
from pathlib import Path
from dgxlab.plots import paper
assert "matplotlib" not in sys.modules
with paper.new(1.0) as figure:
    paper.write(figure, Path("x.png"))
assert "matplotlib.pyplot" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=tmp_path)
    assert (tmp_path / "x.png").exists()
