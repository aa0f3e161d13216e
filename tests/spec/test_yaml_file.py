"""The strict loader: what YAML may hold, and what is refused by name."""

import os
import time
from itertools import pairwise
from pathlib import Path

import pytest

from dgxlab.errors import SpecError
from dgxlab.spec import load
from dgxlab.spec.nodes import plain
from dgxlab.spec.yaml_file import MAX_BYTES, read_file
from tests.spec.specs import BASE, refusal, write

pytestmark = pytest.mark.usefixtures("parser")

BOOLEAN = "is a boolean to YAML 1.1: write true or false, or quote it"
UNITS = [
    *(
        (word, BOOLEAN)
        for word in ["on", "On", "ON", "off", "Off", "OFF", "yes", "Yes", "YES", "no", "No", "NO", "y", "Y", "n", "N"]
    ),
    *((word, "in lower case") for word in ["True", "TRUE", "False", "FALSE", "tRuE", "Null", "NULL"]),
    *((word, "octal") for word in ["0123456", "00", "09", "-07", "+01", "0_1"]),
    *((word, "base-60") for word in ["12:34", "12:34:56", "1:1", "-3:20", "190:20:30.15"]),
    *((word, "in another base") for word in ["0x1F", "0o17", "0b101", "-0xff"]),
    *((word, "underscores") for word in ["1_000", "4_0", "1_000.5"]),
    *((word, "timestamp") for word in ["2026-01-01", "2026-1-1", "2026-01-01T10:00:00Z", "2026-01-01 10:00:00"]),
    *((word, "finite") for word in [".nan", ".NaN", ".inf", "-.inf", "+.Inf", ".INF"]),
    *((word, "too large") for word in ["1e999", "-1e999", "9" * 19, "1" * 5000, "1234567890" * 4]),
    ("=", "special value"),
]


def value_of(text: str) -> object:
    tree = plain(read_file(write(f"a: {text}\n"), "x.yaml"))
    return tree["a"]


@pytest.mark.parametrize(("word", "why"), UNITS, ids=[word[:30] for word, _ in UNITS])
def test_a_surprising_scalar_is_refused(word: str, why: str) -> None:
    """What YAML 1.1 turns into another value is an error that names line, key and cure; in quotes it is text."""
    error = refusal(f"# comment\nname: x\nhypothesis: {word}\n")
    assert error.message.startswith("x.yaml:3: hypothesis: ")
    assert why in error.message
    assert error.exit_code == 9
    assert value_of(f"'{word}'") == value_of(f'"{word}"') == word


@pytest.mark.parametrize(
    ("text", "value"),
    [
        *(("true", True), ("false", False), ("null", None), ("~", None), ("", None)),
        *(("0", 0), ("-12", -12), ("+5", 5), (str(2**63 - 1), 2**63 - 1)),
        *(("1e3", 1000.0), ("1.5", 1.5), (".5", 0.5), ("2.", 2.0), ("6.02E-23", 6.02e-23)),
        *((text, text) for text in ("q4_0", "1103/1103", "12:99", "nan", "~/models/a b.gguf", "a1e5")),
        ("[1, [2, {b: c}], {}]", [1, [2, {"b": "c"}], {}]),
        ('"a\\tb\\u00e9"', "a\tbé"),
        ("|\n  two\n  lines", "two\nlines\n"),
        (">\n  one\n  line", "one line\n"),
        ("'it''s'", "it's"),
    ],
)
def test_plain_values(text: str, value: object) -> None:
    result = value_of(text)
    assert result == value
    assert type(result) is type(value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\nb: 2\na: 3\n", "x.yaml:3: a: duplicate key; it is already at line 1"),
        ("m:\n  b: 1\n  'b': 2\n", "x.yaml:3: m.b: duplicate key; it is already at line 2"),
        ("l:\n- {k: 1,\n   k: 2}\n", "x.yaml:3: l[0].k: duplicate key; it is already at line 2"),
        ("a: &x [1]\nb: *x\n", "x.yaml:1: a: anchor &x: leave it out; anchors are refused"),
        ("a: &x 1\n", "x.yaml:1: a: anchor &x: leave it out; anchors are refused"),
        ("a:\n  <<: {b: 1}\n", "x.yaml:2: a.<<: merge keys are refused: use extends, or write the entries out"),
        ("a: !!python/object:os.system x\n", "x.yaml:1: a: tag tag:yaml.org,2002:python/object:os.system: leave"),
        ("a: ! x\n", "x.yaml:1: a: tag !: leave it out"),
        ("a: [1, !x {b: 1}]\n", "x.yaml:1: a[1]: tag !x: leave it out"),
        ("a: 1\n---\nb: 1\n", "x.yaml:2: a second document starts here: one file holds one"),
        ("%YAML 1.1\n---\na: 1\n", "directives are refused"),
        ("1: x\n", 'x.yaml:1: 1: keys must be text: quote it: "1"'),
        ("a: {null: x}\n", 'x.yaml:1: a.null: keys must be text: quote it: "null"'),
        ("?\n: x\n", "keys must be text"),
        ("on: x\n", f"x.yaml:1: on: as a key, on {BOOLEAN}"),
        ("[a]: x\n", "x.yaml:1: a list or map is a key here: keys must be text"),
        ("b: {? {a: 1} : x}\n", "a list or map is a key here"),
        ('a: "\\0"\n', "x.yaml:1: a: holds a control character, U+0000"),
        ('a: "\\x1b[31m"\n', "x.yaml:1: a: holds a control character, U+001B"),
        ('"a\\0": 1\n', "as a key, holds a control character, U+0000"),
        ("a: 1\nb: \x00\n", "x.yaml:2: holds a character that is not allowed, U+0000"),
        ("a: x\x85b: 1\n", "holds a character that is not allowed, U+0085"),
        ("a: x\u2028b: 1\n", "holds a character that is not allowed, U+2028"),
        ("a: [1\nb: 2\n", "is not YAML: "),
        ("a: 1\n\tb: 2\n", "is not YAML: "),
        ("a: b: c\n", "x.yaml:1: is not YAML: mapping values are not allowed"),
        ('a: "\\uD800"\n', "x.yaml:1: "),
        ('a: "\\UFFFFFFFF"\n', "is not YAML: "),
        ("a: *nope\n", "x.yaml:1: a: alias *nope: write the value out; aliases are refused"),
        ("", "x.yaml:1: is empty"),
        ("# nothing\n", "x.yaml:1: is empty"),
        ("- a\n", "x.yaml:1: must hold a map of keys, not a list"),
        ("hello\n", "x.yaml:1: must hold a map of keys, not 'hello'"),
        ("~\n", "x.yaml:1: must hold a map of keys, not nothing"),
    ],
)
def test_what_yaml_may_not_hold(text: str, message: str) -> None:
    assert message in refusal(text).message


def test_all_surprises_of_a_file_are_listed() -> None:
    error = refusal("a: on\nb:\n  - 012\n  - x\n  - no\na: 2\n")
    assert error.message == f"x.yaml:1: a: on {BOOLEAN}"
    assert error.details.splitlines() == [
        error.message,
        "x.yaml:3: b[0]: 012 is an octal number to YAML 1.1: drop the leading zero, or quote it",
        f"x.yaml:5: b[2]: no {BOOLEAN}",
        "x.yaml:6: a: duplicate key; it is already at line 1",
    ]


def test_a_column_may_be_called_n() -> None:
    """`n` is a parameter of MUL_MAT and stays a key, though as a value it must be quoted."""
    assert value_of("{n: 1, y: 2}") == {"n": 1, "y": 2}


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("alias bomb", "a: &a [x,x]\n" + "".join(f"{c}: &{c} [*{p},*{p}]\n" for p, c in pairwise("abcdefghi"))),
        ("brackets", "[" * 3000),
        ("brackets, closed", "[" * 3000 + "]" * 3000),
        ("maps", "{a: " * 3000),
        ("block lists", "- " * 3000),
        ("block maps", "".join(" " * i + "a:\n" for i in range(500))),
        ("keys of keys", "? " * 3000),
        ("a megabyte of brackets", "[" * 999_000),
    ],
)
def test_a_bomb_is_refused_while_it_is_read(name: str, text: str) -> None:
    start = time.perf_counter()
    assert "x.yaml:" in refusal(text).message
    assert time.perf_counter() - start < 60  # read whole, it would end the process for want of memory


def test_the_limits_of_depth_count_and_size_are_exact() -> None:
    assert value_of("[" * 31 + "]" * 31)
    with pytest.raises(SpecError, match=r"x\.yaml:1: is nested .* 32 deep"):
        value_of("[" * 32 + "]" * 32)
    with pytest.raises(SpecError, match=r"x\.yaml:1: holds more than 50,000 keys and values"):
        value_of("[" + "1," * 50_000 + "1]")
    head = "a: b\n#"
    assert plain(read_file(write(head + "x" * (MAX_BYTES - len(head))), "x.yaml")) == {"a": "b"}
    with pytest.raises(SpecError, match=r"x\.yaml: is larger than 1 MB"):
        read_file(write(head + "x" * (MAX_BYTES - len(head) + 1)), "x.yaml")


def test_what_is_not_a_readable_file(folder: Path) -> None:
    """A missing file, a folder, a pipe, a device and a loop of links are errors, and none of them is waited for."""
    os.mkfifo("pipe.yaml")
    Path("loop.yaml").symlink_to("loop.yaml")
    (folder / "dir.yaml").mkdir()
    write(BASE, "quick.yaml")
    messages = {
        "quik.yaml": "quik.yaml: no such file; did you mean quick.yaml?",
        "dir.yaml": "dir.yaml: is not a regular file",
        "pipe.yaml": "pipe.yaml: is not a regular file",
        "/dev/zero": "/dev/zero: is not a regular file",
        "loop.yaml": "loop.yaml: cannot be read: ",
        "quick.yaml/x": "quick.yaml/x: cannot be read: ",
        "a\0b": "a\\x00b: cannot be read: ",
        "x" * 5000: "cannot be read: ",
        "nowhere/x.yaml": "nowhere/x.yaml: no such file",
    }
    for name, message in messages.items():
        with pytest.raises(SpecError) as caught:
            load(Path(name))
        assert message in caught.value.message


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"a: 1\nb: 2\nc: \xff\n", "x.yaml:3: is not valid UTF-8"),
        (b"a: 1\nb: \xc3", "x.yaml:2: is not valid UTF-8"),
        ("name: é\n".encode("utf-16"), "x.yaml:1: is not valid UTF-8"),
        (b"\xed\xa0\x80", "x.yaml:1: is not valid UTF-8"),
        (b"\xef\xbb\xbfa: 1\r\nb: no\r\n", f"x.yaml:2: b: no {BOOLEAN}"),
    ],
)
def test_other_encodings_than_utf_8_are_refused(content: bytes, message: str) -> None:
    Path("x.yaml").write_bytes(content)
    with pytest.raises(SpecError) as caught:
        load(Path("x.yaml"))
    assert caught.value.message.startswith(message)
