"""What becomes of the times of a server's streams, and which are refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from dgxlab.errors import SpecError
from dgxlab.model import program_of
from dgxlab.tools.llama_server import ServeBench, parse, setup
from dgxlab.tools.streams import metrics, off, percentile, unfair
from tests.conftest import GOLDEN
from tests.tools.streams import ABOUT, STEP_US, output, stream

CAPTURED = GOLDEN / "cpu" / "llama-server.jsonl"
BENCH = ServeBench("m", (16,), (100,), (1, 4), repetitions=2)


def cells(bench: ServeBench = BENCH) -> Any:
    (launch,) = bench.launches({}, lambda model, cell: True)
    return launch.cells


def changed(change: Callable[[dict[str, Any]], object]) -> str:
    """Return the output with a change made to the row of four streams."""
    *lines, last = output((1, 4), 16, 100, 3).split("\n")
    row = json.loads(last)
    change(row)
    return "\n".join([*lines, json.dumps(row)])


def test_times_become_metrics() -> None:
    parsed = parse(output((1, 4), 16, 100, 3), cells())
    assert parsed.problems == ()
    values = {m.metric: (m.samples, m.discarded) for m in parsed.results[1].measurements}
    # four streams, a token each in 2 ms; the last begins 11 ms after the wave and takes 99 steps more
    assert values["speed_tg"] == (pytest.approx((2000.0, 2000.0)), pytest.approx((2000.0,)))
    assert values["speed_pp"][0] == pytest.approx([64 / 0.011] * 2)
    assert values["speed_out"][0] == pytest.approx([400 / 0.209] * 2)
    assert values["ttft_p50_ms"][0] == pytest.approx([8.0] * 2)
    assert values["ttft_p95_ms"][0] == pytest.approx([10.7] * 2)
    assert values["itl_p50_ms"][0] == values["itl_p99_ms"][0] == (2.0, 2.0)


def test_latencies_are_of_all_events_and_prompts_from_the_first_request() -> None:
    """Of two streams the second is sent 4 ms later; of their 198 distances 9 are of 10 ms."""
    wave = [stream(6000), stream(7000, sent_us=4010, at_us=[7000, *[2000] * 90, *[10_000] * 9])]
    values = metrics(wave, 16, 100)
    assert values["speed_pp"] == pytest.approx(32 / 0.011)
    assert (values["ttft_p50_ms"], values["itl_p50_ms"], values["itl_p99_ms"]) == (6.5, 2.0, 10.0)


def test_the_capture_of_a_real_server() -> None:
    """Both streams got a token a step, and the server's own clock agrees, on a machine that did much else."""
    bench = ServeBench("m", (16,), (96,), (2,), repetitions=2)
    parsed = parse(CAPTURED.read_text(), cells(bench))
    assert parsed.problems == ()
    values = {m.metric: m.samples for m in parsed.results[0].measurements}
    assert values["speed_tg"] == pytest.approx((133.87, 128.47), rel=1e-4)
    assert values["ttft_p50_ms"] == pytest.approx((37.094, 14.8505))
    assert parsed.results[0].raw["cpu"] == [0.0188, 0.006, 0.0048]
    assert parsed.results[0].raw["off"] == pytest.approx([0, 0, 0], abs=0.01)
    assert any(parsed.results[0].raw["off"])


def test_the_capture_of_a_real_vllm() -> None:
    bench = ServeBench(n_prompt=(32,), n_gen=(96,), streams=(1, 4), engine="vllm", command=("vllm",), repetitions=1)
    parsed = parse((GOLDEN / "cpu" / "vllm.jsonl").read_text(), cells(bench))
    assert parsed.problems == ()
    values = [{m.metric: m.samples for m in result.measurements} for result in parsed.results]
    assert [each["speed_tg"] for each in values] == [pytest.approx((value,), rel=1e-4) for value in (263.23, 1139.34)]
    assert parsed.results[0].raw["server"]["version"] == "0.32.0"


def test_the_steady_window_leaves_out_what_one_stream_does_alone() -> None:
    """Before the last stream begins, and after the first has ended, the others are three times as fast."""
    fast = [5000, *[500] * 20, *[1500] * 79]
    late = [5000 + 500 * 20, *[1500] * 79, *[500] * 20]
    wave = [stream(0, at_us=fast), stream(0, at_us=late)]
    assert metrics(wave, 16, 100)["speed_tg"] == pytest.approx(2 / 0.0015)


def test_a_stream_that_waits_for_the_prompts_of_others_is_not_slow() -> None:
    """The first of two streams gets tokens slowly until the other's prompt is computed."""
    early = [5000, *[20_000] * 20, *[STEP_US] * 79]
    wave = [stream(0, at_us=early), stream(0, at_us=[405_000, *[STEP_US] * 99])]
    for each in wave:
        each["end"]["ms"] = sum(each["at_us"][1:]) / 1e3
    assert list(unfair(wave)) == []


def test_many_streams_are_judged_quickly() -> None:
    wave = [stream(5000, tg=256) for _ in range(1024)]
    assert list(unfair(wave)) == []
    assert metrics(wave, 16, 256)["speed_tg"] == pytest.approx(512_000)


def test_events_of_several_tokens_count_as_such() -> None:
    pairs = stream(0, at_us=[5000, *[4000] * 50], tokens=[*[2] * 49, 1, 1])
    assert metrics([pairs], 16, 100)["speed_tg"] == pytest.approx(98 / 0.2)
    pairs["end"]["ms"] = 202.0  # the server counts from its first token, a step before the first event
    assert off([pairs]) == pytest.approx(0, abs=0.001)


def test_tokens_of_an_accepted_draft_arrive_together() -> None:
    steps = [5000, *[16_000, *[0] * 7] * 12, 16_000, 0, 0]
    drafts = stream(0, at_us=steps, end={**stream(0)["end"], "ms": sum(steps[1:]) / 1e3, "accepted": 86})
    assert list(unfair([drafts])) == []
    assert metrics([drafts], 16, 100)["itl_p50_ms"] == 16.0
    drafts["end"]["accepted"] = 0
    (problem,) = unfair([drafts])
    assert "something between server and client collects" in problem


def test_a_first_wave_that_arrived_in_bunches_counts_for_nothing() -> None:
    def bunch(row: dict[str, Any]) -> None:
        for each in row["waves"][0]["streams"]:
            each["at_us"] = [each["at_us"][0], *[8000, 0, 0] * 33]

    measured = {each.metric: each for each in parse(changed(bunch), cells()).results[1].measurements}
    assert (len(measured["itl_p50_ms"].discarded), len(measured["itl_p50_ms"].samples)) == (0, 2)
    assert len(measured["itl_p99_ms"].discarded) == 1


def test_an_accepted_draft_is_within_the_steady_window_or_not_at_all() -> None:
    """A step of 16 ms is of 8 tokens; all generate since 10 us after the first stream's first token."""
    answers = [stream(first, at_us=[first, *[15_860, *[20] * 7] * 13], tokens=[1] * 105) for first in (5000, 5010)]
    for each in answers:
        each["end"] |= {"ms": 208.0, "accepted": 91}
    assert metrics(answers, 16, 105)["speed_tg"] == pytest.approx(2 * 8 / 0.016)
    assert list(unfair(answers)) == []


def test_an_accepted_draft_is_known_beside_slow_steps_for_the_prompts_of_others() -> None:
    """Eight streams begin one after the other, 0.5 s apart; then a step of 10 ms gives each 4 tokens."""
    step = [9940, 20, 20, 20]
    answers = [stream(0, at_us=[5000, 20, 20, 20, *[499_940, 20, 20, 20] * 7, *step * 24], tokens=[1] * 128)]
    answers += [stream(0, at_us=[5000 + 500_000 * 7, 20, 20, 20, *step * 31], tokens=[1] * 128) for _ in range(7)]
    for each in answers:
        each["end"] |= {"accepted": 96}
    assert metrics(answers, 16, 128)["speed_tg"] == pytest.approx(8 * 4 / 0.010)


def test_a_row_gives_its_numbers_again() -> None:
    parsed = parse(output((1, 4), 16, 100, 3), cells())
    for cell, result in zip(cells(), parsed.results, strict=True):
        (again,) = parse(json.dumps(result.raw), [cell]).results
        assert again == result


def arrived(**changes: Any) -> list[dict[str, Any]]:
    """Return the streams of a wave of four requests, of which the last waits for a slot, and is slower."""
    due = [10_000, 20_000, 45_000, 60_000]
    waits, steps = [5000, 6000, 7000, 90_000], [2000, 2000, 2000, 3000]
    return [
        stream(wait, step_us=step, sent_us=at, behind_us=80, **changes)
        for at, wait, step in zip(due, waits, steps, strict=True)
    ]


OPEN = ServeBench("m", (16,), (100,), rates=(25.0,), requests=4, repetitions=2, axes={"n_parallel": (4,)})


def arrivals_output(streams: list[dict[str, Any]]) -> str:
    row = {"pp": 16, "tg": 100, "rate": 25.0, "waves": [{"cpu": 0.05, "late_us": 90, "streams": streams}] * 3}
    return "\n".join(map(json.dumps, [{"server": ABOUT}, row]))


def test_times_of_requests_that_arrive() -> None:
    (cell,) = cells(OPEN)
    assert (cell.label, cell.params) == ("pp16 tg100 25/s", {"pp": 16, "tg": 100, "rate": 25.0})
    parsed = parse(arrivals_output(arrived()), [cell])
    assert parsed.problems == ()
    values = {m.metric: m.samples[0] for m in parsed.results[0].measurements}
    # from the first request to the last token: 10 ms to 60 + 90 + 99 * 3 ms
    assert values.pop("speed_out") == pytest.approx(400 / 0.437)
    assert values == {
        "ttft_p50_ms": 6.5,
        "ttft_p95_ms": pytest.approx(77.55),
        "itl_p50_ms": 2.0,
        "itl_p99_ms": 3.0,
    }
    (again,) = parse(json.dumps(parsed.results[0].raw), [cell]).results
    assert again == parsed.results[0]


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda each: each.update(behind_us=700), "the client sent requests 0.7 ms late (p95)"),
        (lambda each: each.update(status=500), "stream 0: HTTP 500"),
        (lambda each: each["end"].update(ms=150.0), "% off the speed that the server reports"),
    ],
)
def test_times_of_requests_that_say_nothing_are_refused(change: Callable[[Any], object], told: str) -> None:
    streams = arrived()
    for each in streams:
        change(each)
    (problem,) = parse(arrivals_output(streams), cells(OPEN)).problems
    assert told in problem


def test_a_launch_knows_its_rates() -> None:
    (launch,) = OPEN.launches({}, lambda model, cell: True)
    asked = json.loads(launch.argv[4])
    assert (asked["rate"], asked["requests"], "pl" in asked) == ([25.0], 4, False)
    assert launch.argv[launch.argv.index("-np") + 1] == "4"


def first(row: dict[str, Any]) -> dict[str, Any]:
    return row["waves"][1]["streams"][2]


END = stream(0)["end"]


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda row: first(row).update(status=500, problem="busy"), "stream 2: HTTP 500: busy"),
        (lambda row: first(row).update(status=0, problem=""), "HTTP without a status"),
        (lambda row: first(row).update(problem="an unexpected event: {"), "stream 2: an unexpected event: {"),
        (lambda row: first(row).update(stalled=True), "stream 2 stalled after 100 tokens"),
        (lambda row: first(row).update(end={"stop": None}), "stream 2 was cut after 100 of 100 tokens"),
        (
            lambda row: first(row).update(tokens=[1] * 90, end={**END, "stop": "eos"}),
            "got 90 tokens, not 100: it was stopped by eos",
        ),
        (lambda row: first(row).update(tokens=[*[1] * 99, 2]), "got 101 tokens, not 100"),
        (
            lambda row: first(row).update(end={**END, "cached": 15, "prompt": 1}),
            "1 tokens of its prompt were computed and 15",
        ),
        (lambda row: first(row).update(end={**END, "prompt": 15}), "15 tokens of its prompt were computed and 0"),
        (lambda row: first(row)["at_us"].__setitem__(0, 90_000), "no steady window: stream 0 got 56 tokens"),
        (lambda row: first(row).update(at_us=[9000, *[2400] * 99]), "stream 2 got 416.7 t/s, the median stream 500"),
        (lambda row: row["waves"][1].update(cpu=0.81), "the client used 0.81 of a processor"),
        (lambda row: row["waves"].pop(), "it has 1 waves that count, not 2"),
        (lambda row: row.update(pl=5), "it has no row"),
        (lambda row: row.update(waves=[{}]), "its times are broken"),
    ],
)
def test_times_that_say_nothing_of_the_server_are_refused(change: Callable[[Any], object], told: str) -> None:
    parsed = parse(changed(change), cells())
    assert [result.raw["pl"] for result in parsed.results] == [1]
    (problem,) = parsed.problems
    assert problem.startswith("pp16 tg100 B4: ")
    assert told in problem


def every(change: Callable[[dict[str, Any]], None]) -> Callable[[Any], None]:
    def of_wave(row: Any) -> None:
        for each in row["waves"][2]["streams"]:
            change(each)

    return of_wave


def test_streams_in_other_slots_than_asked_for_are_refused() -> None:
    row = changed(lambda row: [each["end"].update(slot=7) for each in row["waves"][2]["streams"]])
    (problem,) = parse(row, cells()).problems
    assert "the server did not decode the streams in slots 0 to B-1" in problem


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (
            lambda each: each.update(at_us=[each["at_us"][0] + 14_000, *[16_000, *[0] * 7] * 13][:100]),
            "87% of the events",
        ),
        (lambda each: each.update(at_us=[each["at_us"][0] + 198_000, *[0] * 99]), "100% of the events"),
        (
            lambda each: each["end"].update(ms=190.0),
            "the speed by the client's clock is -4.0 % off the speed that the server reports",
        ),
        (lambda each: each["end"].update(ms=204.0), "clock is +3.0 % off"),
    ],
)
def test_times_that_a_proxy_changed_are_refused(change: Callable[[dict[str, Any]], None], told: str) -> None:
    (problem,) = parse(changed(every(change)), cells()).problems
    assert told in problem


def test_a_wave_that_warms_up_must_be_whole_and_no_more() -> None:
    early = [lambda wave: wave.update(cpu=0.9), lambda wave: [e["end"].update(ms=190.0) for e in wave["streams"]]]
    for change in early:
        assert parse(changed(lambda row, change=change: change(row["waves"][0])), cells()).problems == ()  # type: ignore[misc]
    parsed = parse(changed(lambda row: row["waves"][0]["streams"][0]["at_us"].__setitem__(0, 90_000)), cells())
    assert {(len(m.samples), m.discarded) for m in parsed.results[1].measurements} == {(2, ())}
    (again,) = parse(json.dumps(parsed.results[1].raw), cells()[1:]).results
    assert again == parsed.results[1]
    (problem,) = parse(changed(lambda row: row["waves"][0]["streams"][0].update(status=500)), cells()).problems
    assert "HTTP 500" in problem


@pytest.mark.parametrize("about", [{**ABOUT, "slots": 3}, {**ABOUT, "n_ctx": 115}, {}])
def test_a_server_with_too_little_room_is_refused(about: dict[str, Any]) -> None:
    parsed = parse(output((1, 4), 16, 100, 3, about=about), cells())
    assert any("B4: " in problem for problem in parsed.problems)
    assert len(parsed.results) == (0 if about.get("n_ctx") != 256 else 1)


def test_a_context_of_just_the_tokens_is_enough() -> None:
    about = {**ABOUT, "slots": None, "n_ctx": 116}  # as vLLM with --max-model-len
    assert parse(output((1, 4), 16, 100, 3, about=about), cells()).problems == ()


def test_what_ended_the_output_is_told_alone() -> None:
    text = "\n".join(
        [*output((1, 4), 16, 100, 3).split("\n")[:-1], json.dumps({"problem": "the server ended by SIGKILL"})]
    )
    parsed = parse(text, cells())
    assert parsed.problems == ("the server ended by SIGKILL",)
    assert len(parsed.results) == 1


@pytest.mark.parametrize(("share", "value"), [(0, 1.0), (50, 2.5), (95, 3.85), (100, 4.0)])
def test_percentiles_are_those_of_numpy(share: float, value: float) -> None:
    assert percentile([4.0, 1.0, 3.0, 2.0], share) == pytest.approx(value)


def test_one_server_has_room_for_all_streams() -> None:
    (launch,) = BENCH.launches({}, lambda model, cell: cell.params["pl"] == 4)
    python, agent, drive, program, settings, *argv = launch.argv
    assert (python, agent, drive, program) == ("{python}", "{agent}", "drive", "llama-server")
    assert program_of(launch.argv) == "{bin}/llama-server"
    asked = {"engine": "llama-server", "pl": [4], "pp": 16, "tg": 100, "waves": 3, "ready_s": 300.0, "stall_s": 60.0}
    assert json.loads(settings) == asked
    assert argv[:3] == ["{bin}/llama-server", "-m", "{model:m}"]
    flags = dict(zip(argv[1::2], argv[2::2], strict=True))
    assert (flags["-np"], flags["-c"], flags["--port"], flags["--cache-ram"]) == ("4", "1024", "0", "0")


@pytest.mark.parametrize(
    ("axes", "told"),
    [({"n_parallel": (3,)}, "4 streams do not fit into n_parallel 3"), ({"n_ctx": (1023,)}, "need 1024")],
)
def test_too_little_room_is_refused_before_a_job(axes: dict[str, Any], told: str) -> None:
    with pytest.raises(SpecError, match=told):
        list(ServeBench("m", (16,), (100,), (1, 4), axes=axes).launches({}, lambda model, cell: True))


@pytest.mark.parametrize(("n_gen", "context"), [(240, 256), (241, 512)])
def test_a_slot_has_room_for_prompt_and_answer_and_no_more(n_gen: int, context: int) -> None:
    (launch,) = ServeBench("m", (16,), (n_gen,), (4,)).launches({}, lambda model, cell: True)
    assert launch.argv[launch.argv.index("-c") + 1] == str(4 * context)
    assert setup(launch.cells[0], "Q4_0", {}, {})["context"] == str(context)


def test_vllm_is_started_by_its_own_command() -> None:
    bench = ServeBench(n_prompt=(16,), n_gen=(100,), streams=(4,), engine="vllm", command=("vllm", "serve", "/m/x"))
    (launch,) = bench.launches({}, lambda model, cell: True)
    own = ("--no-enable-prefix-caching", "--enable-prompt-tokens-details", "--host", "127.0.0.1", "--port", "0")
    assert launch.argv[5:] == ("vllm", "serve", "/m/x", *own)
    assert json.loads(launch.argv[4])["engine"] == "vllm"
    assert program_of(launch.argv) == "vllm"
    (cell,) = launch.cells
    assert cell.key not in {other.key for other in cells()}


def test_a_server_that_does_not_tell_its_own_time_is_believed() -> None:
    about = {"model": "/m/x", "slots": None, "n_ctx": None, "version": "0.12"}
    text = output((1, 4), 16, 100, 3, about=about).replace('"cached": 0, "ms": 198.0', '"cached": null, "ms": null')
    parsed = parse(text, cells())
    assert parsed.problems == ()
    assert parsed.results[0].raw["server"] == about
    assert parsed.results[0].raw["off"] == [None] * 3


def test_each_setting_is_a_launch() -> None:
    bench = ServeBench("m", (16, 32), (100,), (1, 4), axes={"n_ubatch": (512, 2048)}, exclude=({"streams": 4},))
    labels = [cell.label for launch in bench.launches({}, lambda model, cell: True) for cell in launch.cells]
    assert labels == [f"pp{pp} tg100 B1 n_ubatch={n}" for pp in (16, 32) for n in (512, 2048)]


def test_flags_that_would_reach_another_server_are_refused() -> None:
    refused = ServeBench.refused(["--port", "8080", "--cache_ram", "64", "--backend-sampling", "-np=4"])
    assert list(refused) == [0, 2, 5]
