"""Every form against a golden file, and what each of them may be asked."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dgxlab.cli.report import Form
from dgxlab.errors import UsageError
from dgxlab.model import CANDIDATE, PROTOCOL, CellResult, ChainStep, RunStep, to_json
from dgxlab.report import KEYS, Table, overview, page, query, render_overview, render_page
from dgxlab.report.forms import FORMS
from dgxlab.store import Store
from dgxlab.store.records import experiment_row
from dgxlab.tools import BackendOpsBench
from tests.journals import CAPPED, CLOCK, THROTTLED, source
from tests.report.worlds import GPU, H200, Session, agrees, h200, numbers, session_of_two

GOLDEN = Path(__file__).resolve().parent / "golden" / "forms"
MACHINE = replace(
    H200,
    details={
        "cpu": "Xeon",
        "gpus": [GPU],
        "driver": {"version": "580.159.04", "cuda": "13.0"},
        "memory_mib": 131072,
        "os": "Ubuntu 24.04.3 LTS",
        "kernel": "6.18",
    },
)
OPS = BackendOpsBench(
    "MUL_MAT", "CUDA0", {"type_a": ("q4_0", "q4_K"), "type_b": ("f32",), "m": (4096,), "n": (1, 8, 512), "k": (14336,)}
)
BENCH = (OPS, *h200().bench[1:])


def by(effect: float) -> Any:
    """Return what runs give whose candidate is so many times as fast."""

    def value(step: ChainStep, role: str, cycle: int) -> float:
        faster = 1 / effect if step.baseline.tool == "backend-ops" else effect
        return 1000 * (1 + 0.001 * (2 * cycle % 5)) * (faster if role == CANDIDATE else 1)

    return value


def step(store: Store, name: str, job_id: str, **changes: Any) -> Session:
    experiment = h200(name=name, series=(name,), bench=BENCH, **changes)
    return Session(store, experiment, job_id, tree=source([name]), host=MACHINE)


def compared(store: Store, name: str, job_id: str, effect: float, hypothesis: str, kind: str = "ab") -> Session:
    changes = {"name": name, "hypothesis": hypothesis}
    session = session_of_two(store, job_id, kind=kind, noise=0.004, candidate=changes, host=MACHINE, bench=BENCH)
    session = session.build().gates().chains(by(effect))
    return session.gates(after=True).end() if kind == "ab" else session.end()


def world(store: Store) -> None:
    """Play the first days of a kernel: stock, steps that help, one that fails, dead ends."""
    compared(store, "w4a16", "20261110-100000-forms", 1.1, "tiles beat MMQ")
    compared(store, "swizzle", "20261110-101000-forms", 0.43, "XOR swizzling frees the banks")
    compared(store, "wide", "20261110-102000-forms", 1.0001, "BN=256 halves the decoding")
    compared(store, "hint", "20261110-103000-forms", 0.9, "an L2 hint helps", kind="screen")
    Session(store, h200(bench=BENCH), "20261120-140000-forms", host=MACHINE).build().gates().runs().end()
    tiles = (
        step(store, "tiles", "20261120-150000-forms", hypothesis="block tiling beats one warp a tile").build().gates()
    )
    tiles.runs(
        only=["backend-ops"],
        telemetry=[CLOCK, {**CLOCK, "name": "power.draw", "unit": "W", "min": 90.0, "median": 340.0, "max": 351.0}],
        flags=[THROTTLED],
    )
    tiles.runs(numbers(17000, 4), only=["llama-bench"], telemetry=[CLOCK], flags=[CAPPED])
    tiles.runs(numbers(15000), only=["batched-bench"]).end()
    skew = step(store, "skew", "20261120-160000-forms", hypothesis="a skewed pad frees the banks", env={"PAD": "12"})
    skew.build().gates().runs(numbers(150, 3), only=["backend-ops"]).runs(numbers(36000, 4), only=["llama-bench"]).end()
    gate = {"passed": 1101, "status": "failed", "rc": 1, "failed": ["type_a=q4_0,n=1"]}
    prepack = step(store, "prepack", "20261120-170000-forms", hypothesis="decoding once | is enough").build()
    prepack.gates(**gate, reasons=["passed 1101 of 1103"])
    prepack.journal.add("error", exit_code=5, message="gate MUL_MAT on CUDA0 failed", next="", details="")
    prepack.end("failed", 5)
    store.put("experiments", experiment_row(h200(name="stream-k", hypothesis="stream-k fills the last wave").spec))
    last = session_of_two(
        store, "20261120-180000-forms", host=MACHINE, bench=BENCH, candidate={"name": "async", "hypothesis": "cp.async"}
    )
    first = next(last.build().gates().plan.chains)
    last.place(first, "burn-in", 1, 4242.0)
    last.save()


ASKED = {
    "steps": {"experiment": "tiles,skew,w4a16", "baseline": "h200", "cells": "q4_0 n=512, q4_K n=512, pp512, pp2048"},
    "single-stream": {"experiment": "h200,tiles,skew"},
    "concurrency": {"experiment": "h200,tiles"},
    "ops": {"session": "20261120-140000-forms"},
    "history": {"experiment": "h200,w4a16", "cells": "q4_0 n=512, pp512"},
    "gates": {"session": "20261120-140000-forms,20261120-170000-forms,20261110-100000-forms"},
    "verdicts": {"experiment": "swizzle", "baseline": "h200"},
    "levers": {},
    "provenance": {"experiment": "h200,w4a16"},
}
"""What each golden file shows; those of the published record have their own."""


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    with Store.open(tmp_path_factory.mktemp("forms") / "results.db") as opened:
        world(opened)
        yield opened


def shown(store: Store, **words: str) -> str:
    return render_page(page(store, query(words)))


def table(store: Store, **words: str) -> Table:
    (only,) = page(store, query(words)).tables
    assert only.kind == "arms"
    return only


def test_the_command_line_has_every_form() -> None:
    assert [form.value for form in Form] == list(KEYS) == list(FORMS)
    assert set(FORMS) == {*ASKED, "fleet", "profile", "serving", "tries", "published", "imported"}


@pytest.mark.parametrize("form", ASKED)
def test_golden(store: Store, form: str) -> None:
    assert agrees(shown(store, form=form, **ASKED[form]), GOLDEN / f"{form}.md")


def test_golden_overview(store: Store) -> None:
    text = render_overview(overview(store))
    assert agrees(text, GOLDEN / "overview.md")
    assert text.count("\n") <= 32


def test_nothing_of_a_session_that_goes_on(store: Store) -> None:
    every = [shown(store, form=form, **words) for form, words in ASKED.items()]
    assert "4242" not in "".join([*every, render_overview(overview(store))])


def test_the_twin_has_the_numbers(store: Store) -> None:
    twin = json.loads(json.dumps(to_json(page(store, query({"form": "ops", **ASKED["ops"]})))))
    row = twin["tables"][0]["rows"][0]
    assert (row["of_bandwidth"], row["type_a"]) == (f"{row['of_bandwidth_pct']:.1f}", "q4_0")
    moved = (4096 * 14336 * 4.5 / 8 + 14336 * 4 + 4096 * 4) / 1e9
    assert row["rate"]["median"] == pytest.approx(moved / (row["time_us"]["median"] / 1e6))
    assert row["of_bandwidth_pct"] == pytest.approx(100 * row["rate"]["median"] / 4800)


def test_cells_by_words(store: Store) -> None:
    ops = page(store, query({"form": "ops", "experiment": "h200", "cells": "type_a=q4_K n=8, q4_0 n=1"})).tables[0]
    assert [(row["type_a"], row["n"]) for row in ops.rows] == [("q4_0", 1), ("q4_K", 8)]
    streams = table(store, form="single-stream", experiment="h200", cells="tg32")
    assert [column.label for column in streams.columns] == ["experiment", "tg32"]


def test_a_ratio_is_better_above_1_and_never_between_devices(store: Store, tmp_path: Path) -> None:
    with Store.open(tmp_path / "other.db") as other:
        Session(other, h200(bench=(OPS,)), "20261120-140000-forms").build().runs(numbers(200)).end()
        step(other, "tiles", "20261120-150000-forms").build().runs(numbers(100), only=["backend-ops"]).end()
        # a clone of the machine: the same host_id, and another card
        elsewhere = replace(MACHINE, details={**MACHINE.details, "gpus": [{**GPU, "uuid": "GPU-2"}]})
        tree = source(["skew"])
        far = Session(other, h200(name="skew", bench=(OPS,)), "20261120-160000-forms", tree=tree, host=elsewhere)
        far.build().runs(numbers(100)).end()
        words = {"form": "steps", "experiment": "tiles,skew", "baseline": "h200", "cells": "q4_K n=512"}
        beside_base = page(other, query(words)).tables[0]
        beside = shown(other, form="steps", experiment="tiles,h200")
        apart = shown(other, form="steps", experiment="skew,h200")
    assert [row["ratio"] for row in beside_base.rows] == ["baseline", "2.00x", "of another device"]
    assert "different devices" not in beside
    assert "different devices" in apart
    assert "NVIDIA H200 GPU-2" in apart


def test_what_another_protocol_measured_says_so(tmp_path: Path) -> None:
    with Store.open(tmp_path / "older.db") as older:
        Session(older, h200(bench=BENCH), "20261120-140000-older").build().runs().end()
        step(older, "tiles", "20261120-150000-older").build().runs().end()
        words = {"form": "single-stream", "experiment": "h200,tiles"}
        assert "protocol" not in shown(older, **words)
        older.update_job("20261120-140000-older", protocol=PROTOCOL - 1)
        note = f"- measured by protocol {PROTOCOL - 1}, not {PROTOCOL}\n"
        assert shown(older, **words).count(note) == 1
        assert note in shown(older, form="concurrency", experiment="h200")


def test_numbers_in_doubt_say_so_side_by_side(tmp_path: Path) -> None:
    """As in the tables of a single experiment: no gate checked the build, or one failed after it was measured."""
    failed = {"passed": 1101, "status": "failed", "rc": 1, "reasons": ["2 of 1103 cases failed"]}
    with Store.open(tmp_path / "doubts.db") as store:
        for name, job_id in (("skew", "20261120-120000-doubts"), ("pad", "20261120-130000-doubts")):
            step(store, name, job_id).build().runs().end()
        Session(store, h200(bench=BENCH), "20261120-140000-doubts").build().gates().runs().end()
        step(store, "tiles", "20261120-150000-doubts").build().gates().runs().end()
        step(store, "tiles", "20261120-160000-doubts").build().gates(**failed).end("failed", 5)
        asked = {"experiment": "h200,tiles,skew,pad"}
        notes = [table(store, form=form, **asked).notes for form in ("steps", "single-stream", "concurrency")]
    expected = ("tiles: measured before gate MUL_MAT on CUDA0 failed", "skew, pad: no gate checked this build")
    assert notes == [expected] * 3


def test_a_verdict_is_of_no_environment_alone(tmp_path: Path) -> None:
    def value(run: RunStep) -> tuple[CellResult, ...]:
        return numbers(100 + int(run.env.get("M", 0)))(run)

    with Store.open(tmp_path / "swept.db") as store:
        compared(store, "swept", "20261110-100000-forms", 1.1, "faster")
        Session(store, h200(bench=BENCH[1:2]), "20261120-140000-forms", host=MACHINE).build().runs(value).end()
        entries = tuple(replace(BENCH[1], env=env) for env in ({}, {"M": "100"}))
        run = Session(
            store, h200(name="swept", series=("swept",), bench=entries), "20261120-150000-forms", host=MACHINE
        )
        run.build().runs(value).end()
        result = table(store, form="steps", experiment="swept", baseline="h200", cells="pp512")
    assert [(row["step"], row["ratio"], row["verdict"]) for row in result.rows] == [
        ("h200", "baseline", None),
        ("swept", "1.00x", None),
        ("swept M=100", "2.00x", None),
    ]


def test_one_cell_in_several_environments(tmp_path: Path) -> None:
    stream, many = h200().bench[1:]
    environments: tuple[dict[str, str], ...] = ({}, {"M": "8"}, {"M": "64"})
    swept = tuple(replace(entry, env=env) for entry in (stream, many) for env in environments)

    def value(run: RunStep) -> tuple[CellResult, ...]:
        return numbers(100 + int(run.env.get("M", 0)))(run)

    with Store.open(tmp_path / "swept.db") as store:
        Session(store, h200(env={"ALL": "1"}, bench=swept), "20261120-140000-swept").build().runs(value).end()
        results = {
            form: table(store, form=form, experiment="h200") for form in ("single-stream", "steps", "concurrency")
        }
    names = ["h200", "h200 M=8", "h200 M=64"]
    assert [row["arm"] for row in results["single-stream"].rows] == names
    assert [row["pp512"].median for row in results["single-stream"].rows] == [100, 108, 164]
    assert [row["step"] for row in results["steps"].rows] == names
    first = results["concurrency"].rows[0]
    assert [first[f"speed_pp.{number}"].median for number in range(3)] == [100, 108, 164]
    assert [origin.label for origin in results["concurrency"].origins] == names


REFUSED: tuple[dict[str, str], ...] = (
    {},
    {"form": "step", "experiment": "h200"},
    {"form": "xyz"},
    {"form": "ops", "experiments": "h200"},
    {"form": "gates", "experiment": "h200", "model": "x"},
    {"form": "ops", "experiment": ""},
    {"form": "ops", "experiment": "h200,,x"},
    {"form": "ops", "experiment": "h200,x,h200"},
    {"form": "ops", "experiment": "h200", "host": ""},
    {"form": "ops", "experiment": "h200", "wide": "maybe"},
    {"form": "ops"},
    {"form": "steps"},
    {"form": "published"},
    {"form": "imported", "cells": "x"},
    {"form": "ops", "experiment": "a", "session": "b"},
    {"form": "ops", "session": "b", "host": "h"},
    {"form": "verdicts", "session": "b", "baseline": "h"},
    {"form": "verdicts", "experiment": "h200", "published": "x"},
    {"form": "ops", "experiment": "h2000"},
    {"form": "ops", "experiment": "h200", "host": "dgx"},
    {"form": "ops", "experiment": "h200", "cells": "q4_K, q9_K"},
    {"form": "single-stream", "experiment": "h200", "model": "big"},
    {"form": "ops", "session": "nosuch"},
    {"form": "ops", "session": "20261110-100000-forms"},
    {"form": "ops", "experiment": "h200-vs-w4a16"},
    {"form": "verdicts", "experiment": "tiles"},
    {"form": "verdicts", "experiment": "h200"},
    {"form": "verdicts", "experiment": "w4a16", "baseline": "x"},
    {"form": "verdicts", "session": "20261120-140000-forms"},
    {"form": "verdicts", "session": "20261120-180000-forms"},
    {"form": "concurrency", "experiment": "skew"},
    {"form": "fleet", "experiment": "h200,tiles"},
    {"form": "fleet", "experiment": "nosuch"},
    {"form": "levers", "experiment": "nosuch"},
    {"form": "published", "table": "nosuch"},
)
"""What cannot be asked, and what is not there; the golden file has the sentences."""


def test_golden_refusals(store: Store) -> None:
    lines = []
    for words in REFUSED:
        with pytest.raises(UsageError) as error:
            page(store, query(words))
        message = error.value.message.replace(str(store.path), "DB")
        question = " ".join(f"{key}={value!r}" for key, value in words.items())
        lines.append(f"{question}\n  {message}\n  next: {error.value.next}\n")
    assert agrees("".join(lines), GOLDEN / "refused.txt")
