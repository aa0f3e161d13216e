"""Every test of specs runs in an empty folder, so that errors name files by short paths."""

from pathlib import Path

import pytest
import yaml

from dgxlab.spec import yaml_file


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    here = tmp_path / "specs"
    here.mkdir()
    monkeypatch.chdir(here)
    return here


@pytest.fixture(params=["libyaml", "python"])
def parser(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Run the test with PyYAML's C parser and with its Python one, which a machine without libyaml gets."""
    loader = getattr(yaml, "CSafeLoader", None) if request.param == "libyaml" else yaml.SafeLoader
    if loader is None:
        pytest.skip("PyYAML has no libyaml here")
    monkeypatch.setattr(yaml_file, "_LOADER", loader)
    return str(request.param)
