"""hosts.yaml."""

from __future__ import annotations

from pathlib import Path

import pytest

from dgxlab.errors import SpecError
from dgxlab.model import HostEntry
from dgxlab.spec.hosts import find_host, load_hosts


def write(path: Path, text: str) -> Path:
    """Write a hosts.yaml."""
    path.write_text(text)
    return path


def test_entries_and_defaults(tmp_path: Path) -> None:
    """An ssh name is enough; local needs no entry; this machine may have another name."""
    path = write(tmp_path / "hosts.yaml", "dgx: {ssh: dgx}\nbox: {local: true, root: ~/lab, python: python3.12}\n")
    assert load_hosts([path]) == {
        "local": HostEntry("local"),
        "dgx": HostEntry("dgx", "dgx"),
        "box": HostEntry("box", "", "~/lab", "python3.12"),
    }


def test_the_projects_entry_comes_before_the_users(tmp_path: Path) -> None:
    """A whole entry is taken from the first file that has it."""
    ours = write(tmp_path / "a.yaml", "dgx: {ssh: ours}\n")
    theirs = write(tmp_path / "b.yaml", "dgx: {ssh: theirs, root: ~/other}\nspark: {ssh: spark}\n")
    hosts = load_hosts([ours, theirs, tmp_path / "missing.yaml"])
    assert (hosts["dgx"].ssh, hosts["dgx"].root, hosts["spark"].ssh) == ("ours", "~/.dgxlab", "spark")


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("dgx: {shs: dgx}\n", "dgx.shs: unknown key; did you mean ssh?"),
        ("dgx: {}\n", "exactly one of ssh: and local: true"),
        ("dgx: {ssh: dgx, local: true}\n", "exactly one of ssh: and local: true"),
        ("dgx: {ssh: -oProxyCommand=x}\n", "what ssh is given"),
        ("'../x': {ssh: dgx}\n", "a name of letters"),
        ("dgx: {ssh: a}\ndgx: {ssh: b}\n", "duplicate key"),
        ("- dgx\n", "map"),
        ("dgx: {ssh: dgx, env: {PATH: /x}}\n", "dgx.env.PATH: cannot be set: it is the host's own"),
        ("dgx: {ssh: dgx, env: {LD_LIBRARY_PATH: /x}}\n", "changes which libraries load"),
        ("dgx: {ssh: dgx, path_prepend: [bin]}\n", "a path on the host"),
        ("dgx: {ssh: dgx, lock: owner}\n", "a path on the host"),
    ],
)
def test_what_is_refused(tmp_path: Path, text: str, sentence: str) -> None:
    """Each with the file, and a sentence."""
    path = write(tmp_path / "hosts.yaml", text)
    with pytest.raises(SpecError) as caught:
        load_hosts([path])
    assert sentence in caught.value.message
    assert str(path) in caught.value.message


def test_the_nearest_name(tmp_path: Path) -> None:
    """A host that no file names."""
    path = write(tmp_path / "hosts.yaml", "spark: {ssh: spark}\n")
    with pytest.raises(SpecError, match=r"host sprak is not known.*; did you mean spark\?"):
        find_host("sprak", [path])


def test_what_a_machine_needs_said(tmp_path: Path) -> None:
    """PATH, environment and a lock file that others use; one folder needs no list."""
    text = (
        "dgx:\n  ssh: dgx\n  path_prepend: /usr/local/cuda-13.0/bin\n"
        "  env: {CC: gcc-12}\n  lock: ~/gpu_bench_lock/owner\n"
    )
    found = load_hosts([write(tmp_path / "hosts.yaml", text)])["dgx"]
    assert found.path_prepend == ("/usr/local/cuda-13.0/bin",)
    assert (found.env, found.lock) == ({"CC": "gcc-12"}, "~/gpu_bench_lock/owner")
