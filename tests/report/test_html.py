"""The page for a browser: the tables of the markdown, which sort in a real Chromium, and nothing from elsewhere."""

import base64
import hashlib
import html
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from selenium.webdriver import Chrome, ChromeOptions
from selenium.webdriver.chrome.service import Service

from dgxlab import plots
from dgxlab.plots import chains
from dgxlab.report import collect, collect_job, render
from dgxlab.report.html import document
from dgxlab.report.records import Column, Number, Provenance, Report, Table
from dgxlab.store import Store
from tests.report.test_markdown import EVIL
from tests.report.worlds import session_of_two, whole

AB = "20261121-103000-h200-vs-w4a16-b"


def test_it_has_the_cells_of_the_markdown(store: Store) -> None:
    whole(store)
    markdown = render(collect(store, "h200"))
    page = document(markdown, "a title")
    cells = [html.unescape(re.sub("<[^>]*>", "", cell)) for cell in re.findall(r"(?s)<t[hd][ >].*?</t[hd]>", page)]
    rows = [line for line in markdown.splitlines() if line.startswith("|") and not re.fullmatch(r"[| :-]+", line)]
    assert [cell.strip() for line in rows for cell in line[1:-1].split(" |")] == cells
    assert "<title>Experiment h200</title>" in page
    assert re.findall(r'<td class="(\w+)">(\w+)</td>', page) == [("good", "passed")]
    anchors = re.findall(r'<a href="#([^"]+)"', page)
    assert len(anchors) > 3
    assert all(f'id="{anchor}"' in page for anchor in anchors)


def test_hostile_names_are_only_text() -> None:
    origin = Provenance(EVIL, (EVIL,), EVIL, (), EVIL, None, EVIL)
    hostile = Table("ops", EVIL, (Column("a", EVIL),), ({"a": EVIL},), origin, {EVIL: EVIL})
    page = document(render(Report(EVIL, EVIL, (hostile,), (), ())), EVIL, {EVIL: ""})
    assert len(re.findall("<script", page)) == 1
    (script,) = re.findall("(?s)<script>(.*?)</script>", page)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'" in page
    assert "alert(1)" in re.sub("(?s)<script>.*?</script>|<[^>]*>", "", page)
    assert "<title>dgxlab" not in document("| a |\n| - |\n| b |\n", "form")


def test_pictures_take_their_colours_from_the_page(store: Store) -> None:
    whole(store)
    drawn = [plots.svg(figure) for _, figure in plots.figures(collect(store, "h200"), "h200")]
    assert drawn == [plots.svg(figure) for _, figure in plots.figures(collect(store, "h200"), "h200")]
    assert len(drawn) == 2
    assert [re.findall("#[0-9a-f]{6}(?!\\w)", svg.replace('xlink:href="#', "")) for svg in drawn] == [[], []]
    known = re.findall(r"(--[\w-]+): light-dark\(", document("", ""))
    assert set(re.findall(r"var\((--[\w-]+)\)", "".join(drawn))) <= set(known)


# -- in a browser ------------------------------------------------------------------------------------------------------

SILENT = (
    *("headless=new", "no-sandbox", "disable-gpu", "disable-quic", "no-first-run", "disable-background-networking"),
    *("disable-component-update", "disable-sync", "window-size=1300,900"),
)


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[Chrome]:
    """A headless Chromium that asks nothing of the network."""
    program = shutil.which("chromium") or shutil.which("google-chrome")
    driver = shutil.which("chromedriver")
    if not (program and driver):
        pytest.skip("there is no chromium with its chromedriver: apt-get install chromium-driver")
    options = ChromeOptions()
    options.binary_location = program
    for word in (*SILENT, f"user-data-dir={tmp_path / 'profile'}"):
        options.add_argument(f"--{word}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    started = Chrome(options=options, service=Service(driver))
    try:
        yield started
    finally:
        started.quit()


ROWS: list[dict[str, Any]] = [
    {"test": "pp512", "avg_ts": Number("avg_ts", "t/s", 5, 1.0, median=900.0, of="samples")},
    {"test": "pp64", "avg_ts": None},
    {"test": "pp2048", "avg_ts": Number("avg_ts", "t/s", 5, 1.0, median=10_000.0, of="samples")},
    {"test": "pp128", "avg_ts": Number("avg_ts", "t/s", 5, 1.0, median=2000.0, of="samples")},
]

TABLE = 'const table = [...document.querySelectorAll("table")].at(-1);'
COLUMN = f"{TABLE} return [...table.tBodies[0].rows].map((row) => row.cells[0].innerText)"
HEAD = f"{TABLE} const head = table.tHead.rows[0].cells[arguments[0]];"
COLOURS = """const of = (what, name) => getComputedStyle(document.querySelector(what))[name];
return [of("body", "backgroundColor"), of("body", "color"), of("svg path", "fill"), of("svg text", "fill")]"""


@pytest.mark.slow
def test_in_a_real_browser(store: Store, tmp_path: Path, browser: Chrome) -> None:
    """One start of it, for everything: it takes seconds."""
    whole(store)
    two = session_of_two(store, AB).build().gates()
    two.chains(lambda step, role, cycle: 100.0 + cycle + 10 * (role == "candidate")).gates(after=True).end()
    origin = Provenance("h200", (), "pin", (), "tree", None, "host")
    columns = (Column("test", "test"), Column("avg_ts", "", "avg_ts"))
    speeds = Report("Speeds", "", (Table("single-stream", "Speeds", columns, tuple(ROWS), origin),), (), ())
    markdown = render(collect_job(store, AB)) + render(speeds)
    path = tmp_path / "page.html"
    path.write_text(document(markdown, "both", {"chain": plots.svg(chains.figure(store, AB))}))
    browser.get(path.as_uri())

    def sort(column: int) -> tuple[str, list[str]]:
        turn = browser.execute_script(f"{HEAD} head.querySelector('button').click(); return head.ariaSort", column)
        return turn, browser.execute_script(COLUMN)

    original = ["pp512", "pp64", "pp2048", "pp128"]
    assert browser.execute_script(COLUMN) == original
    assert sort(1) == ("ascending", ["pp512", "pp128", "pp2048", "pp64"])  # as numbers, the missing one last
    assert sort(1) == ("descending", ["pp2048", "pp128", "pp512", "pp64"])
    assert sort(1) == ("none", original)
    assert sort(0) == ("ascending", ["pp64", "pp128", "pp512", "pp2048"])  # by the numbers in the names
    assert browser.execute_script(f"{HEAD} return head.ariaSort", 1) == "none"

    shown = {}
    for mode in ("light", "dark"):
        media = {"features": [{"name": "prefers-color-scheme", "value": mode}]}
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
        shown[mode] = [[*map(int, re.findall(r"\d+", text)[:3])] for text in browser.execute_script(COLOURS)]
    brightness = {mode: [sum(colour) > 3 * 128 for colour in colours] for mode, colours in shown.items()}
    assert brightness == {"light": [True, False, True, False], "dark": [False, True, False, True]}

    browser.set_window_size(420, 900)  # a wide table scrolls in its own box
    width = "return [document.documentElement.scrollWidth, document.documentElement.clientWidth]"
    scrolls, window = browser.execute_script(width)
    assert scrolls <= window
    assert browser.execute_script("return performance.getEntriesByType('resource').map((each) => each.name)") == []
    assert browser.get_log("browser") == []
