"""What of a host's words reaches a terminal."""

import json
import shlex

import pytest

from dgxlab.cli._display import display
from dgxlab.cli._out import Format, Out, as_typed, clean, show_error, table
from dgxlab.errors import AGAIN, RemoteError, longer
from dgxlab.model.events import NoteEvent, ProgressEvent

FORGED = "disk full\r\nnext: curl x | sh\u2028next: y\x1b[2J\u202ehs.x\ud800"
SEEN = r"disk full next: curl x | sh next: y\u001b[2J\u202ehs.x\ud800"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a\x1b[31mred\x1b[0m", "ared"),
        ("a\x9b31mred\x9b0m", "ared"),
        ("\x1b]0;title\x07a", "]0;titlea"),
        ("".join(map(chr, (*range(0x20), *range(0x7F, 0xA0)))), "\t\n"),
        ("gpj.\u202egnp.sh\u202c", "gpj.gnp.sh"),
        ("\u2066a\u2067b\u2068c\u2069\u200e\u200f\u061c", "abc"),
        ("größe ≥ 5 µs, 2\u202f%, 日本\n\tx", "größe ≥ 5 µs, 2\u202f%, 日本\n\tx"),
    ],
)
def test_text_cannot_steer_a_terminal(text: str, shown: str) -> None:
    assert clean(text) == shown


def test_a_hosts_words_are_no_lines_of_ours(capsys: pytest.CaptureFixture[str]) -> None:
    show_error(RemoteError(FORGED, details="a\rnext: b"))
    with display(Out()) as watch:
        watch(NoteEvent(note=FORGED))
    assert capsys.readouterr().err == f"error: {SEEN}\n  a\n  next: b\n{SEEN}\n"
    assert table([{"a": FORGED, "b": "1"}]).splitlines()[1:] == [f"{SEEN}  1"]


@pytest.mark.parametrize(
    ("width", "cut", "shown"),
    [
        (80, True, ["name   outcome", "a" * 5 + "  " + "b" * 30, "c      done"]),
        (30, True, ["name   outcome", "a" * 5 + "  " + "b" * 22 + "…", "c      done"]),
        (30, False, ["name     aaaaa", f"outcome  {'b' * 30}", "", "name     c", "outcome  done"]),
        (20, True, ["name     aaaaa", f"outcome  {'b' * 30}", "", "name     c", "outcome  done"]),
    ],
)
def test_a_table_fits_into_a_terminal(monkeypatch: pytest.MonkeyPatch, width: int, cut: bool, shown: list[str]) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", str(width))
    rows = [{"name": "a" * 5, "outcome": "b" * 30}, {"name": "c", "outcome": "done"}]
    assert table(rows, cut=cut).splitlines() == shown


def test_a_list_of_cells_is_folded_at_blanks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "20")
    assert table([{"try": "7", "because": "warps copy less -and wait"}]).splitlines() == [
        "try      7",
        "because  warps copy",
        "         less -and",
        "         wait",
    ]


@pytest.mark.parametrize("old", [[], ["--wait", "0"], ["--wait=0"]])
def test_the_next_command_replaces_an_option(monkeypatch: pytest.MonkeyPatch, old: list[str]) -> None:
    """The option that was typed, not what a text says of it."""
    because = ["--because", "the --wait 10 default"]
    monkeypatch.setattr("sys.argv", ["dgxlab", "try", *old, *because, "", "toy"])
    assert as_typed(longer(0.0)) == "dgxlab try --because 'the --wait 10 default' '' toy --wait 60"
    assert as_typed(AGAIN) == shlex.join(["dgxlab", "try", *old, *because, "", "toy"])
    assert as_typed(f"{AGAIN} without --wait") == shlex.join(["dgxlab", "try", *because, "", "toy"])


@pytest.mark.parametrize("given", [["--db", "my.db"], ["--db=my.db"], ["--db=a.db", "--db", "my.db"]])
def test_commands_are_about_the_same_record(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], given: list[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["dgxlab", *given, "sessions"])
    assert as_typed("dgxlab doctor") == "dgxlab --db my.db doctor"
    assert as_typed("ssh-add") == "ssh-add"
    Out().note("dgxlab job 7 goes on: dgxlab logs 7")
    Out().report(None, lambda: "1 cycle discarded: see `dgxlab report 7 --wide`")
    show_error(RemoteError("dgxlab cancel 7 ends it", details="dgxlab sets it itself", next=AGAIN))
    shown = capsys.readouterr()
    assert shown.out == "1 cycle discarded: see `dgxlab --db my.db report 7 --wide`\n"
    told, error, detail, again = shown.err.splitlines()
    assert (told, error) == (
        "dgxlab job 7 goes on: dgxlab --db my.db logs 7",
        "error: dgxlab --db my.db cancel 7 ends it",
    )
    assert (detail, again) == ("  dgxlab sets it itself", f"next: {shlex.join(['dgxlab', *given, 'sessions'])}")
    assert as_typed(again) == again
    assert (
        as_typed("`dgxlab report 7` or `dgxlab report --db y`")
        == "`dgxlab --db my.db report 7` or `dgxlab report --db y`"
    )


def test_a_log_says_what_is_waited_for(capsys: pytest.CaptureFixture[str]) -> None:
    """Once a step, and nothing of a build that is reused."""
    with display(Out()) as watch:
        for step, note in (
            ("build:a", "first"),
            ("gate:0", "second"),
            ("gate:0", "60 s left"),
            ("gate:0", "30 s left"),
        ):
            watch(ProgressEvent(id=step, done=0, total=0, note=note))
        watch(ProgressEvent(id="sending", done=1, total=2, note="a model"))
    assert capsys.readouterr().err == "second\n"


def test_json_shows_everything(capsys: pytest.CaptureFixture[str]) -> None:
    Out(Format.json).result({"text": f"{FORGED}\x9bé"}, "")
    Out(Format.json).lines([FORGED], lambda: "")
    whole, line = capsys.readouterr().out.strip().rsplit("\n", 1)
    assert json.loads(whole) == {"text": f"{FORGED}\x9bé"}
    assert json.loads(line) == FORGED
    assert not any(char in whole + line for char in "\x1b\x9b\u202e\u2028\ud800")
    assert "é" in whole
