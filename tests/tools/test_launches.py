"""From bench entries to launches."""

import re
from typing import Any

import pytest

from dgxlab import tools
from dgxlab.errors import SpecError
from dgxlab.model import Bench, Cell, Experiment
from dgxlab.tools import BENCHES, Launch
from tests.toy import backend_ops, batched_bench, llama_bench


def launches(*bench: Bench, **options: Any) -> list[Launch]:
    experiment = Experiment("x", "0" * 40, (), "/x.yaml", "/", env={"A": "1"}, bench=bench)
    return list(tools.launches(experiment, **options))


def after(launch: Launch, *flags: str) -> tuple[str, ...]:
    return tuple(launch.argv[launch.argv.index(flag) + 1] for flag in flags)


def test_llama_bench_is_one_launch_with_a_repetition_to_throw_away() -> None:
    (launch,) = launches(llama_bench(repetitions=5, env={"A": "2", "B": "3"}))
    assert [cell.label for cell in launch.cells] == ["pp16", "pp32", "tg4"]
    assert after(launch, "-p", "-n", "-r") == ("16,32", "4", "6")
    assert launch.cells[0].params == {"n_prompt": 16, "n_gen": 0}
    assert launch.cells[0].fixed["repetitions"] == 5
    assert launch.env == {"A": "2", "B": "3"}
    (launch,) = launches(llama_bench(n_gen=(0,)))
    assert after(launch, "-n") == ("0",)  # without it llama-bench would run 128


def test_axes_multiply_into_launches() -> None:
    axes = {"n_depth": (4096,), "n_ubatch": (512, 2048), "flash_attn": (1, 0)}
    first, *_, last = expanded = launches(llama_bench(axes=axes))
    settings = [("512", "1"), ("512", "0"), ("2048", "1"), ("2048", "0")]
    assert [after(launch, "-ub", "-fa") for launch in expanded] == settings
    assert first.cells[0].params["flash_attn"] == 1
    assert last.cells[0].label == "pp16 @ d4096 n_ubatch=2048 flash_attn=0"


def test_exclude_removes_cells_and_whole_launches() -> None:
    rules = ({"n_ubatch": 2048, "n_prompt": 16}, {"n_ubatch": 512})
    (launch,) = launches(llama_bench(axes={"n_ubatch": (512, 2048)}, exclude=rules))
    assert [cell.label for cell in launch.cells] == ["pp32 n_ubatch=2048", "tg4 n_ubatch=2048"]
    assert after(launch, "-p") == ("32",)
    with pytest.raises(SpecError, match=r"bench\[0\]"):
        launches(llama_bench(exclude=({"n_prompt": 16}, {"n_prompt": 32}, {"n_gen": 4})))


def test_batched_bench_asks_for_every_row_twice() -> None:
    first, *others = launches(batched_bench(npp=(128, 32), ntg=(64, 8), npl=(1, 8, 32)))
    assert after(first, "-npl", "-c") == ("1,8,32,1,8,32,32", str(32 * 256))
    assert [cell.params for cell in first.cells] == [{"pp": 128, "tg": 64, "pl": pl} for pl in (1, 8, 32)]
    assert [after(launch, "-npp", "-ntg") for launch in others] == [("128", "8"), ("32", "64"), ("32", "8")]


def test_batched_bench_refuses_a_context_that_would_drop_rows() -> None:
    with pytest.raises(SpecError) as caught:
        launches(batched_bench(npp=(128,), ntg=(64,), npl=(1, 32), axes={"n_ctx": (6144,)}))
    assert "8192" in caught.value.next
    (launch,) = launches(batched_bench(npp=(128,), ntg=(64,), npl=(1, 32), axes={"n_ctx": (9000,)}))
    assert after(launch, "-c") == ("9000",)


OPS = [
    f"type_a={t},type_b=f32,m={m},n={n},k=14336,bs=[1,1],nr=[1,1],per=[0,1,2,3],k_v=0,o=1"
    for t in ("q4_0", "q4_K", "q4_1")
    for m in (4096, 14096)
    for n in (1, 8, 512, 51)
]
WHERE = {"type_a": ("q4_0", "q4_K"), "m": (4096,), "n": (1, 512)}


@pytest.mark.parametrize(
    ("entry", "pattern"),
    [
        (backend_ops(where=WHERE), r"type_a=q4_[0K],type_b=f32,m=4096,n=(1|512),"),
        (
            backend_ops(where=WHERE, exclude=({"type_a": "q4_K", "n": 1},)),
            r"type_a=(q4_0,type_b=f32,m=4096,n=(1|512)|q4_K,type_b=f32,m=4096,n=512),",
        ),
        (backend_ops(where={"bs": ("[1,1]",), "n": (8,)}), r".*,n=8,"),
    ],
    ids=["full", "with holes", "brackets"],
)
def test_backend_ops_selects_its_cells_and_no_other(entry: Bench, pattern: str) -> None:
    (launch,) = launches(entry)
    (regex,) = after(launch, "-p")
    assert [text for text in OPS if re.search(regex, text)] == [text for text in OPS if re.match(pattern, text)]


def test_only_what_is_wanted_is_launched() -> None:
    def wanted(model: str, env: object, cell: Cell) -> bool:
        return cell.label == "pp32"

    (launch,) = launches(llama_bench(), batched_bench(), wanted=wanted)
    assert [cell.label for cell in launch.cells] == ["pp32"]
    assert after(launch, "-p", "-n") == ("32", "0")


def test_cell_identity() -> None:
    def key(**changes: Any) -> str:
        return launches(llama_bench(**changes))[0].cells[0].key

    assert key() == key(n_prompt=(16, 64), n_gen=(8,))
    others = {"repetitions": 9}, {"args": ("--numa",)}, {"axes": {"n_ubatch": (1,)}}, {"n_prompt": (17,)}
    assert len({key(), *(key(**changes) for changes in others)}) == 5


def test_ten_thousand_cells() -> None:
    entry = llama_bench(n_prompt=tuple(range(1, 101)), n_gen=(0,), axes={"n_ubatch": tuple(range(1, 101))})
    assert len({cell.key for launch in launches(entry) for cell in launch.cells}) == 10_000


@pytest.mark.parametrize(
    ("tool", "args", "places"),
    [
        ("llama-bench", ["--prio", "2", "-v", "--numa", "isolate"], []),
        ("llama-bench", ["--ubatch-size", "5"], [0]),
        ("llama-bench", ["--ubatch_size", "5"], [0]),
        ("llama-bench", ["-ub=5"], [0]),
        ("llama-bench", ["-v", "-r", "5", "-o", "md"], [1, 3]),
        ("llama-bench", ["-npp", "5"], []),
        ("batched-bench", ["-pps", "-tgs", "--kv-unified"], []),
        ("batched-bench", ["-npp", "5", "--n_gpu_layers", "3"], [0, 2]),
        ("batched-bench", ["--model-url", "x", "--version"], [0, 2]),
        ("batched-bench", ["x-m"], []),
    ],
)
def test_refused_arguments(tool: str, args: list[str], places: list[int]) -> None:
    assert list(BENCHES[tool].refused(args)) == places
