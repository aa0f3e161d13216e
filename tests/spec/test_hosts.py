"""hosts.yaml."""

import math
from pathlib import Path

import pytest

from dgxlab.errors import HostError, SpecError
from dgxlab.model import HostEntry, limit_s
from dgxlab.spec.hosts import add_host, consent, find_host, load_hosts, look_up


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_entries_and_defaults(tmp_path: Path) -> None:
    path = write(
        tmp_path / "hosts.yaml",
        "dgx: {ssh: dgx}\nbox: {local: true, root: ~/lab, python: python3.12}\n"
        "spark: {ssh: spark, path_prepend: /usr/local/cuda-13.0/bin, env: {CC: gcc-12}, lock: ~/owner}\n"
        "half: {ssh: dgx, processors: '32,0-15,3'}\nfirst: {local: true, processors: 0}\n",
    )
    folders = ("/usr/local/cuda-13.0/bin",)
    assert load_hosts([path]) == {
        "local": HostEntry("local"),
        "dgx": HostEntry("dgx", "dgx"),
        "box": HostEntry("box", "", "~/lab", "python3.12"),
        "spark": HostEntry("spark", "spark", path_prepend=folders, env={"CC": "gcc-12"}, lock="~/owner"),
        "half": HostEntry("half", "dgx", processors=(*range(16), 32)),
        "first": HostEntry("first", processors=(0,)),
    }


def test_the_users_whole_entry_comes_before_the_projects(tmp_path: Path) -> None:
    ours = write(tmp_path / "a.yaml", "dgx: {ssh: ours}\n")
    theirs = write(tmp_path / "b.yaml", "dgx: {ssh: theirs, root: ~/other}\nspark: {ssh: spark}\n")
    hosts = load_hosts([ours, theirs, tmp_path / "missing.yaml"])
    assert (hosts["dgx"].ssh, hosts["dgx"].root, hosts["spark"].ssh) == ("ours", "~/.dgxlab", "spark")


@pytest.mark.parametrize(
    ("entry", "keys"),
    [
        ("local: true", "local"),
        ("ssh: a, python: /x", "python"),
        ("ssh: a, env: {CC: /x}, lock: ~/x", "env, lock"),
        ("ssh: a, path_prepend: [/x]", "path_prepend"),
        ("ssh: a, processors: 0-3", "processors"),
    ],
)
def test_what_a_project_may_say_with_consent(entry: str, keys: str, tmp_path: Path) -> None:
    """The consent is for one entry of one file as it is; ssh and root need none."""
    own, theirs = tmp_path / "own" / "hosts.yaml", write(tmp_path / "hosts.yaml", f"dgx: {{{entry}}}\n")
    with pytest.raises(HostError, match=f"hosts.yaml sets its {keys}, and a project"):
        find_host("dgx", [own, theirs])
    assert find_host("dgx", [theirs]).name == "dgx"
    consent(look_up("dgx", [own, theirs]), own)
    assert find_host("dgx", [own, theirs]).name == "dgx"
    copy = write(tmp_path / "copy.yaml", theirs.read_text())
    write(theirs, f"dgx: {{{entry}, root: /other}}\n")
    for changed in (theirs, copy):
        with pytest.raises(HostError):
            find_host("dgx", [own, changed])
    write(theirs, "dgx: {ssh: a, root: /other}\n")
    assert find_host("dgx", [own, theirs]).root == "/other"


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
        ("dgx: [\n", "is not YAML"),
        ("local: {ssh: dgx}\n", "local: is this machine"),
        ("dgx: {ssh: a}\n---\nb: {}\n", "a second document"),
        ("dgx: {ssh: dgx, env: {PATH: /x}}\n", "dgx.env.PATH: cannot be set: it is the host's own"),
        ("dgx: {ssh: dgx, env: {LD_LIBRARY_PATH: /x}}\n", "changes which libraries load"),
        ("dgx: {ssh: dgx, path_prepend: [bin]}\n", "a path on the host"),
        ("dgx: {ssh: dgx, processors: all}\n", "must be numbers of processors, as 0-15,32"),
        ("dgx: {ssh: dgx, processors: 15-0}\n", "must be numbers of processors, as 0-15,32"),
        ("dgx: {ssh: dgx, processors: 0-3, slurm: {}}\n", "cannot have processors: with slurm:"),
        ("dgx: {ssh: dgx, lock: owner}\n", "a path on the host"),
        ('dgx: {ssh: dgx, env: {CFLAGS: "-O2; id", X: "-O2; id"}}\n', "dgx.env: CFLAGS holds ';'"),
    ],
)
def test_what_is_refused_names_the_file_to_edit(tmp_path: Path, text: str, sentence: str) -> None:
    path = write(tmp_path / "my hosts.yaml", text)
    with pytest.raises(SpecError) as caught:
        load_hosts([path])
    assert sentence in caught.value.message
    assert str(path) in caught.value.message
    assert caught.value.next == f"${{EDITOR:-vi}} '{path}'"


def test_an_unknown_host_gets_the_nearest_name(tmp_path: Path) -> None:
    path = write(tmp_path / "hosts.yaml", "spark: {ssh: spark}\n")
    with pytest.raises(SpecError, match=r"host sprak is not known.*; did you mean spark\?") as near:
        find_host("sprak", [path])
    with pytest.raises(SpecError, match=r"host box is not known.*; known: local, spark") as new:
        find_host("box", [path])
    assert (near.value.next, new.value.next) == ("dgxlab host list", "dgxlab host add box")


@pytest.mark.parametrize("text", ["", "\n\n", "# my hosts\n", "  # dgx: {ssh: dgx}"])
def test_a_file_without_entries_names_no_hosts(tmp_path: Path, text: str) -> None:
    assert list(load_hosts([write(tmp_path / "hosts.yaml", text)])) == ["local"]


@pytest.mark.parametrize(
    "text", ["", "# mine", "a: {ssh: x}", "a: {ssh: x}\n", "a:\n  ssh: x\n  root: /r", "a: {ssh: x}\r\n# end"]
)
def test_an_entry_is_added_below_the_bytes_of_a_file(tmp_path: Path, text: str) -> None:
    path, link = tmp_path / "hosts.yaml", tmp_path / "link"
    path.write_bytes(text.encode())
    path.chmod(0o640)
    link.symlink_to(path)
    before = load_hosts([path])
    add_host(link, "on", 'me@"box"\\x')  # a word that YAML 1.1 takes for true, and what it would quote
    assert load_hosts([path]) == {**before, "on": HostEntry("on", 'me@"box"\\x')}
    assert path.read_bytes().startswith(text.encode())
    assert (path.stat().st_mode & 0o777, list(tmp_path.glob("*hosts*"))) == (0o640, [path])
    assert link.is_symlink()


def test_a_file_is_made_with_its_folders(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b" / "hosts.yaml"
    add_host(path, "dgx", "dgx")
    assert list(load_hosts([path])) == ["dgx", "local"]


@pytest.mark.parametrize(
    "text", ["{a: {ssh: x}}\n", "  a: {ssh: x}\n", "a: {ssh: x}\n...\n", "dgx: {ssh: x}\n", "a: [\n"]
)
def test_a_file_that_cannot_take_a_line_is_not_changed(tmp_path: Path, text: str) -> None:
    path = write(tmp_path / "hosts.yaml", text)
    with pytest.raises(SpecError) as caught:
        add_host(path, "dgx", "me@dgx")
    assert caught.value.message.endswith('add by hand "dgx": {ssh: "me@dgx"}')
    assert caught.value.next == f"${{EDITOR:-vi}} {path}"
    assert (path.read_text(), list(tmp_path.glob("*hosts*"))) == (text, [path])


def test_a_cluster_and_its_nodes(tmp_path: Path) -> None:
    slurm = "partition: gpu, gres: 'gpu:1', time: '2:00:00', exclusive: true, extra: --qos=low"
    path = write(tmp_path / "hosts.yaml", f"cluster: {{ssh: login, slurm: {{{slurm}}}}}\ndgx: {{ssh: dgx}}\n")
    entry = look_up("cluster", [path]).slurm
    assert entry
    assert entry.options() == ["--partition=gpu", "--gres=gpu:1", "--time=2:00:00", "--exclusive", "--qos=low"]
    assert entry.limit_s == 7200
    node = look_up("cluster/node1", [path])
    assert (node.name, node.ssh) == ("cluster/node1", "login")
    assert "--nodelist=node1" in (node.slurm.options() if node.slurm else [])
    with pytest.raises(SpecError, match="dgx/node1 is not known"):
        look_up("dgx/node1", [path])
    own = tmp_path / "own" / "hosts.yaml"
    with pytest.raises(HostError, match="sets its slurm"):
        find_host("cluster", [own, path])
    consent(look_up("cluster", [own, path]), own)
    assert find_host("cluster/node2", [own, path]).slurm
    write(path, "cluster: {ssh: login, slurm: {build: {extra: --prolog=x}}}\n")
    with pytest.raises(HostError, match="sets its slurm"):
        find_host("cluster", [own, path])


@pytest.mark.parametrize(
    ("limit", "seconds"),
    [("90", 5400), ("2:30", 150), ("1-12", 129600), ("1-12:30", 131400), ("1-0:0:5", 86405), ("0", math.inf)],
)
def test_a_time_limit_in_slurms_forms(limit: str, seconds: float) -> None:
    assert limit_s(limit) == seconds


@pytest.mark.parametrize(
    ("slurm", "sentence"),
    [
        ("build: logn", "slurm.build: must be login, or a map of what a job that builds asks for, not 'logn'"),
        ("build: {gress: 'gpu:1'}", "slurm.build.gress: unknown key; did you mean gres?"),
        ("time: soon", "must be a time as Slurm writes it"),
        ("extra: --job-name=x", "--job-name=x is an option that dgxlab sets itself"),
        ("extra: -Jx", "-Jx is an option that dgxlab sets itself"),
        ("extra: --job=x", "--job=x is an option that dgxlab sets itself"),
        ("extra: -QMother", "-QMother is an option that dgxlab sets itself"),
        ("extra: --time=90", "--time=90 is the key time"),
        ("extra: [--mem=10, -t90]", "-t90 is the key time"),
        ("build: {extra: --acc=x}", "--acc=x is the key account"),
        ("extra: --test-only", "--test-only is an option that dgxlab sets itself"),
        ("extra: qos", "an option of sbatch"),
        ("queue: gpu", "queue"),
    ],
)
def test_what_is_refused_of_slurm(slurm: str, sentence: str, tmp_path: Path) -> None:
    path = write(tmp_path / "hosts.yaml", f"cluster: {{ssh: login, slurm: {{{slurm}}}}}\n")
    with pytest.raises(SpecError) as refused:
        load_hosts([path])
    assert sentence in f"{refused.value} {refused.value.details}"
