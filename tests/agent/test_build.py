"""A work folder, and what a power loss leaves in it."""

from __future__ import annotations

from pathlib import Path

import pytest

from dgxlab.agent import build
from dgxlab.agent.build import _surviving


@pytest.mark.parametrize(("mark", "kept"), [(None, True), ("this boot", True), ("another boot", False), ("", False)])
def test_what_another_boot_left_half_done_is_made_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mark: str | None, kept: bool
) -> None:
    """A finished build stays, and so does one that this boot cut short: ninja goes on from it."""
    monkeypatch.setattr(build, "boot_id", lambda: "this boot")
    parts = (tmp_path / "cmake" / "x.o", tmp_path / "src" / "x.c", tmp_path / "index")
    for part in parts:
        part.parent.mkdir(exist_ok=True)
        part.write_text("x")
    if mark is not None:
        (tmp_path / "building").write_text(mark)
    with _surviving(tmp_path):
        assert {part.exists() for part in parts} == {kept}
        assert (tmp_path / "building").read_text() == "this boot"
    assert not (tmp_path / "building").exists()
