"""Hostile YAML is refused with its line, fast and small."""

from __future__ import annotations

import pytest

from dgxlab.spec import resolve, yaml_file
from dgxlab.spec.nodes import Mark, Node
from faults.campaign import trials
from faults.kinds.yaml import YAML


def test_refused_with_a_line() -> None:
    """Or read, where nothing is wrong."""
    tally = trials(YAML, 1, range(300))
    assert tally.failures == []
    assert tally.met["read"] > 0
    assert tally.met["refused"] > 250


def test_it_finds_a_loader_without_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that names no line, and one that raises what its parser raises."""
    with monkeypatch.context() as patch:
        patch.setattr(yaml_file, "_at", lambda start, line: Mark(start.source))
        assert any("without a line" in failure.reason for failure in trials(YAML, 1, range(20)).failures)

    def silent(path: object, label: str, **options: object) -> Node:
        raise ValueError("no such line")

    monkeypatch.setattr(resolve, "read_file", silent)
    assert len(trials(YAML, 1, range(20)).failures) > 5
