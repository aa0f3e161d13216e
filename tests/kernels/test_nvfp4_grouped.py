"""Products of tokens with their experts' NVFP4 weights: the kernels' own source on an emulated GPU, and its defects."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.kernels.conftest import both_orders, fails, run

NAME = "nvfp4_grouped"
WGMMA, WIDE, MMA = "0", "1", "2"
"""By number: a narrow configuration of wgmma, the widest, and one of mma.sync."""

WAIT = "«w4a16_wait_for(stages_.{0}_full + {0}_.stage, {0}_.parity);→»"
FREE = "«w4a16_wait_for(stages.{0}_free + {0}.stage, {0}.parity ^ 1);→»"

PREPARE = "status = nvfp4_grouped_prepare_cuda<C>(a, stream);"

DEFECTS = {
    # the routing
    "columns of a warp's lanes over each other": "__popc(lanes & («(1u << lane) - 1→0u»))] = i;",
    "a warp's columns over the ones before": "at += «of_warps[w]→0»;",
    "a token's last slot twice": "if («slot >= used→slot > used») {",
    "ids out of range counted": "if («id >= 0 && id < experts→id < experts») {",
    "an expert's columns begin amid a group": "before += «(counts[e] + 7) / 8→counts[e] / 8»;",
    "columns beyond an expert's are anything": "p.of[i] = «-1→0x7FFFFFF»;",
    "a last chunk left out": "«i * tile_n < count→(i + 1) * tile_n <= count»; i += NVFP4_GROUPED_ROUTERS",
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
    "few: a last chunk left out": "«i * tile_n < count→(i + 1) * tile_n <= count»; i += THREADS",
    "few: ids without their stride": "ids[«at(i) / a.used * ids_token + at(i) % a.used→at(i)»] : -1;",
    "few: bounds of the launch before": "*p.chunks_used = «all_chunks→max(all_chunks, *p.chunks_used)»;",
    # the conversion
    "steps beyond k written": "if («step < steps→step < steps + warps») {",
    "another slot's activations": "of % a.used % «a.slots→1» * a.slot",
    "another token's activations": "a.x + of / «a.used→(a.used + 1)» * a.token",
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
    "outputs in the order of columns": "= there ? «p_.of[tile_.first + col]→tile_.first + col» : -1;",
}
"""Defects of the kernel."""


@both_orders
def test_the_kernel_is_right_on_the_emulator(emulated: Path, reverse: bool) -> None:
    """Every configuration of the tables: tails, skewed routings, 127 to 129 tokens, replays, strange ids, refusals."""
    ran = run(emulated, "edges", reverse=reverse)
    assert ran.returncode == 0, ran.stderr
    assert "FAIL" not in ran.stderr
    assert ran.stderr.count("ok  ") == 5 * 23 + 4


@pytest.mark.parametrize("number", range(len(DEFECTS)), ids=list(DEFECTS))
def test_a_defect_of_the_kernel_is_found(defective: Path, number: int) -> None:
    """By a configuration of wgmma or of mma.sync, in one order of the threads or the other."""
    assert any(
        fails(defective, "edges", rung, defect=number, reverse=reverse)
        for rung in (WGMMA, MMA, WIDE)
        for reverse in (False, True)
    )


@pytest.mark.parametrize("rung", [WGMMA, MMA, WIDE])
def test_without_a_defect_it_is_right(defective: Path, rung: str) -> None:
    assert run(defective, "edges", rung).returncode == 0
