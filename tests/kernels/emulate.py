"""Kernels on the CPU: their own source, with launches and tensor core instructions turned into calls of emulator/."""

import re
import shutil
import subprocess
from pathlib import Path

from tests.conftest import PROJECT

EMULATOR = Path(__file__).with_name("emulator")
KERNELS = PROJECT / "kernels"

LAUNCH = re.compile(r"(\w+(?:<[\w:, ]+>)?)<<<(.+?)>>>\(\s*(.*?)\);", re.DOTALL)
"""A launch: the kernel, how it is launched, its arguments."""

INSTRUCTIONS = {
    r'asm\("mma\.sync\.aligned\.m16n8k16\.row\.col\.f32\.bf16\.bf16\.f32 ".*?\);\n': "emulated_mma(c, a, b);\n",
    r'asm(?: volatile)?\("ld\.global\.nc\.L1::no_allocate\.v4\.u32 .*?\);\n': "v = emulated_load(x);\n",
    r'asm volatile\("ld\.global\.nc\.L1::no_allocate\.(?:v2\.u32|u16) .*?\);\n': "v = *x;\n",
    r'asm\("mma\.sync\.aligned\.m16n8k16\.row\.col\.f32\.f16\.f16\.f32 ".*?\);\n': "emulated_mma_f16(c, a, b0, b1);\n",
    r'asm\("mma\.sync\.aligned\.kind::mxf4nvf4\..*?\);\n': "emulated_mma_fp4(c, a, b, scale_a, scale_b, 16);\n",
    r'asm\("mma\.sync\.aligned\.kind::mxf4\..*?\);\n': "emulated_mma_fp4(c, a, b, scale_a, scale_b, 32);\n",
    r'asm\("lop3\.b32 %0, %1, %2, %3, 0xEA;".*?\);\n': "bits = (q & mask) | 0x64006400;\n",
    r'asm volatile\("ldmatrix\.sync\.aligned\.m8n8\.x4\.shared\.b16 .*?"memory"\);\n': "emulated_ldmatrix(r, row);\n",
    r'asm volatile\("cp\.async\.cg\.shared\.global(?:\.L2::256B)? .*?"memory"\);\n': "emulated_copy(to, from);\n",
    r'asm volatile\("cp\.async\.commit_group;".*?"memory"\);\n': "emulated_commit();\n",
    r'asm volatile\("cp\.async\.wait_group %0;".*?"memory"\);\n': "emulated_wait_group(groups);\n",
    r'asm volatile\("mbarrier\.init.*?"memory"\);\n': "emulated_barrier_init(barrier, count);\n",
    r'asm volatile\("fence\.proxy\.async.*?"memory"\);': "",
    r'asm volatile\("mbarrier\.arrive\.shared.*?"memory"\);\n': "emulated_arrive(barrier, 0);\n",
    r'asm volatile\("mbarrier\.arrive\.expect_tx.*?"memory"\);\n': "emulated_arrive(barrier, bytes);\n",
    r'asm volatile\("\{ \.reg \.pred p; mbarrier\..*?"memory"\);\n': "ended = emulated_has_ended(barrier, parity);\n",
    r'asm volatile\("cp\.async\.mbarrier.*?"memory"\);\n': "emulated_arrive_after_copies(barrier);\n",
    r'asm volatile\("cp\.async\.bulk\.shared.*?"memory"\);\n': "emulated_bulk_copy(to, from, bytes, barrier);\n",
    r'asm volatile\("bar\.sync 1, %0;".*?"memory"\);': "emulated_meet(threads);",
    r'asm volatile\("atom\.acq_rel.*?"memory"\);': "before = atomicAdd(counter, more);",
    r'asm volatile\("(?:griddepcontrol|setmaxnreg|wgmma\.fence).*?\);': "",
    r'asm volatile\("wgmma\.commit_group.*?"memory"\);': "emulated_commit_products();",
    r'asm volatile\("wgmma\.wait_group.*?"memory"\);': "emulated_wait_products(groups);",
    r'asm volatile\("\{ \.reg \.pred p; setp\.ne\.b32 p, 1, 0; wgmma\..*?"l"\(b\)\);\n': "emulated_wgmma(c, a, b);\n",
    r"extern __shared__ __align__\((?:16|128)\) uint8_t (\w+)\[\];": r"uint8_t * const \1 = emulated_shared();",
}
"""Instructions, in functions whose parameters are named as in the calls, and what replaces them."""


def translate(source: str) -> str:
    for instruction, call in INSTRUCTIONS.items():
        source = re.sub(instruction, call, source, flags=re.DOTALL)
    return LAUNCH.sub(r"emulate([&] { \1(\3); }, \2);", source)


SPAN = re.compile("«(.*?)→(.*?)»", re.DOTALL)
"""In a defect, a text that occurs once in its file: what is replaced, and what by.

Both are expressions, or statements if one of them ends with a semicolon.
"""


def plant(path: Path, defects: dict[int, str]) -> None:
    """Put defects into a file of CUDA; EMULATOR_DEFECT says by its number which of them a run has."""
    source = path.read_text()
    edits = []
    for number, defect in defects.items():
        right = SPAN.sub(r"\1", defect)
        assert source.count(right) == 1, defect
        at = source.index(right)
        for plain in re.split("(«.*?»)", defect, flags=re.DOTALL):
            span = SPAN.fullmatch(plain)
            length = len(span[1] if span else plain)
            if span:
                edits.append((at, at + length, chosen(number, span[2], span[1])))
            at += length
    for at, end, text in sorted(edits, reverse=True):
        source = source[:at] + text + source[end:]
    path.write_text(source)


def chosen(number: int, wrong: str, right: str) -> str:
    """Return code that takes one of two, expressions or statements."""
    if ";" in wrong + right:
        return f"if (emulated_defect({number})) {{ {wrong} }} else {{ {right} }}\n"
    return f"(emulated_defect({number}) ? ({wrong}) : ({right}))"


def copy_kernels(folder: Path) -> Path:
    """Copy the folder kernels/ without what was built there."""
    return Path(shutil.copytree(KERNELS, folder / "kernels", ignore=shutil.ignore_patterns("build")))


def compile_emulated(kernels: Path, program: Path, out: Path, *flags: str) -> Path:
    """Translate a folder of kernels and compile a program of emulator/ against it; warnings are errors."""
    translated = shutil.copytree(kernels, out.with_name(out.name + "-source"), ignore=shutil.ignore_patterns("build"))
    for path in (*translated.rglob("*.cuh"), *translated.rglob("*.cu")):
        path.write_text(translate(path.read_text()))
    warnings = ["-Wall", "-Wextra", "-Werror", "-Wno-unused-function", "-Wno-unknown-pragmas"]
    # _longjmp from one thread to another is what a fortified libc would abort
    options = ["-std=c++17", "-O2", "-U_FORTIFY_SOURCE", "-D__CUDACC__", *warnings, *flags]
    # a series lays the kernels of its overlays into one folder
    include = [f"-I{folder}" for folder in (EMULATOR, translated, translated / "w4a16_gemm")]
    argv = ["g++", *options, *include, str(program), "-o", str(out)]
    subprocess.run(argv, check=True)
    return out
