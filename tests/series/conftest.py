"""A toy project: a clone of a toy llama.cpp, a cache with its pin, and folders for patches and kernels."""

import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from dgxlab import series
from dgxlab.model import Source
from dgxlab.series import Series
from dgxlab.source import PinCache
from tests.repos import GGML_C, cache_of, commit, git, patch_text, quiet, upstream, write_series


@dataclass
class Project:
    root: Path
    clone: Path
    cache: PinCache
    pin: str

    def patch(self, files: Mapping[str, str | bytes | None], message: str = "a change", **options: str) -> bytes:
        commit(self.clone, files, message, env=options)
        return patch_text(self.clone)

    def back(self) -> None:
        git(self.clone, "reset", "--quiet", "--hard", self.pin)
        git(self.clone, "clean", "-ffdxq")

    def series(self, name: str, patches: Mapping[str, bytes], *extra: str) -> None:
        write_series(self.root, name, patches, extra)

    def read(self, name: str, pin: str = "") -> Series:
        return series.read(self.root, name, pin)

    def apply(self, *names: str, pin: str = "") -> Source:
        return series.apply(self.cache, pin or self.pin, [self.read(name, pin) for name in names])

    def content(self, source: Source, path: str) -> str:
        return self.cache.git.read("cat-file", "blob", f"{source.commit}:{path}").decode()

    def files(self, name: str) -> dict[str, bytes]:
        every = sorted((self.root / "patches" / name).iterdir())
        return {path.name: path.read_bytes() for path in every if path.is_file()}

    def new_pin(self, files: Mapping[str, str | bytes | None], message: str = "upstream moves") -> str:
        """Let upstream move on from the pin, and take that as a pin too."""
        self.back()
        pin = commit(self.clone, files, message)
        self.cache.ensure(pin, [str(self.clone)], quiet)
        git(self.clone, "branch", "--force", "upstream", pin)
        self.back()
        return pin


@pytest.fixture(autouse=True)
def empty_folder(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Run each test in an empty folder, which must stay empty: git apply has been seen to write there."""
    where = tmp_path_factory.mktemp("cwd")
    monkeypatch.chdir(where)
    yield
    assert list(where.iterdir()) == []


@pytest.fixture(scope="session")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project without series, to be copied."""
    where = tmp_path_factory.mktemp("template")
    cache_of(where / "cache", where / "clone", upstream(where / "clone"))
    (where / "project" / "patches").mkdir(parents=True)
    return where


@pytest.fixture
def project(template: Path, tmp_path: Path) -> Project:
    shutil.copytree(template, tmp_path, dirs_exist_ok=True, symlinks=True)
    cache = PinCache(tmp_path / "cache")
    return Project(tmp_path / "project", tmp_path / "clone", cache, *cache.pins())


@pytest.fixture
def shout(project: Project) -> Project:
    """The project with a series `shout` of one patch: function `three` starts twice."""
    project.series("shout", {"shout.patch": project.patch({"ggml/ggml.c": twice("three")}, "ggml : shout")})
    project.back()
    return project


def twice(name: str, text: str = GGML_C) -> str:
    """Return the C text with one function's start doubled."""
    head, tail = text.split(f"void {name}(")
    return f"{head}void {name}(" + tail.replace("    start(i);\n", "    start(i);\n    start(i + 1);\n", 1)


def starts_twice(text: str) -> list[str]:
    """Return the functions of the toy's C text that start twice."""
    return [body.split("(")[0] for body in text.split("void ")[1:] if "start(i + 1)" in body]
