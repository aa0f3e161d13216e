"""The files: PNG of the size asked for, the same bytes each time, whole or not there, and a word where none can be."""

import subprocess
import sys
import tomllib
from pathlib import Path

import matplotlib as mpl
import pytest
from PIL import Image

from dgxlab import plots
from dgxlab.errors import UsageError
from dgxlab.plots import chains
from dgxlab.report import collect
from dgxlab.store import Store
from tests.conftest import PROJECT
from tests.plots.test_chain import A, B, held
from tests.report.worlds import whole


def size_of(path: Path) -> tuple[int, int]:
    with Image.open(path, formats=["PNG"]) as image:
        image.verify()
        assert image.info.keys() == {"dpi"}  # nothing tells when or with what it was made
        return image.size


def drawn(store: Store, job_id: str, path: Path) -> Path:
    return plots.write(chains.figure(store, job_id), path)


def test_they_are_png_of_the_size_asked_for(store: Store, tmp_path: Path) -> None:
    whole(store)
    folder = tmp_path / "pictures"
    made = plots.figures(collect(store, "h200"), "h200")
    written = [plots.write(figure, folder / f"{name}.png") for name, figure in made]
    assert [path.name for path in written] == ["h200-ops.png", "h200-concurrency.png"]
    assert sorted(written) == sorted(folder.iterdir())
    for path in written:
        width, height = size_of(path)
        assert width == plots.WIDTH * plots.DPI
        assert 480 < height < 800


def test_the_same_record_gives_the_same_bytes(store: Store, tmp_path: Path) -> None:
    held(store)
    first = drawn(store, A, tmp_path / "one.png").read_bytes()
    with mpl.rc_context({"font.size": 20.0, "axes.grid": False, "lines.linewidth": 9.0, "savefig.dpi": 10}):
        second = drawn(store, A, tmp_path / "two.png").read_bytes()
        assert mpl.rcParams["font.size"] == 20.0
    assert first == second
    held(store, B)
    assert first != drawn(store, B, tmp_path / "other.png").read_bytes()


def test_an_earlier_picture_is_replaced_whole(store: Store, tmp_path: Path) -> None:
    held(store)
    path = tmp_path / "pictures" / "chain.png"
    path.parent.mkdir()
    path.write_bytes(b"an old one")
    drawn(store, A, path)
    assert size_of(path)[0] == plots.WIDTH * plots.DPI
    assert list(path.parent.iterdir()) == [path]
    with pytest.raises(UsageError, match="cannot be written: ") as error:
        drawn(store, A, path / "below-a-file.png")
    assert error.value.next == f"ls -ld {path} {path}/below-a-file.png"


def test_strange_letters_do_not_stop_it(tmp_path: Path) -> None:
    with plots.new(1.0) as figure:
        plots.label(figure, "$x_1$ \\frac{ 漢字\n\x1b[31m", [], [])
    assert figure.legends[0].get_title().get_text() == "$x_1$ \\frac{ 漢字  [31m"
    assert size_of(plots.write(figure, tmp_path / "strange.png"))


def test_without_matplotlib_the_command_that_installs_it(store: Store, tmp_path: Path) -> None:
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
from dgxlab.plots import chains
from dgxlab.report import collect, collect_job
from dgxlab.store import Store
with Store.open(Path(sys.argv[1])) as store:
    made = collect(store, "h200")
    for ask in (lambda: chains.figure(store, sys.argv[2]), lambda: list(plots.figures(made, "x"))):
        try:
            ask()
        except UsageError as error:
            print(error.message, error.next, sep="\\n")
    print(list(plots.figures(collect_job(store, sys.argv[2]), "x")))
"""
    command = [sys.executable, "-c", code, str(store.path), A]
    ran = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path)
    refusal = [
        "pictures are drawn with matplotlib, and there is no module matplotlib",
        f"{sys.executable} -m pip install '{plots.FLOOR}'",
    ]
    assert ran.stdout.splitlines() == [*refusal, *refusal, "[]"]
    assert not list(tmp_path.glob("*.png"))


def test_the_floor_is_that_of_the_extra() -> None:
    project = tomllib.loads((PROJECT / "pyproject.toml").read_text())
    assert project["project"]["optional-dependencies"]["plots"] == [plots.FLOOR]
    assert plots.FLOOR in project["dependency-groups"]["test"]


def test_drawing_changes_nothing_for_others(tmp_path: Path) -> None:
    code = """
import sys
from pathlib import Path
from dgxlab import plots
assert "matplotlib" not in sys.modules
with plots.new(1.0) as figure:
    plots.write(figure, Path("x.png"))
assert "matplotlib.pyplot" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=tmp_path)
    assert (tmp_path / "x.png").exists()
