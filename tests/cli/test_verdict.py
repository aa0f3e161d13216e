"""dgxlab verdict: chains of numbers in, one verdict a line out."""

import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from dgxlab import stats
from dgxlab.cli._app import Word

A = [100.1, 99.7, 100.4, 99.9, 100.2, 99.6, 100.3, 99.8, 100.0]
B = [103.1, 102.7, 103.5, 103.0, 102.8, 103.3, 102.6, 103.2]
FASTER = {"a": A, "b": B, "better": "higher"}
SAME = {"a": A, "b": A[1:], "better": "higher"}


@pytest.fixture
def judged(dgxlab: Any, tmp_path: Path) -> Any:
    """Write lines to a file and return what is printed of them, as JSON."""

    def run(*lines: object, args: tuple[object, ...] = ()) -> list[dict[str, Any]]:
        ran = dgxlab("verdict", write(tmp_path, *lines), "--format", "json", *args)
        assert (ran.rc, ran.err) == (0, "")
        return [json.loads(line) for line in ran.out.splitlines()]

    return run


def write(folder: Path, *lines: object) -> Path:
    file = folder / "chains.jsonl"
    file.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return file


def test_one_json_verdict_a_line(judged: Any) -> None:
    first, second = judged({**FASTER, "name": "pp512", "noise": 0.003}, {**FASTER, "better": "lower"})
    assert (first["verdict"], first["name"], first["line"], second["line"]) == ("faster", "pp512", 1, 2)
    assert first["effect_pct"] == pytest.approx(3.03, abs=0.01)
    low, high = first["ci_pct"]
    assert 2.4 < low < first["effect_pct"] < high < 3.6
    assert 0 < first["mde_pct"] < 1
    assert (first["valid_cycles"], first["cycles"], first["confidence"]) == (8, 8, 0.99)
    assert first["reasons"] == ["the 99 % interval lies above 0"]
    assert low < first["same_ci_pct"][0] < first["same_ci_pct"][1] < high
    assert first["noise_floor"] == stats.judge(stats.Chain(A, B)).noise
    assert tuple(Word) == stats.VERDICTS
    assert (first["promoted"], second["promoted"], first["screen"]) == (True, False, False)
    assert (second["verdict"], second["effect_pct"], second["name"]) == ("slower", first["effect_pct"], "line 2")


def test_lines_for_people(dgxlab: Any, tmp_path: Path) -> None:
    ran = dgxlab("verdict", write(tmp_path, {**FASTER, "name": "pp\x1b[31m512"}, "", "{}"))
    assert ran.out.splitlines() == [
        "pp512: faster, +3.03 % (99 %: +2.48 to +3.58 %), 8 of 8 cycles, "
        "smallest detectable effect 0.67 %; the 99 % interval lies above 0",
        "line 3: invalid; line 3: it lacks 'a'",
    ]
    assert (ran.rc, ran.err) == (0, "")


def test_a_file_without_chains_is_no_success_and_stdin_is_a_file(
    dgxlab: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran = dgxlab("verdict", write(tmp_path, "", " "))
    assert (ran.rc, ran.error) == (2, f"{tmp_path / 'chains.jsonl'} holds no chain")
    garbage = dgxlab("verdict", write(tmp_path, "", "garbage", "{}"), "--format", "json")
    why = "line 2: no JSON: Expecting value: line 1 column 1 (char 0)"
    assert (garbage.rc, garbage.out, garbage.error) == (2, "", f"{tmp_path / 'chains.jsonl'} holds no chain: {why}")
    missing = dgxlab("verdict", tmp_path / "none")
    assert (missing.rc, missing.next) == (2, f"ls -ld {tmp_path} {tmp_path / 'none'}")
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(json.dumps(FASTER).encode())))
    assert dgxlab("verdict", "-").out.startswith("line 1: faster, +3.03 %")


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("pp512 100 103", "no JSON: Expecting value"),
        ("\ufffd\x00", "no JSON: "),
        ("[" * 100_000, "maximum recursion depth"),
        ("[1, 2]", "no chain: a chain is "),
        ({"a": A, "better": "higher"}, "it lacks 'b'"),
        ({"a": A, "b": B}, "it lacks 'better'"),
        ({**FASTER, "bettr": 1}, "Line has no field 'bettr'"),
        ({**FASTER, "a": "100"}, "a: '100' is not a list"),
        ({**FASTER, "noise": True}, "noise: True is not "),
        ({**FASTER, "cycles": 8.0}, "cycles: 8.0 is not "),
        ({**FASTER, "flaws": {"three": "x"}}, "there is no cycle 'three'"),
        ({**FASTER, "flaws": {"9" * 5000: "x"}}, "there is no cycle '99999"),
        ('{"a": ' + "9" * 5000 + ', "b": [], "better": "lower"}', "no JSON: Exceeds the limit"),
    ],
)
def test_a_broken_line_is_invalid(judged: Any, line: object, reason: str) -> None:
    before, broken, after = judged(FASTER, line, FASTER)
    assert (before["verdict"], broken["verdict"], after["verdict"]) == ("faster", "invalid", "faster")
    assert broken["reasons"][0].startswith(f"line 2: {reason}")
    assert (broken["effect_pct"], broken["ci_pct"], broken["mde_pct"], broken["valid_cycles"]) == (None, None, None, 0)


def test_a_stored_chain_can_be_judged_again(judged: Any) -> None:
    longer = {**FASTER, "a": [*A, 100.2], "b": [*B, 103.0], "cycles": 8}
    result, with_halves = (judged({**longer, "name": "\ud800", "flaws": {"3": why}})[0] for why in ("GPU", "\udfff"))
    assert (result["verdict"], result["valid_cycles"], result["cycles"]) == ("faster", 8, 9)
    assert (result["flaws"], with_halves["flaws"], with_halves["name"]) == ({"3": "GPU"}, {"3": "?"}, "?")
    (cut,) = judged({**FASTER, "cycles": 10})
    assert "8 of 10 cycles" in cut["reasons"][0]


def test_drift_limit(judged: Any) -> None:
    stepped = {**FASTER, "a": [*A[:4], *(1.08 * value for value in A[4:])]}
    tight, own = judged(stepped, {**stepped, "drift_limit": 0.1}, args=("--drift-limit", "0.06"))
    assert [list(result["flaws"]) for result in (tight, own)] == [["4"], []]
    assert tight["flaws"]["4"].startswith("a step: ")


def test_same_shows_the_interval_that_decides(judged: Any, dgxlab: Any, tmp_path: Path) -> None:
    alone, together = (judged(*[SAME] * 3, args=args)[0] for args in ((), ("--holm",)))
    assert alone["verdict"] == together["verdict"] == "same"
    assert together["same_ci_pct"][0] < alone["same_ci_pct"][0] < alone["same_ci_pct"][1] < together["same_ci_pct"][1]
    low, high = (f"{bound:+.2f}" for bound in alone["same_ci_pct"])
    assert f", equivalence interval {low} to {high} %, 8 of 8 cycles" in dgxlab("verdict", write(tmp_path, SAME)).out


def test_lines_are_judged_alone_unless_they_are_one_session(judged: Any) -> None:
    alone, *_ = judged(FASTER, SAME, SAME, "nothing")
    together, *_ = judged(FASTER, SAME, SAME, "nothing", args=("--holm",))
    assert (alone["confidence"], together["confidence"]) == (0.99, pytest.approx(1 - 0.01 / 3))
    assert together["ci_pct"][0] < alone["ci_pct"][0]
    assert "corrected for 3 comparisons (Holm)" in together["reasons"]


def test_screen(judged: Any, dgxlab: Any, tmp_path: Path) -> None:
    bracket = {"a": [100, 101], "b": [105], "better": "higher"}
    bare, with_noise, few = judged(
        bracket, {**bracket, "noise": 0.01}, {**bracket, "noise": 0.0135, "noise_cycles": 8}, args=("--screen",)
    )
    assert (bare["verdict"], with_noise["verdict"], few["verdict"]) == ("invalid", "faster", "inconclusive")
    assert with_noise["screen"] is few["screen"] is bare["screen"] is True
    assert (with_noise["ci_pct"], with_noise["promoted"]) == (None, False)
    ran = dgxlab("verdict", write(tmp_path, bracket), "--screen", "--noise", "0.006")
    assert ran.out.startswith("line 1: faster (screen), +4.48 %; ")
    file = write(tmp_path, bracket)
    refused = dgxlab("verdict", file, "--screen", "--holm")
    assert (refused.rc, refused.next) == (2, f"dgxlab verdict {file} --screen")


def test_fail_on(dgxlab: Any, tmp_path: Path) -> None:
    file = write(tmp_path, FASTER, SAME, "nothing")
    assert dgxlab("verdict", file).rc == 0
    assert dgxlab("verdict", file, "--fail-on", "slower").rc == 0
    ran = dgxlab("verdict", file, "--fail-on", "slower", "--fail-on", "invalid")
    assert (ran.rc, ran.error.split(",")[0]) == (11, "1 chain of 3 is invalid")
    assert len(ran.out.splitlines()) == 3
    ran = dgxlab("verdict", file, "--fail-on", "same", "--fail-on", "faster")
    assert (ran.rc, ran.error[:13]) == (11, "2 chains of 3")
    assert dgxlab("verdict", file, "--fail-on", "worse").rc == 2
