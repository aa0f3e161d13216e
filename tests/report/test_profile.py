"""Profiles in the record: the share table of one experiment, what a patch moved, and their pictures."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from dgxlab.errors import UsageError
from dgxlab.report import Number, collect, page, query, render, render_page
from dgxlab.store import Store
from dgxlab.tools import BENCHES, ProfileBench
from tests.conftest import PROJECT
from tests.journals import source
from tests.report.worlds import Session, h200
from tests.tools.traces import output

STEP = {  # shares of a step as published for a mixture of experts in MXFP4, in ns; the rest is made up
    "void mul_mat_q<(ggml_type)39, 128, false>(char const*, int const*)": 372_000,
    "void quantize_mmq_mxfp4(float const*, int const*, void*)": 80_000,
    "void mul_mat_q<(ggml_type)8, 128, false>(char const*, int const*)": 101_000,
    "void flash_attn_ext_f16<128, 128, 16, 8>(char const*)": 88_000,
    "void rms_norm_f32<1024, true, false>(float const*, float*)": 99_000,
    "void rope_neox<true, false, float, __half>(float const*)": 60_000,
    "void k_set_rows<float, long, __half>(float const*)": 60_000,
    "topk_moe_cuda<128, true>(float const*)": 70_000,
    "void mystery(int)": 70_000,
}
BENCH = ProfileBench("q4k", (128,), (4,), (1, 32), phase=("decode",))


def profiled(
    store: Store, name: str, job_id: str, kernels: Mapping[str, int], early: int = 0, node: int = 0, **changes: Any
) -> Session:
    experiment = h200(**{"name": name, "bench": (BENCH,), "gates": (), "root": str(PROJECT), **changes})
    session = Session(store, experiment, job_id, tree=source([name]))
    twice = {kernel: [ns // 2, ns - ns // 2] for kernel, ns in kernels.items()}
    (step,) = session.plan.runs
    text = output(128, 4, [1, 32], twice, early=early).replace("launch\t1\t7\t0\t", f"launch\t1\t7\t{node}\t")
    parsed = BENCHES["profile"].parse(text, step.cells)
    assert parsed.problems == ()
    cells = {cell.key: cell for cell in (*step.cells, *parsed.parts)}
    session.build().runs(lambda _: parsed.results, only=("profile",), cells=cells).end()
    return session


def shares(store: Store, *names: str) -> dict[str, Any]:
    table = page(store, query({"form": "profile", "experiment": ",".join(names), "cells": "pl=1"})).tables[0]
    return {str(row["group"]): row for row in table.rows}


def test_a_profile_that_no_gate_checked_says_so(store: Store) -> None:
    for name in ("moe", "other"):
        profiled(store, name, "20261120-090000-" + name, STEP)
    alone, beside = (page(store, query({"form": "profile", "experiment": of})).tables for of in ("moe", "moe,other"))
    assert {table.notes[-1] for table in alone} == {"no gate checked this build"}
    assert {table.notes[-1] for table in beside} == {"moe, other: no gate checked this build"}


def test_the_published_shares(store: Store) -> None:
    """The figure of a step: 37.2 % in products of MXFP4, 8.0 in quantising, 10.1 in products of Q8_0, 8.8 attention."""
    profiled(store, "moe", "20261120-090000-moe", STEP)
    rows = shares(store, "moe")
    told = {name: row["share"] for name, row in rows.items()}
    assert next(iter(told)) == "products MXFP4"
    assert (told["products MXFP4"], told["activation quantise"]) == ("37.2", "8.0")
    assert (told["products Q8_0"], told["attention"], told["other"]) == ("10.1", "8.8", "7.0")
    assert sum(row["share_pct"] for row in rows.values()) == pytest.approx(100)
    assert rows["norms"]["step_us"].middle == pytest.approx(99)
    assert rows["norms"]["launches"] == "2"


def test_what_a_number_without_spread_is(store: Store) -> None:
    """A group's time is a sum, which has no spread; of two experiments a kernel alone keeps its own."""
    kernels = {**STEP, "void norm_f32<1024>(float const*, float*)": 40_000}
    profiled(store, "moe", "20261120-090000-moe", kernels)
    profiled(store, "other", "20261120-090000-other", {kernel: 2 * ns for kernel, ns in kernels.items()})
    legend = "a group of kernels: sum of their medians (number of samples)"
    for names in ("moe", "moe,other"):
        text = " ".join(render_page(page(store, query({"form": "profile", "experiment": names}))).split())
        assert text.count(legend) == 1
        assert "; a number alone is a single value" in text
    _, by_kernel, *_ = page(store, query({"form": "profile", "experiment": "moe,other"})).tables
    numbers = [row[f"us.{number}"] for row in by_kernel.rows for number in (0, 1)]
    assert all(isinstance(number, Number) and number.spread is not None for number in numbers)


def test_what_no_rule_names_is_told(store: Store) -> None:
    profiled(store, "moe", "20261120-090000-moe", STEP)
    known = {kernel: ns for kernel, ns in STEP.items() if "mystery" not in kernel}
    profiled(store, "known", "20261120-090001-known", known)
    notes = {
        name: page(store, query({"form": "profile", "experiment": name})).tables[0].notes for name in ("moe", "known")
    }
    assert [len(each) for each in notes.values()] == [3, 2]  # the last is that no gate checked the build
    assert "7.0 %" in notes["moe"][1]
    assert "mystery" in notes["moe"][1]


@pytest.mark.parametrize(("early", "told"), [(0, False), (10_000, True)])
def test_times_that_overlap_are_told(store: Store, early: int, told: bool) -> None:
    profiled(store, "moe", "20261120-090000-moe", STEP, early)
    notes = "\n".join(page(store, query({"form": "profile", "experiment": "moe"})).tables[0].notes)
    union = (sum(STEP.values()) - (2 * len(STEP) - 1) * early) / 1e3
    assert (f"overlap: times that add up to 1000.0 us pass in {union:.1f} us" in notes) == told
    assert ("overlap" in notes) == told


@pytest.mark.parametrize(("node", "told"), [(0, False), (99, True)])
def test_launches_in_graphs_are_told(store: Store, node: int, told: bool) -> None:
    profiled(store, "moe", "20261120-090000-moe", STEP, node=node)
    notes = page(store, query({"form": "profile", "experiment": "moe"})).tables[0].notes
    assert (f"2 of {2 * len(STEP)} launches of a step are nodes of a CUDA graph" in notes) == told


def test_a_token_is_a_part_of_a_step(store: Store) -> None:
    profiled(store, "moe", "20261120-090000-moe", STEP)
    tables = page(store, query({"form": "profile", "experiment": "moe"})).tables
    of_steps = [float(str(table.rows[0]["token_us"])) for table in tables]
    assert [len(tables), of_steps[0]] == [4, 372]
    assert of_steps[2] == pytest.approx(372 / 32, rel=1e-3)


def test_two_side_by_side_show_what_moved(store: Store) -> None:
    profiled(store, "moe", "20261120-090000-moe", STEP)
    faster = {kernel: ns // 2 if "mul_mat_q<(ggml_type)39" in kernel else ns for kernel, ns in STEP.items()}
    profiled(store, "faster", "20261120-090001-faster", faster)
    groups, kernels = page(store, query({"form": "profile", "experiment": "moe,faster", "cells": "pl=1"})).tables
    moved = {row["group"]: row["moved_us"] for row in groups.rows}
    assert moved["products MXFP4"] == pytest.approx(-186)
    assert moved["norms"] == pytest.approx(0)
    assert [row["kernel"] for row in kernels.rows] == ["mul_mat_q<39, 128, false>"]


def test_two_between_which_no_kernel_moved(store: Store) -> None:
    for number, name in enumerate(("moe", "same")):
        profiled(store, name, f"20261120-09000{number}-{name}", STEP)
    shown = page(store, query({"form": "profile", "experiment": "moe,same", "cells": "pl=1"}))
    assert [table.title for table in shown.tables] == ["decode pp128 tg4 B1 of q4k"]
    assert "a step has 1000.0 and 1000.0 us of kernels" in render_page(shown)


def test_more_than_two_are_refused(store: Store) -> None:
    for number, name in enumerate(("a", "b", "c")):
        profiled(store, name, f"20261120-09000{number}-{name}", STEP)
    with pytest.raises(UsageError):
        page(store, query({"form": "profile", "experiment": "a,b,c"}))


def test_kernels_are_measurements_and_in_the_whole_report(store: Store) -> None:
    profiled(store, "moe", "20261120-090000-moe", STEP)
    rows = store.rows("SELECT label, value FROM measurements WHERE metric = 'step_us' ORDER BY value DESC LIMIT 2")
    assert [row["value"] for row in rows] == [1000, 1000]
    text = render(collect(store, "moe"))
    assert "products MXFP4" in text
    assert "products MXFP4" in render_page(page(store, query({"form": "profile", "experiment": "moe"})))


def test_pictures(store: Store, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from dgxlab import plots

    profiled(store, "moe", "20261120-090000-moe", STEP)
    ((name, figure),) = plots.figures(collect(store, "moe"), "moe")
    assert name == "moe-profile"
    assert plots.write(figure, tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")
