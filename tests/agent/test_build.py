"""Whether an installed build is unchanged, what a power loss leaves in a work folder, and errors in build logs.

The logs are those of cmake 3.25, ninja, gcc 12, GNU ld and nvcc 13.0.
"""

# ruff: noqa: RUF001 -- gcc quotes like this

import json
import os
import re
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from dgxlab.agent import build
from dgxlab.agent.build import _held, first_error, installed, own_libraries, progress
from dgxlab.agent.facts import boot_id
from dgxlab.agent.files import sha256
from dgxlab.agent.lease import DeviceLease, Holder
from dgxlab.agent.lock import Signature, lock
from dgxlab.errors import AGAIN, BuildFailed, HostBusy
from dgxlab.model import Plan
from tests.agent.test_child import wait_until
from tests.machines import script
from tests.tools.captures import capture

PROGRAM, LIBRARY = "llama-bench", "libggml.so.0"
MINE = Signature("J1", "alice")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "bin").mkdir()
    for name in (PROGRAM, LIBRARY):
        (tmp_path / "bin" / name).write_bytes(name.encode() * 100)
        (tmp_path / "bin" / name).chmod(0o755)
    stamp = {
        "build_id": "B1",
        **dict.fromkeys(("source", "cmake", "toolchain", "cmake_cache"), ""),
        "binaries": {PROGRAM: sha256(tmp_path / "bin" / PROGRAM)},
        "libraries": {LIBRARY: sha256(tmp_path / "bin" / LIBRARY)},
    }
    (tmp_path / "stamp.json").write_text(json.dumps(stamp))
    return tmp_path


def wrapped(folder: Path) -> None:
    """Put a script in a program's place that calls it."""
    shutil.move(folder / "bin" / PROGRAM, folder / "real")
    script(folder / "bin" / PROGRAM, f'#!/bin/sh\nexec {folder}/real "$@"\n')


def edited(folder: Path) -> None:
    path = folder / "bin" / LIBRARY
    before = path.stat()
    with path.open("r+b") as file:
        file.write(b"L")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def linked(folder: Path) -> None:
    """Put a link to the same bytes in a program's place: it loads the libraries beside them."""
    shutil.move(folder / "bin" / PROGRAM, folder / "real")
    (folder / "bin" / PROGRAM).symlink_to(folder / "real")


CHANGES: list[Callable[[Path], object]] = [
    wrapped,
    edited,
    linked,
    lambda folder: (folder / "stamp.json").write_text("[]"),
    lambda folder: (folder / "stamp.json").write_text("{"),
    lambda folder: (folder / "stamp.json").write_text('{"build_id": "B1", "binaries": {}, "libraries": {}}'),
    lambda folder: (folder / "bin" / PROGRAM).chmod(0o644),
    lambda folder: (folder / "bin" / LIBRARY).unlink(),
    lambda folder: (folder / "bin" / "libggml-other.so").write_bytes(b"x"),
    lambda folder: shutil.rmtree(folder / "bin"),
]


@pytest.mark.parametrize("change", CHANGES)
def test_a_build_that_was_changed_is_not_reused(folder: Path, change: Callable[[Path], object]) -> None:
    stamp = installed(folder, "B1")
    assert stamp
    assert stamp["binaries"].keys() == {PROGRAM}
    assert installed(folder, "B2") is None
    change(folder)
    assert installed(folder, "B1") is None


def test_a_library_that_the_loader_does_not_find(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    libraries = "echo ' libc.so.6 => /lib/libc.so.6 (0x1f)'\necho \" libggml.so.0 => $(cat $1)\"\n"
    script(tmp_path / "ldd", f"#!/bin/sh\n{libraries}")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    program = tmp_path / PROGRAM
    program.write_text(f"{tmp_path}/libggml.so.0 (0x7f00)")
    assert own_libraries([program]) == [(program, "libggml.so.0", tmp_path / "libggml.so.0")]
    program.write_text("not found")
    with pytest.raises(BuildFailed, match=r"llama-bench needs libggml\.so\.0"):
        own_libraries([program])


def waits(tell: Callable[[str], object], wait_s: float = 60.0) -> Callable[[Callable[[], Holder | None], str], float]:
    """Return how a job waits for at most `wait_s`; `tell` is called with each job that it waits for."""
    plan = Plan("J1", "n", "e", (), (), wait_s=wait_s)
    return DeviceLease(plan, [], (), lambda event: tell(event.owner)).wait


@pytest.mark.parametrize(("mark", "kept"), [(None, True), ("this boot", True), ("another boot", False), ("", False)])
def test_only_a_build_that_another_boot_cut_short_is_made_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mark: str | None, kept: bool
) -> None:
    monkeypatch.setattr(build, "boot_id", lambda: "this boot")
    parts = (tmp_path / "cmake" / "x.o", tmp_path / "src" / "x.c", tmp_path / "index")
    for part in parts:
        part.parent.mkdir(exist_ok=True)
        part.write_text("x")
    if mark is not None:
        (tmp_path / "building").write_text(mark)
    with _held(tmp_path, MINE, waits(pytest.fail)):
        assert {part.exists() for part in parts} == {kept}
        assert (tmp_path / "building").read_text() == "this boot"
    assert not (tmp_path / "building").exists()


def test_each_job_that_has_the_folder_is_told_to_the_one_that_waits(tmp_path: Path) -> None:
    told: list[str] = []

    def wait() -> None:
        with _held(tmp_path, MINE, waits(told.append)):
            told.append("its own")

    waiting = threading.Thread(target=wait)
    with (tmp_path / "lock").open("ab") as file:
        assert lock(file.fileno())
        for number, job in enumerate(("J2", "J3"), 1):
            Signature(job, "bob").write(file.fileno())
            if number == 1:
                waiting.start()
            wait_until(lambda number=number: len(told) == number)
    waiting.join(10)
    assert [words.split(" of ")[0] for words in told] == ["job J2", "job J3", "its own"]


@pytest.mark.parametrize(("wait_s", "stayed"), [(0.0, "is busy"), (0.2, "stayed busy for 200 ms")])
def test_another_jobs_build_is_waited_for_no_longer_than_a_device(tmp_path: Path, wait_s: float, stayed: str) -> None:
    told: list[str] = []
    with (tmp_path / "lock").open("ab") as file:
        assert lock(file.fileno())
        Signature("J2", "bob").write(file.fileno())
        with pytest.raises(HostBusy) as refused, _held(tmp_path, MINE, waits(told.append, wait_s)):
            pass
    assert refused.value.message.startswith(f"the build folder {stayed}: {tmp_path} is held by job J2 of bob, since ")
    assert refused.value.next == f"{AGAIN} with --wait 60"
    assert len(told) == (wait_s > 0)


@pytest.mark.parametrize("end", [KeyboardInterrupt(), BuildFailed("it failed", next="mend it")])
def test_a_build_that_fails_or_is_cancelled_is_not_flushed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: BaseException
) -> None:
    monkeypatch.setattr(build, "flush", lambda folder: pytest.fail("a cancelled job has seconds to end"))
    with pytest.raises(type(end)), _held(tmp_path, MINE, waits(pytest.fail)):
        raise end
    assert (tmp_path / "building").read_text() == boot_id()


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("[1/4] Building CXX object main.cpp.o", (1, 4, "Building CXX object main.cpp.o")),
        ("\x1b[32m[204/204] Linking bin/llama-bench\x1b[0m\r\n", (204, 204, "Linking bin/llama-bench")),
        ("[0/2] Re-checking globbed directories...", (0, 2, "Re-checking globbed directories...")),
        *((line, None) for line in ("-- Configuring done", "ninja: no work to do.", "FAILED: main.cpp.o", "")),
        *((line, None) for line in ("[4/1] nonsense", "[1/4]", "x [1/4] y", "[ 50%] Building C object (make)")),
    ],
)
def test_progress(line: str, expected: tuple[int, int, str] | None) -> None:
    assert progress(line) == expected


def test_a_whole_build_counts_to_its_end() -> None:
    log = capture("cpu/build/ok.log")
    counted = [count for count in map(progress, log.split("\n")) if count]
    assert [(n, m) for n, m, _ in counted] == [(1, 4), (2, 4), (3, 4), (4, 4)]
    assert first_error(log) == ""


FIRST_ERRORS = """
== compile
/src/demo/bad.cpp:3:40: error: ‘class std::vector<int>’ has no member named ‘no_such_member’
    3 | int g() { std::vector<int> v; return v.no_such_member(); }
      |                                        ^~~~~~~~~~~~~~
== header
/src/demo/header.cpp:1:10: fatal error: no_such_header.h: No such file or directory
    1 | #include "no_such_header.h"
      |          ^~~~~~~~~~~~~~~~~~
== link
/usr/bin/ld: CMakeFiles/app.dir/main.cpp.o: in function `main':
main.cpp:(.text+0x16): undefined reference to `missing(int)'
== cuda
/src/demo/kernel.cu(1): error: identifier "undeclared" is undefined
  __attribute__((global)) void w4a16(float * out, int unused) { int never; out[threadIdx.x] = undeclared * 2.0f; }
                                                                                              ^
== ptxas
ptxas /tmp/tmpxft_00006387_00000000-6_ptx.ptx, line 27; error   : Unknown modifier '.such'
== arch
CMake Error at /usr/share/cmake-3.25/Modules/CMakeTestCUDACompiler.cmake:103 (message):
nvcc fatal   : Unsupported gpu architecture 'compute_35'
== missing
CMake Error at CMakeLists.txt:10 (find_package):
  By not providing "FindNoSuchPackage.cmake" in CMAKE_MODULE_PATH this
  project has asked CMake to find a package configuration file provided by
  "NoSuchPackage", but CMake did not find one.
  Could not find a package configuration file provided by "NoSuchPackage"
  with any of the following names:
== colour
bad.cpp:3:40: error: ‘class std::vector<int>’ has no member named ‘no_such_member’
    3 | int g() { std::vector<int> v; return v.no_such_member(); }
      |                                        ^~~~~~~~~~~~~~
"""


@pytest.mark.parametrize(("name", "error"), re.findall(r"^== (\w+)\n((?:(?!==).*\n)+)", FIRST_ERRORS, re.MULTILINE))
def test_first_error_of_a_real_log(name: str, error: str) -> None:
    assert first_error(capture(f"cpu/build/{name}.log")) + "\n" == error


@pytest.mark.parametrize(
    "line",
    [
        "ninja: error: unknown target 'no_such_target'",
        "ninja: error: build.ninja:1: expected '=', got newline",
        "nvlink error   : Undefined reference to '_Z1ff' in '/tmp/tmpxft_1.o'",
        "nvcc fatal   : Unknown option '--bad-flag'",
        "/usr/bin/ld: cannot find -lnosuchlib: No such file or directory",
        "g2.cpp:(.text+0x0): multiple definition of `good()'; /tmp/x.o:good.cpp:(.text+0x0): first defined here",
        "g++: error: unrecognized command-line option ‘-fnope’",
        "c++: fatal error: Killed signal terminated program cc1plus",
        'x.cu(12): error #20-D: identifier "x" is undefined',
        "x.cpp:1:2: internal compiler error: Segmentation fault",
        "a.cpp:3:1: error: unused variable ‘x’ [-Werror=unused-variable]",
        "CMake Error: Could not create named generator Nonsense",
    ],
)
def test_each_kind_of_error_is_known(line: str) -> None:
    before = "[1/3] Checking that: error: is no error\nw.cpp:1:1: warning: unused 'x: error: y'\nnote: error: never"
    assert first_error(f"{before}\n{line}\n[2/3] Building y\n") == line


def test_a_failed_step_without_a_known_error_and_very_long_lines() -> None:
    error = first_error("x.cpp:1:1: error: " + "T<" * 5000)
    assert (len(error), error[-3:]) == (300, "...")
    log = "[1/2] Building CUDA object k.cu.o\nFAILED: k.cu.o \nnvcc -c k.cu\n/bin/sh: 1: nvcc: not found\n[2/2] x\n"
    assert first_error(log) == "FAILED: k.cu.o\nnvcc -c k.cu\n/bin/sh: 1: nvcc: not found"
