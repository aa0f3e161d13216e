"""Hostile and malformed YAML: specs, the files that they extend, hosts.yaml, --set."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from dgxlab.errors import SpecError
from dgxlab.model import Experiment
from dgxlab.spec import json_schema, load
from dgxlab.spec.hosts import load_hosts
from faults.fault import Broken, Fault
from tests.spec.specs import BASE

SECONDS = 1.0
"""Most processor time that a document may take."""
KIB = 200 << 10
"""Most memory, in KiB."""
LARGEST = "largest KiB: "
MEASURED = f"""import re, sys
from dgxlab.cli import main
try:
    main()
finally:
    with open("/proc/self/status") as status:
        print({LARGEST!r} + re.search(r"VmHWM:\\s+(\\d+)", status.read())[1], end="", file=sys.stderr)
"""
"""The program, which prints its largest memory last: a child's rusage includes the process that forked it."""
BY_COMMAND = 100
"""One of this many documents is also read by the program itself."""

TOKENS = (
    *(
        "&a ",
        "*a",
        "!!str ",
        "!!python/object/apply:os.system ",
        "<<: ",
        "? ",
        ": ",
        "- ",
        "[",
        "]",
        "{",
        "}",
        ",",
        "#",
    ),
    *(
        ">-\n",
        "---\n",
        "...\n",
        "%YAML 1.1\n",
        "%TAG ! x\n",
        "\t",
        "\r",
        "\0",
        "\x85",
        "\ufeff",
        "\u2028",
        '"',
        "'",
        "\n  ",
    ),
    *("on", "0123", "1_0", "12:34", ".inf", ".nan", "1e999", "9" * 21, "9" * 5000, "=", "null", "~", "y", "2026-01-01"),
    *("\u00e9", "\U0001f600", '"\\ud800"', '"\\U00110000"', "x" * 99, "gates", "bench", "extends: ", "../", "|", "\n"),
)

VALUES: Sequence[Any] = (
    *(None, True, False, 0, 1, -1, 2**63, -(2**70), 0.5, 1e308, "", " ", "MUL_MAT", "CPU", "1103/1103", "0/0", "q4k"),
    *(
        "small",
        "hot",
        "auto",
        "a" * 40,
        "/x",
        "~/x",
        "-m",
        "--help",
        "base.yaml",
        "spec.yaml",
        "fifo.yaml",
        "folder.yaml",
    ),
    *(
        "\u202e",
        "x" * 5000,
        "\n",
        "../base.yaml",
        "/dev/zero",
        "/proc/self/mem",
        "loop.yaml",
        "large.yaml",
        "parent.yaml",
    ),
)


@dataclass(frozen=True)
class Shelf:
    """The current folder, with specs: base.yaml is valid, the others may not be extended."""

    folder: Path
    keys: Sequence[str]


@contextmanager
def shelf() -> Iterator[Shelf]:
    """Yield a folder of specs, and make it the current one."""
    before = Path.cwd()
    schema = json_schema()
    keys = sorted({key for part in (schema, *schema["$defs"].values()) for key in part["properties"]})
    with tempfile.TemporaryDirectory(prefix="dgxlab-faults-") as name:
        folder = Path(name).resolve()
        (folder / "patches").mkdir()
        (folder / "base.yaml").write_text(BASE)
        os.mkfifo(folder / "fifo.yaml")
        (folder / "folder.yaml").mkdir()
        (folder / "loop.yaml").symlink_to("loop.yaml")
        (folder / "large.yaml").write_bytes(b"x: " + b"y" * 2_000_000)
        (folder / "parent.yaml").write_text("extends: spec.yaml\n")
        os.chdir(folder)
        try:
            yield Shelf(folder, keys)
        finally:
            os.chdir(before)


def trial(place: Shelf, random: Random) -> str:
    """Read one document: it must be read, or refused with its line named, in little time and memory."""
    way = random.choices((_as_spec, _as_hosts, _as_setting), (8, 1, 1))[0]
    return way(place, random)


def _as_spec(place: Shelf, random: Random) -> str:
    content = document(place, random)
    Path("spec.yaml").write_bytes(content)
    return _read(lambda: load(Path("spec.yaml")), "spec.yaml", content, random)


def _as_hosts(place: Shelf, random: Random) -> str:
    known = 'spark: {ssh: me@spark, root: ~/lab, env: {CUDA_VISIBLE_DEVICES: "1"}}\nthis: {local: true}\n'
    content = _spoiled(known, random) if random.random() < 0.5 else document(place, random)
    Path("hosts.yaml").write_bytes(content)
    try:
        return _read(lambda: load_hosts([Path("hosts.yaml")]), "hosts.yaml", content, random)
    finally:
        Path("hosts.yaml").unlink()


def _as_setting(place: Shelf, random: Random) -> str:
    path = ".".join(random.choice((*place.keys, "0", "1", "-1", "999999999", "")) for _ in range(random.randint(1, 6)))
    value = random.choice((json.dumps(_tree(place, random, 3)), random.choice(TOKENS), _hostile(random)[:60_000]))
    setting = f"{path}={value}" if random.random() < 0.95 else path
    return _read(lambda: load(Path("base.yaml"), [setting]), "--set", setting.encode("utf-8", "replace"), random)


def _read(read: Callable[[], object], name: str, content: bytes, random: Random) -> str:
    """Read in this process and, now and then, by the program, and compare."""
    begin, before = time.process_time(), _memory_begins()
    try:
        parsed, refusal = read(), None
    except SpecError as error:
        parsed, refusal = None, error
    seconds, kib = time.process_time() - begin, _memory_taken(before)
    if seconds > SECONDS:  # read it again, as on a busy machine a processor's time is longer too
        begin = time.process_time()
        with suppress(SpecError):
            read()
        seconds = min(seconds, time.process_time() - begin)
    if seconds > SECONDS or kib > KIB:
        raise Broken(f"{len(content)} bytes of {name} took {seconds:.2f} s and {kib >> 10} MiB: {content[:200]!r}")
    if refusal is None:
        if name == "spec.yaml" and not isinstance(parsed, Experiment):
            raise Broken(f"{content[:200]!r} gave {parsed!r}")
        return "read"
    _check_sentence(refusal, name, content)
    if name == "spec.yaml" and random.randrange(BY_COMMAND) == 0:
        _by_command(refusal, content)
    return "refused"


NO_LINE = re.compile(r"(is empty|is larger than 1 MB|is not a regular file|cannot be read: .*|holds more than .*)$")
"""Errors that are about a whole file, not a line."""


def _check_sentence(refusal: SpecError, name: str, content: bytes) -> None:
    line = re.match(r"(\S+\.yaml|--set)(?::([0-9]+))?: ", refusal.message)
    if refusal.exit_code != 9 or not refusal.message.isprintable() or not line:
        raise Broken(f"{content[:200]!r} is refused with {refusal.exit_code}: {refusal.message!r}")
    if line[1] == "--set" or (line[1] == name and NO_LINE.search(refusal.message)):
        return
    if line[2] is None:
        raise Broken(f"{content[:200]!r} is refused without a line: {refusal.message!r}")
    there = content if line[1] == name else Path(line[1]).read_bytes()
    if not 1 <= int(line[2]) <= len(re.split(rb"\r\n|\r|\n", there)) + 1:
        raise Broken(f"{content[:200]!r} has no line {line[2]}: {refusal.message!r}")


def _by_command(refusal: SpecError, content: bytes) -> None:
    """See that the program says the same, and takes as little."""
    with tempfile.TemporaryFile() as errors:
        child = subprocess.Popen(
            [sys.executable, "-c", MEASURED, "plan", "spec.yaml"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=errors,
        )
        _, status, usage = os.wait4(child.pid, 0)
        child.returncode = os.waitstatus_to_exitcode(status)
        errors.seek(0)
        printed, _, largest = errors.read().decode(errors="replace").rpartition(LARGEST)
    seconds, kib = usage.ru_utime + usage.ru_stime, int(largest or KIB + 1)
    if child.returncode != 9 or "Traceback" in printed or f"error: {refusal.message}" not in printed.replace("\n", ""):
        raise Broken(f"plan ended with {child.returncode} for {content[:200]!r}: {printed[-2000:]}")
    if seconds > 2 * SECONDS or kib > KIB:
        raise Broken(f"plan took {seconds:.2f} s and {kib >> 10} MiB for {content[:200]!r}")


def _memory_begins() -> int:
    """Let the kernel note this process's largest size anew; return its size in KiB."""
    Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def _memory_taken(before: int) -> int:
    return _status("VmHWM") - before


def _status(name: str) -> int:
    return int(re.findall(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())[0])


# -- documents -------------------------------------------------------------------------------------------------------


def document(place: Shelf, random: Random) -> bytes:
    """Return a random document: a damaged valid one, valid keys with random values, known traps, or random bytes."""
    kind = random.choices(("spoiled", "tree", "hostile", "tokens", "bytes"), (8, 6, 2, 3, 1))[0]
    if kind == "spoiled":
        return _spoiled(random.choice((BASE, "extends: base.yaml\n" + BASE.partition("models:")[0])), random)
    if kind == "tree":
        tree = {random.choice(place.keys): _tree(place, random, 4) for _ in range(random.randint(0, 6))}
        inherit = {"extends": random.choice(("base.yaml", random.choice(VALUES)))} if random.random() < 0.5 else {}
        return json.dumps({**inherit, **tree}).encode()
    if kind == "hostile":
        return _hostile(random).encode("utf-8", "surrogatepass")
    if kind == "tokens":
        return "".join(random.choice(TOKENS) for _ in range(random.randint(0, 40))).encode("utf-8", "surrogatepass")
    return random.choice((b"", b"\xff\xfe", BASE.encode("utf-16"))) + random.randbytes(random.randint(0, 300))


def _spoiled(text: str, random: Random) -> bytes:
    for _ in range(random.randint(1, 3)):
        start = random.randrange(len(text) + 1)
        length = random.choice((0, 1, random.randrange(30)))
        text = text[:start] + random.choice((*TOKENS, "")) + text[start + length :]
        if random.random() < 0.3:
            lines = text.split("\n")
            lines.insert(random.randrange(len(lines) + 1), random.choice(("", " ", "   ")) + random.choice(lines))
            text = "\n".join(lines)
    return text.encode("utf-8", "surrogatepass")


def _tree(place: Shelf, random: Random, depth: int) -> Any:
    """Return a value: any scalar, or a list or map of some."""
    kind = random.random()
    if depth == 0 or kind < 0.45:
        return random.choice(VALUES)
    if kind < 0.6:
        return [_tree(place, random, depth - 1) for _ in range(random.randint(0, 4))]
    words = (*place.keys, "n", "type_a", "LD_PRELOAD", "A", "x" * 70)
    return {random.choice(words): _tree(place, random, depth - 1) for _ in range(random.randint(0, 5))}


def _hostile(random: Random) -> str:
    """Return what costs a careless reader time, memory, its stack, or more."""
    n = random.choice((10, 1_000, 50_000))
    anchors = "\n".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9) if i else 'x'}]" for i in range(9))
    wrong = "\n".join(f"  key{i}: {{n_layer: {i}, what{i}: 1}}" for i in range(min(n, 20_000)))
    traps = (
        *(anchors, "[" * n, "{a: " * n, "- " * n, "? " * n, "a: " + "[" * 31 + "]" * 31, "x: " + "y" * n * 19, "9" * n),
        *(
            '"' + "\\n" * n,
            "&a " * n,
            "!!python/object/apply:os.system ['touch canary']",
            "!!binary " + "A" * n,
            "# " * n,
        ),
        "\n".join(f"k{i}: {i}" for i in range(n)),
        "\n".join("name: x" for _ in range(n)),
        "env:\n" + "\n".join(f"  K{i}: {i}" for i in range(n)),
        f"{BASE}models:\n{wrong}",
        f"extends: base.yaml\nmodels:\n{wrong}",
        f"extends: base.yaml\nbench: [{', '.join(['{llama-bench: {model: small, n_prompt: 1}}'] * min(n, 9_000))}]",
        f"extends: base.yaml\nseries: [{', '.join(f's{i}' for i in range(n))}]",
        f"extends: base.yaml\ngates: [{', '.join(f'{{engaged: {{stderr: m{i}}}}}' for i in range(min(n, 9_000)))}]",
        f"extends: base.yaml\nbench: [{{backend-ops: {{op: A, backend: CPU, where: {{n: {list(range(n))}}}}}}}]",
        *(f"extends: {name}" for name in VALUES if isinstance(name, str) and name.isprintable()),
        "<<: {name: x}",
        "a: 1\n---\nb: 2",
        "\r".join(BASE.split("\n")),
        "\n" * n,
    )
    return random.choice(traps)[:1_000_100]


YAML = Fault(
    "yaml",
    "hostile or malformed YAML: specs, what they extend, hosts.yaml, --set",
    20_000,
    "exit 9 naming the line; no traceback; each under 1 s and 200 MB",
    shelf,
    trial,
    limit_s=30.0,
)
