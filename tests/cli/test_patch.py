"""`dgxlab patch list`, `check`, `refresh`, `export` and `pin id`, from the first edit to a measured arm."""

from pathlib import Path

import pytest

from tests import toy
from tests.cli.conftest import Project


@pytest.fixture
def series(project: Project, tmp_path: Path) -> Project:
    checkout = project.checkout(tmp_path / "llama.cpp")
    source = checkout / "ggml" / "ggml.c"
    source.write_text(source.read_text() + "int more(void) { return 1; }\n")
    ran = project.run("patch", "export", "more", "--tree", checkout, "--message", "toys : add more")
    assert (ran.rc, ran.out) == (0, "patches/more/toys-add-more.patch\n")
    return project


def test_export_names_the_patches_that_it_removes(project: Project, tmp_path: Path) -> None:
    """Those of commits that the checkout does not have."""
    checkout = project.checkout(tmp_path / "llama.cpp")
    (checkout / "new.c").write_text("int more(void);\n")
    export = ("patch", "export", "more", "--tree", checkout, "-m")
    assert project.ok(*export, "toys : add more").out == "patches/more/toys-add-more.patch\n"
    toy.git(project.folder, "init", "-q")
    toy.git(project.folder, "add", "patches")
    gone = project.ok(*export, "toys : again").out
    assert gone == "patches/more/toys-again.patch\nremoved: patches/more/toys-add-more.patch\n"


def test_export_asks_for_a_message(project: Project, tmp_path: Path) -> None:
    checkout = project.checkout(tmp_path / "llama.cpp")
    (checkout / "new.c").write_text("int more(void);\n")
    ran = project.run("patch", "export", "more", "--tree", checkout)
    assert (ran.rc, ran.out) == (9, "")
    assert "--message" in ran.next
    assert list((project.folder / "patches").iterdir()) == []


def test_a_sound_series_is_listed_checks_out_and_needs_no_refresh(series: Project) -> None:
    (listed,) = series.json("patch", "list")
    assert (listed["name"], listed["patches"], listed["overlays"]) == ("more", ["toys-add-more.patch"], [])
    assert series.run("patch", "list").out == f"more@{listed['digest'][:12]}\n  toys-add-more.patch\n"
    pin = series.machine.pin[:12]
    assert series.run("patch", "check").out == f"pin {pin}\nmore: no problems\n"
    assert series.run("patch", "refresh", "more").out == "nothing to change\n"


def test_a_broken_series_is_listed_with_what_is_wrong(series: Project) -> None:
    (sound,) = series.json("patch", "list")
    broken = series.folder / "patches/broken"
    broken.mkdir()
    (broken / "series").write_text("gone.patch\noverlay kernels/gone.cu ggml/gone.cu\n")
    problems = ["gone.patch: there is no such file", "overlay kernels/gone.cu ggml/gone.cu: there is no such file"]
    empty = {"digest": None, "patches": [], "overlays": [], "pins": {}}
    assert series.json("patch", "list") == [{"name": "broken", **empty, "problems": problems}, sound]
    lines = series.ok("patch", "list").out.splitlines()
    assert lines[:4] == ["broken", *(f"  {line}" for line in (*problems, "mend the files in patches/broken"))]
    assert lines[4] == f"more@{sound['digest'][:12]}"


def test_pin_bump_is_checked_and_refreshed(series: Project) -> None:
    later = series.machine.later
    ran = series.run("patch", "check", "--pin", later)
    assert (ran.rc, ran.next) == (11, f"dgxlab patch refresh more --pin {later}")
    assert "ggml/ggml.c moved" in ran.out
    assert series.run(*ran.next.split()[1:]).out == "wrote toys-add-more.patch\n"
    series.ok("patch", "check", "--pin", later)


def test_two_pins_are_checked_each_with_its_series(series: Project) -> None:
    """A spec of a second pin adds it to the check, for the series that it applies or that have patches for it."""
    first, later = series.machine.pin, series.machine.later
    series.spec("later", f'extends: toy.yaml\nllama_cpp: {{pin: "{later}", sources: [{series.machine.repository}]}}\n')
    ran = series.run("patch", "check")
    assert (ran.rc, sorted(ran.out.splitlines()[::2])) == (0, sorted([f"pin {later[:12]}", f"pin {first[:12]}"]))
    assert set(ran.out.splitlines()[1::2]) == {"no series"}
    assert "left out, as no spec names them: more" in ran.err
    ran = series.run("patch", "check", "more")
    assert (ran.out.count("\nmore: "), "checked on each of 2 pins, as no spec names them: more" in ran.err) == (2, True)
    series.spec("more", "extends: toy.yaml\nseries: [more]\n")
    named = series.run("patch", "check", "more")
    assert (named.rc, f"pin {first[:12]}\nmore: no problems" in named.out) == (0, True)
    series.spec("more-later", "extends: later.yaml\nseries: [more]\n")
    ran = series.run("patch", "check")
    assert "more: 1 problem\n" in ran.out
    assert (ran.rc, ran.next) == (11, f"dgxlab patch refresh more --pin {later} --beside")
    assert series.run(*ran.next.split()[1:]).out == "wrote toys-add-more.patch\n"
    assert series.ok("patch", "check").out.count("more: no problems") == 2
    assert series.json("patch", "list")[0]["pins"].keys() == {later[:12]}
    assert {path.name for path in (series.folder / "patches/more").iterdir()} == {
        *("series", "toys-add-more.patch", later[:12])
    }
    patch = series.folder / "patches/more/toys-add-more.patch"  # made for the first pin, and to be mended there
    patch.write_text(patch.read_text() + "\n")
    assert series.run("patch", "check").next == f"dgxlab patch refresh more --pin {first}"


def test_series_becomes_a_measured_arm(series: Project) -> None:
    (listed,) = series.json("patch", "list")
    ran = series.ok("run", series.spec("more", "extends: toy.yaml\nseries: [more]\n"))
    assert ran.out.count(f"series more@{listed['digest'][:12]}") == 1


def test_a_name_becomes_a_line_for_a_spec(project: Project) -> None:
    """By the sources that this project's specs name; a spec that is being edited is passed."""
    project.spec("broken", "llama_cpp: [")
    ran = project.ok("pin", "main")
    assert ran.out == f"llama_cpp: {{pin: {project.machine.later}}}  # main\n"
    assert "left out: " in ran.err
    spec = project.spec("later", f"extends: toy.yaml\n{ran.out}")
    assert project.machine.later[:12] in project.ok("plan", spec).out
    assert project.json("pin", "id", "main") == {"name": "main", "pin": project.machine.later}


def test_a_pin_that_is_a_name_says_how_to_find_its_id(project: Project) -> None:
    ran = project.run("patch", "check", "--pin", "main")
    assert (ran.rc, ran.next) == (9, "dgxlab pin main")
