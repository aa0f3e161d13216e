"""Damaged output: what is still read was printed so, else it is refused. `faults.kinds.fuzz` damages it at random."""

from functools import cache
from pathlib import Path

import pytest

from dgxlab.errors import SpecError
from dgxlab.imported import open_file
from dgxlab.tools.reading import Values

GOLDEN = Path(__file__).parents[1] / "golden"

CAPTURES = (
    "h200/tbo-perf-gdn.txt",
    "h200/tbo-perf-mmid.txt",
    "h200/tbo-perf-mul_mat.sql",
    "h200/tbo-test-SSM_CONV.txt",
    "h200/llama-bench-q4_k.json",
    "h200/llama-bench-q4_k.jsonl",
    "h200/llama-bench-q4_k.sql",
    "h200/llama-bench-q4_k.csv",
    "h200/llama-bench-q4_k.md",
    "h200/batched-bench-q4_k.txt",
    "h200/batched-bench-q4_k.jsonl",
    "cpu/perplexity.txt",
    "cpu/perplexity-kld.txt",
)


@cache
def truth(name: str) -> tuple[bytes, frozenset[tuple[Values, ...]]]:
    imported = open_file(GOLDEN / name)
    return imported.content, frozenset(row.values for row in imported.reading.rows)


def invented(path: Path, content: bytes, rows: frozenset[tuple[Values, ...]]) -> list[tuple[Values, ...]]:
    path.write_bytes(content)
    try:
        read = open_file(path).reading.rows
    except SpecError:
        return []
    return [row.values for row in read if not any(set(row.values) <= set(printed) for printed in rows)]


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("damaged") / "output"


@pytest.mark.parametrize("name", CAPTURES)
def test_cut_off_anywhere(file: Path, name: str) -> None:
    content, rows = truth(name)
    for end in range(0, len(content), max(1, len(content) // 400)):
        assert invented(file, content[:end], rows) == [], end


@pytest.mark.parametrize(
    "word", [b"nan", b"-nan", b"inf", b"NaN", b"Infinity", b"-1.00", b"0x10", b"1e999", b"1,5", b""]
)
@pytest.mark.parametrize(
    ("name", "number"),
    [
        ("h200/tbo-perf-gdn.txt", b"2.30"),
        ("h200/tbo-perf-mmid.txt", b"6.98"),
        ("h200/tbo-perf-mmid.txt", b"3.61"),
        ("h200/tbo-perf-mul_mat.sql", b"14.388455"),
        ("h200/llama-bench-q4_k.json", b"36377.077234"),
        ("h200/llama-bench-q4_k.json", b"15924028"),
        ("h200/llama-bench-q4_k.jsonl", b"36503.901762"),
        ("h200/llama-bench-q4_k.sql", b"36545.801745"),
        ("h200/llama-bench-q4_k.csv", b"36390.094684"),
        ("h200/llama-bench-q4_k.md", b"36563.16"),
        ("h200/batched-bench-q4_k.txt", b"1875.07"),
        ("h200/batched-bench-q4_k.jsonl", b"1796.087769"),
        ("cpu/perplexity.txt", b"652167.4787 +/-"),
        ("cpu/perplexity-kld.txt", b"0.159924"),
    ],
)
def test_what_is_no_number_is_refused(file: Path, name: str, number: bytes, word: bytes) -> None:
    content, _ = truth(name)
    file.write_bytes(content.replace(number, word, 1))
    line = content[: content.index(number)].count(b"\n") + 1
    with pytest.raises(SpecError, match=r", line \d+: ") as caught:
        open_file(file)
    assert f", line {line}: " in caught.value.message or name.endswith(".json")


@pytest.mark.parametrize(
    ("name", "number", "another", "sentence"),
    [
        ("h200/tbo-perf-mmid.txt", b" 6.98 us", b"16.98 us", "are not"),
        ("h200/tbo-perf-mul_mat.sql", b"14.388455", b"14.388465", "not the 117440512 of its shape"),
        ("h200/tbo-perf-mul_mat.sql", b"8162135152842.867188", b"8162145152842.867188", "not the 117440512 of its"),
        ("cpu/tbo-perf-soft_max.sql", b"5.908684", b"5.608684", "KiB, less than the 655360 it says"),
        ("h200/llama-bench-q4_k.json", b"36377.077234", b"36477.077234", "its tokens and time give"),
        ("h200/batched-bench-q4_k.txt", b"34174.34", b"43174.34", "1024 tokens took 0.03 s"),
        ("h200/batched-bench-q4_k.jsonl", b'"t_pp": 0.028893', b'"t_pp": 0.082893', "its tokens and time give"),
        ("h200/tbo-perf-mul_mat.sql", b"m=4096", b"m=" + b"9" * 400, "not the inf of its shape"),
        ("h200/tbo-perf-mul_mat.sql", b"k=14336", b"k=" + b"9" * 5000, "not the inf of its shape"),
        ("cpu/perplexity.txt", b"68426.30882", b"68426.30882.00.002 I next", "the final estimate cannot be read"),
        ("h200/tbo-perf-mmid.txt", b" 6.98 us/run", b" 6.98", "cannot be read"),
    ],
)
def test_a_row_that_contradicts_itself_is_refused(
    file: Path, name: str, number: bytes, another: bytes, sentence: str
) -> None:
    content, _ = truth(name)
    assert number in content
    file.write_bytes(content.replace(number, another, 1))
    with pytest.raises(SpecError, match=sentence):
        open_file(file)


def test_a_crash_in_a_case_is_refused_where_more_follows(file: Path) -> None:
    content, _ = truth("h200/tbo-perf-mmid.txt")
    lines = [line for line in content.split(b"\n") if b"6.98 us/run" not in line]
    file.write_bytes(b"\n".join(lines))
    with pytest.raises(SpecError, match=r"line \d+: the case MUL_MAT_ID\(.*\) has no result"):
        open_file(file)
