"""Kernels on the CPU: their own source, with launches and tensor core instructions turned into calls of emulator/."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

EMULATOR = Path(__file__).with_name("emulator")

LAUNCH = re.compile(r"(\w+(?:<\w+>)?)<<<(.+?)>>>\((.*?)\);", re.DOTALL)
"""A launch: the kernel, how it is launched, its arguments."""

INSTRUCTIONS = {
    r'asm\("mma\.sync\.aligned\.m16n8k16\.row\.col\.f32\.bf16\.bf16\.f32 ".*?\);\n': "emulated_mma(c, a, b);\n",
    r'asm\("ld\.global\.nc\.L1::no_allocate\.v4\.u32 .*?\);\n': "v = emulated_load(x);\n",
}
"""Instructions, in functions whose parameters are named as in the calls, and what stands for them."""


def translate(source: str) -> str:
    """Return CUDA source as C++ for the emulator."""
    for instruction, call in INSTRUCTIONS.items():
        source = re.sub(instruction, call, source, flags=re.DOTALL)
    return LAUNCH.sub(r"emulate([&] { \1(\3); }, \2);", source)


def compile_emulated(kernels: Path, program: Path, out: Path, *flags: str) -> Path:
    """Translate a folder of kernels and compile a program of emulator/ against it; warnings are errors."""
    translated = out.with_name(out.name + "-source")
    shutil.copytree(kernels, translated, ignore=shutil.ignore_patterns("build"))
    for path in (*translated.rglob("*.cuh"), *translated.rglob("*.cu")):
        path.write_text(translate(path.read_text()))
    warnings = ["-Wall", "-Wextra", "-Werror", "-Wno-unused-function", "-Wno-unknown-pragmas"]
    folders = [f"-I{EMULATOR}", f"-I{translated}"]
    argv = ["g++", "-std=c++17", "-O2", "-D__CUDACC__", *warnings, *flags, *folders, str(program), "-o", str(out)]
    subprocess.run(argv, check=True)
    return out
