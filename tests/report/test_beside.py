"""Published figures beside measured ones, against golden files."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from dgxlab import published
from dgxlab.errors import UsageError
from dgxlab.model import to_json
from dgxlab.published import Figure
from dgxlab.report import Number, page, query, render_page
from dgxlab.report.beside import READERS, matching_series, read_batch, read_stream
from dgxlab.store import Store
from tests.report.test_forms import BENCH, MACHINE, compared, step
from tests.report.worlds import Session, agrees, h200, numbers

GOLDEN = Path(__file__).resolve().parent / "golden" / "beside"

ASKED = {
    "ops": {"form": "ops", "experiment": "h200", "published": "seed000 MMQ"},
    "steps": {
        "form": "steps",
        "experiment": "w4a16,tiles",
        "baseline": "h200",
        "cells": "q4_0 n=512, q4_K n=512, pp512, pp2048",
        "published": "seed000 Step1, seed000 P3b-2",
    },
    "single-stream": {"form": "single-stream", "experiment": "h200", "published": "seed004 MXFP4_MOE"},
    "concurrency": {
        "form": "concurrency",
        "experiment": "h200",
        "published": "seed004 vLLM, BF16_SSM_STATE_RESULTS.md f32",
    },
    "gates": {"form": "gates", "experiment": "h200", "published": "W4A16 tests_passed, canonical"},
    "published": {"form": "published", "source": "seed004 Q8_0 B=8, seed001 H100"},
}
"""What each golden file shows."""


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    with Store.open(tmp_path_factory.mktemp("beside") / "results.db") as store:
        compared(store, "w4a16", "20261110-100000-beside", 1.1, "tiles beat MMQ")
        Session(store, h200(bench=BENCH), "20261120-140000-beside", host=MACHINE).build().gates().runs().end()
        tiles = step(store, "tiles", "20261120-150000-beside", hypothesis="block tiling beats one warp a tile").build()
        tiles.gates().runs(only=["backend-ops"]).runs(numbers(17000, 4), only=["llama-bench"]).end()
        yield store


@pytest.mark.parametrize("name", ASKED)
def test_golden(store: Store, name: str) -> None:
    assert agrees(render_page(page(store, query(ASKED[name]))), GOLDEN / f"{name}.md")


def test_what_was_measured_is_as_without(store: Store) -> None:
    for form in ("ops", "steps", "single-stream", "concurrency"):
        words = dict(ASKED[form])
        (both,) = page(store, query(words)).tables
        del words["published"]
        (alone,) = page(store, query(words)).tables
        keys = [column.key for column in alone.columns]
        measured = [row for row in both.rows if "published" not in row]
        assert [[row.get(key) for key in keys] for row in measured] == [
            [row.get(key) for key in keys] for row in alone.rows
        ]
        others = [value for row in both.rows if "published" in row for key, value in row.items() if key not in keys[:1]]
        assert not any(isinstance(value, Number) for value in others)
        assert not any(
            row.get(key) for row in both.rows if "published" in row for key in ("ratio", "verdict", "roofline")
        )


def test_the_twin_has_the_figures_as_they_were_published(store: Store) -> None:
    twin = json.loads(json.dumps(to_json(page(store, query(ASKED["ops"])))))
    row = twin["tables"][0]["rows"][0]
    figure = row["published.0.flops"]
    assert (figure["value"], figure["unit"], figure["host"]) == (817.0, "GFLOPS", "dgx.casa GB10 sm_121")
    assert twin["tables"][0]["beside"]["sources"][0]["lines"] == [2, 3, 4, 5, 6, 7]
    assert row["flops"]["of"] == "samples"


def test_every_figure_of_a_kind_has_its_place_once(store: Store) -> None:
    every = published.figures()
    for form, readers in READERS.items():
        sources = sorted({figure.source_doc for figure in every if any(reader(figure) for reader in readers)})
        for doc in sources:
            mine = [each for each in every if each.source_doc == doc and any(reader(each) for reader in readers)]
            series = matching_series(form, [doc])
            placed = [figure.line for each in series for figure in each.figures.values()]
            assert sorted(placed) == sorted(figure.line for figure in mine), (form, doc)
            assert len({each.label for each in series}) == len(series), (form, doc)


def figure(**changes: object) -> Figure:
    texts = dict.fromkeys(("source_doc", "host", "engine", "pin", "model", "quant", "test", "notes"), "")
    fields = {
        **texts,
        "tool": "llama-bench",
        "metric": "prefill",
        "unit": "t/s",
        "stddev": None,
        "line": 1,
        "value": 1.0,
    }
    return Figure(**{**fields, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("test", "metric", "cell", "more"),
    [
        ("pp512", "prefill", "pp512", ""),
        ("pp2048 ub512", "prefill", "pp2048", "ub512"),
        ("-p 512 -n 16 -ub 2048", "pp512", "pp512", "-p 512 -n 16 -ub 2048"),
        ("tg128 @ d4096", "decode", "tg128 @ d4096", ""),
        ("pp512+tg128", "both", "pp512+tg128", ""),
    ],
)
def test_the_test_of_llama_bench_is_read_from_metric_or_test(test: str, metric: str, cell: str, more: str) -> None:
    about = read_stream(figure(test=test, metric=metric))
    assert about is not None
    assert (about.cell, about.metric, about.more) == ((("test", cell),), "avg_ts", more)


@pytest.mark.parametrize("test", ["prefill today", "ppl", "GGML_CUDA_FORCE_CUBLAS env off", "", "512"])
def test_what_names_no_test_is_of_none(test: str) -> None:
    assert read_stream(figure(test=test)) is None


def test_missing_sizes_are_not_guessed(store: Store) -> None:
    assert read_batch(figure(test="B=8", metric="S_TG")).cell == (("PP", None), ("TG", None), ("B", 8))  # type: ignore[union-attr]
    assert read_batch(figure(test="npp128 ntg64 npl8 -c 33000", metric="S_PP")).cell == (
        ("PP", 128),
        ("TG", 64),
        ("B", 8),
    )  # type: ignore[union-attr]
    assert read_batch(figure(test="npp128", metric="S_PP")) is None
    (table,) = page(store, query(ASKED["concurrency"])).tables
    unsaid = [row for row in table.rows if row["B"] == 8 and row["PP"] is None]
    assert [row.get("speed_pp.0") for row in unsaid] == [None]


REFUSED = (
    {"form": "ops", "experiment": "h200", "published": "seed9"},
    {"form": "ops", "experiment": "h200", "published": "seed004"},
    {"form": "ops", "experiment": "h200", "published": "a,,b"},
    {"form": "gates", "experiment": "h200", "published": "nosuch"},
    {"form": "published", "source": "seed000 nosuch"},
)


def test_golden_refusals(store: Store) -> None:
    messages = []
    for words in REFUSED:
        with pytest.raises(UsageError) as error:
            page(store, query(words))
        messages.append(f"{error.value.message}\n")
    assert agrees("".join(messages), GOLDEN / "refused.txt")


def test_figures_without_a_column_are_counted(store: Store) -> None:
    (table,) = page(store, query({**ASKED["single-stream"], "cells": "pp512"})).tables
    assert table.beside is not None
    (note,) = table.beside.left
    assert note.startswith("12 published figures")
