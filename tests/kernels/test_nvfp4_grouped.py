"""Products of tokens with their experts' NVFP4 weights: the kernels' own source on an emulated GPU, and its defects."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.kernels.conftest import both_orders, fails, run
from tests.kernels.emulate import EMULATOR, compile_emulated, copy_kernels, plant

NAME = "nvfp4_grouped"
WGMMA, WIDE, MMA = "0", "1", "2"
"""By number: a narrow configuration of wgmma, the widest, and one of mma.sync."""

GATHER = ("5", "6", "7")
"""The same three, but the product gathers activations."""

WAIT = "«w4a16_wait_for(stages_.{0}_full + {0}_.stage, {0}_.parity);→»"
FREE = "«w4a16_wait_for(stages.{0}_free + {0}.stage, {0}.parity ^ 1);→»"

PREPARE = "status = nvfp4_grouped_prepare_cuda<C>(a, stream);"

LATE = (
    "«if (!EARLY) {\n            read_columns();\n        }\n        release_activations();"
    "→const int done = x_done_; release_activations(); x_done_ = done; read_columns();»\n        write<width>();"
)

DEFECTS = {
    # the routing
    "columns of a warp's lanes over each other": "__popc(lanes & («(1u << lane) - 1→0u»))] = i;",
    "a warp's columns over the ones before": "at += «of_warps[w]→0»;",
    "a token's last slot twice": "if («slot >= used→slot > used») {",
    "ids out of range counted": "if («id >= 0 && id < experts→id < experts») {",
    "an expert's columns begin amid a group": "before += «(counts[e] + 7) / 8→counts[e] / 8»;",
    "columns beyond an expert's are anything": "p.of[i] = «-1→0x7FFFFFF»;",
    "a last chunk left out": "«i * tile_n < count→(i + 1) * tile_n <= count»; i += THREADS) {\n        p.",
    "a full last chunk twice": "+ «(counts[expert] + tile_n - 1) / tile_n→counts[expert] / tile_n + 1»;",
    "the groups of no expert converted": "? «p.groups→groups» : groups) * 8;",
    "chunks of whole tiles alone": "first + i * tile_n, «min(tile_n, count - i * tile_n)→tile_n», 0);",
    "chunks over those of the expert before": "chunks += «(counts[e] + tile_n - 1) / tile_n→counts[e] / tile_n»;",
    "ids without their stride": "id[i] = at < end ? ids[«token * ids_token + slot→at»] : -1;",
    "bounds of the launch before": "*p.chunks_used = «chunks→(*p.chunks_used > 0 ? *p.chunks_used : chunks)» +",
    # both at once, for few ids
    "few: columns of a warp's lanes over each other": "int      to    = col + __popc(lanes & («(1u << lane) - 1→0u»));",
    "few: a warp's columns over the ones before": "col += «of_warps[w]→0»;",
    "few: the first columns for every group": "int col = «-8 * group→0»;",
    "few: ids out of range counted": "if («id[i] >= 0 && id[i] < experts→id[i] < experts») {",
    "few: columns beyond an expert's are anything": "of_columns[tid] = «-1→0x7FFFFFF»;",
    "few: groups of the experts before left out": "groups += «lane < i ? 0 : g→0»;",
    "few: chunks of the experts before left out": "chunks += «lane < i ? 0 : c→0»;",
    "few: a lane's own experts before themselves": "groups -= «own_groups→0»;",
    "few: another expert's group": "group >= groups + «(counts[e] + 7) / 8→counts[e] / 8»; ++e) {",
    "few: the first columns for every chunk": "make_uint4(owner.expert, owner.groups * 8 + «i * tile_n→0», min(",
    "few: a last chunk left out": "«i * tile_n < count→(i + 1) * tile_n <= count»; i += THREADS) {\n            p.",
    "few: ids without their stride": "ids[«at(i) / p.used * ids_token + at(i) % p.used→at(i)»] : -1;",
    "few: bounds of the launch before": "*p.chunks_used = «all_chunks→max(all_chunks, *p.chunks_used)»;",
    # the conversion
    "steps beyond k written": "if («step < steps→step < steps + warps») {",
    "another slot's activations": "of % p.used % «p.slots→1» * a.slot",
    "another token's activations": "a.x + of / «p.used→(p.used + 1)» * a.token",
    "low weights for high ones": "+ 4 * word + «8 * high→0»;",
    "pairs of k exchanged": "make_uint4(w4a16_pair(v[0].x, «v[0].z→v[0].y», scale)",
    "a column not scaled": "if («w4a16_scale(taken_as) != 1.0f→w4a16_scale(taken_as) == 0.0f») {",
    "another column's power of two": "largest = fmaxf(largest, of_warps[w][«col→0»]);",
    "converted twice": f"«{PREPARE}→(void) {PREPARE[9:]} {PREPARE}»",
    # what is refused
    "k that is no multiple of 256": "a.k < W4A16_UNIT || «a.k % W4A16_UNIT != 0→false» ||",
    "experts over each other": "a.ids_token < a.used ||\n        «a.w_expert < a.m * row_bytes→false») {",
    "a launch of no tokens": "status != cudaSuccess || «a.tokens == 0→false») {",
    # the copies
    "weights of the expert before": "p.w + «tile.expert→max(tile.expert - 1, 0)» * p.w_expert + row",
    "the first eight rows for every eight": "at += i + ROWS <= last ? «eighth→0» : 0;",
    "rows beyond the matrix": "«min(tile.row0 + tid / 9, p.m - 1)→tile.row0 + tid / 9»;",
    "weights copied too early": FREE.format("w"),
    "activations copied too early": FREE.format("x"),
    "the first columns for every chunk": "(int64_t) («tile.first→0» / 8) * NVFP4_GROUPED_GROUP_BYTES;",
    "a group of columns too few": "const int       bytes = «(tile.columns + 7)→tile.columns» / 8 *",
    # the products
    "scale 0x7F taken for a number": "d & («((other & 0x80808080) >> 7) * 0x7F→0x7F7F7F7F»);",
    "scales exchanged": "__byte_perm(bits, 0, «0x4140→0x4041»)",
    "signs lost": "(at & «0x80008000→0») | (at >> 3",
    "low and high nibbles exchanged": "const uint32_t at = q << «shift→(shift ^ 4)»;",
    "the scale of another step": "s % 2 ? «__high2half2→__low2half2»(scales_",
    "weights not waited for": WAIT.format("w"),
    "activations not waited for": WAIT.format("x"),
    "groups of columns exchanged": "a_[s % 2][mt][i], «b[64 * i]→b[64 * i + 32]», b[64 * i + 32]);",
    "a column beyond the tile written": "= «col < tile_.columns→col <= tile_.columns»;",
    "a row beyond m written": "to >= 0 && «row + 8 * r < p_.m→row + 8 * r <= p_.m»",
    "another column's power of two undone": "undo_[nt / 4], «lane→0»);",
    "outputs in the order of columns": "= there ? «of[col]→tile_.first + col» : -1;",
    "gather: a column's own values read too late": LATE,
    "gather: a column's own values of another stage": "(xs_ + «x_done_→x_.stage» * C::X_BYTES + C::X_TILE);",
    "gather: a column's power of two from elsewhere": "undo = (const float *) (of + «C::TILE_N→0»);",
}
"""Defects of the kernel."""

GATHERED = {
    # the rows
    "gather: another slot's activations": "row % p.slots * «a.slot→0»",
    "gather: the last rows left out": "experts + («rows + 7→rows») / 8",
    "gather: rows over each other": "order = {«8 * pitch→pitch», pitch,",
    # the copies
    "gather: the rows of the first columns for every tile": "p.of[«tile.first→0» + col] : -1;",
    "gather: another token's row": "of / «p.used→(p.used + 1)» * p.slots",
    "gather: another slot's row": "of % p.used % «p.slots→1»;",
    "gather: rows of no column": "if («of_group[nt] >= 0→true») {",
    "gather: a row for eight columns": "row[nt / 4], nt % 4 * 8 + «column→0»);",
    "gather: the rows of the first 32 columns": "row[«nt / 4→0»], nt",
    "gather: copied too early": FREE.format("x"),
    "gather: not waited for": "«w4a16_arrive_after_copies→w4a16_arrive»(stages.x_full",
    "gather: one half twice": "* NVFP4_GROUPED_ROW_BYTES + «64→0»);",
    "gather: the first 64 of k for all": "from += «C::X_STEP / W4A16_STEP→0» *",
    "gather: the next step's over these": "(«i→0» * C::NT + nt) * NVFP4_GROUPED_GROUP_BYTES;",
    "gather: another row's power of two": "p.undo + «row[i]→max(row[i] - 1, 0)»);",
    "gather: the places of the first columns": "p.of + «tile.first→0» + col);",
}
"""Defects of the gather."""


@pytest.fixture(scope="module")
def defective(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the proof with every defect of both files, of which EMULATOR_DEFECT chooses one."""
    folder = tmp_path_factory.mktemp("defective")
    kernels = copy_kernels(folder)
    plant(kernels / NAME / f"{NAME}.cuh", dict(enumerate(DEFECTS.values())))
    plant(kernels / NAME / f"{NAME}_gather.cuh", dict(enumerate(GATHERED.values(), len(DEFECTS))))
    return compile_emulated(kernels, EMULATOR / f"{NAME}.cpp", folder / "program", "-O1")


@both_orders
def test_the_kernel_is_right_on_the_emulator(emulated: Path, reverse: bool) -> None:
    """Every configuration of the tables, also by gather: tails, skewed routings, replays, strange ids, refusals."""
    ran = run(emulated, "edges", reverse=reverse)
    assert ran.returncode == 0, ran.stderr
    assert "FAIL" not in ran.stderr
    assert ran.stderr.count("ok  ") == 2 * 5 * 23 + 4


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(DEFECTS) + len(GATHERED)), ids=[*DEFECTS, *GATHERED])
def test_a_defect_of_the_kernel_is_found(defective: Path, number: int) -> None:
    """By a configuration of wgmma or of mma.sync, in one order of the threads or the other."""
    planned = (WGMMA, MMA, WIDE) if number < len(DEFECTS) else ()
    assert any(
        fails(defective, "edges", rung, defect=number, reverse=reverse)
        for rung in (*planned, *GATHER)
        for reverse in (False, True)
    )


@pytest.mark.slow
@pytest.mark.parametrize("rung", [WGMMA, MMA, WIDE, *GATHER])
def test_without_a_defect_it_is_right(defective: Path, rung: str) -> None:
    assert run(defective, "edges", rung).returncode == 0
