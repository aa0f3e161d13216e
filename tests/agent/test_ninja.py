"""Build logs of cmake 3.25, ninja, gcc 12, GNU ld and nvcc 13.0, as they were printed."""

# ruff: noqa: RUF001 -- gcc quotes like this

import pytest

from dgxlab.agent.build import first_error, progress
from tests.tools.captures import capture


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("[1/4] Building CXX object main.cpp.o", (1, 4, "Building CXX object main.cpp.o")),
        (
            "\x1b[32m[204/204] Linking CXX executable bin/llama-bench\x1b[0m\r\n",
            (204, 204, "Linking CXX executable bin/llama-bench"),
        ),
        ("[0/2] Re-checking globbed directories...", (0, 2, "Re-checking globbed directories...")),
        ("-- Configuring done", None),
        ("ninja: no work to do.", None),
        ("FAILED: main.cpp.o", None),
        ("[4/1] nonsense", None),
        ("[1/4]", None),
        ("x [1/4] y", None),
        ("[ 50%] Building C object (make)", None),
        ("", None),
    ],
)
def test_progress(line: str, expected: tuple[int, int, str] | None) -> None:
    """Only ninja's own counter lines are progress, coloured or not."""
    assert progress(line) == expected


def test_a_whole_build_counts_to_its_end() -> None:
    """The last counter of a build that worked is n of n, and there is no error in its log."""
    log = capture("cpu/build/ok.log")
    counted = [count for count in map(progress, log.split("\n")) if count]
    assert [(n, m) for n, m, _ in counted] == [(1, 4), (2, 4), (3, 4), (4, 4)]
    assert first_error(log) == ""


@pytest.mark.parametrize(
    ("name", "lines"),
    [
        (
            "compile",
            [
                "/src/demo/bad.cpp:3:40: error: ‘class std::vector<int>’ has no member named ‘no_such_member’",
                "    3 | int g() { std::vector<int> v; return v.no_such_member(); }",
                "      |                                        ^~~~~~~~~~~~~~",
            ],
        ),
        (
            "header",
            [
                "/src/demo/header.cpp:1:10: fatal error: no_such_header.h: No such file or directory",
                '    1 | #include "no_such_header.h"',
                "      |          ^~~~~~~~~~~~~~~~~~",
            ],
        ),
        (
            "link",
            [
                "/usr/bin/ld: CMakeFiles/app.dir/main.cpp.o: in function `main':",
                "main.cpp:(.text+0x16): undefined reference to `missing(int)'",
            ],
        ),
        (
            "cuda",
            [
                '/src/demo/kernel.cu(1): error: identifier "undeclared" is undefined',
                "  __attribute__((global)) void w4a16(float * out, int unused) { int never; out[threadIdx.x] = "
                "undeclared * 2.0f; }",
                " " * 94 + "^",
            ],
        ),
        (
            "ptxas",
            ["ptxas /tmp/tmpxft_00006387_00000000-6_ptx.ptx, line 27; error   : Unknown modifier '.such'"],
        ),
        (
            "arch",
            [
                "CMake Error at /usr/share/cmake-3.25/Modules/CMakeTestCUDACompiler.cmake:103 (message):",
                "nvcc fatal   : Unsupported gpu architecture 'compute_35'",
            ],
        ),
        (
            "missing",
            [
                "CMake Error at CMakeLists.txt:10 (find_package):",
                '  By not providing "FindNoSuchPackage.cmake" in CMAKE_MODULE_PATH this',
                "  project has asked CMake to find a package configuration file provided by",
                '  "NoSuchPackage", but CMake did not find one.',
                '  Could not find a package configuration file provided by "NoSuchPackage"',
                "  with any of the following names:",
            ],
        ),
        (
            "colour",
            [
                "bad.cpp:3:40: error: ‘class std::vector<int>’ has no member named ‘no_such_member’",
                "    3 | int g() { std::vector<int> v; return v.no_such_member(); }",
                "      |                                        ^~~~~~~~~~~~~~",
            ],
        ),
    ],
)
def test_first_error_of_a_real_log(name: str, lines: list[str]) -> None:
    """The first error with the lines that explain it, and not a warning before it whose source says `error:`."""
    assert first_error(capture(f"cpu/build/{name}.log")).split("\n") == lines


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
    """One-line errors come back whole, from between the lines of a build."""
    before = "[1/3] Checking that: error: is no error\nw.cpp:1:1: warning: unused 'x: error: y'\nnote: error: never"
    log = f"{before}\n{line}\n[2/3] Building y\n"
    assert first_error(log) == line


def test_a_step_that_failed_without_an_error_is_told() -> None:
    """A missing tool prints no diagnostic that anyone would know: the step and what it said is the error."""
    log = "[1/2] Building CUDA object k.cu.o\nFAILED: k.cu.o \nnvcc -c k.cu\n/bin/sh: 1: nvcc: not found\n[2/2] x\n"
    assert first_error(log) == "FAILED: k.cu.o\nnvcc -c k.cu\n/bin/sh: 1: nvcc: not found"


def test_very_long_lines_are_cut() -> None:
    """A template's name of thousands of characters is shown as 300."""
    error = first_error("x.cpp:1:1: error: " + "T<" * 5000)
    assert len(error) == 300
    assert error.endswith("...")
