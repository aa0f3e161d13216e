"""Living documents: blocks are found and replaced, and no other byte changes."""

import stat
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dgxlab.document import Document
from dgxlab.errors import SpecError

BEGIN, END = "<!-- dgxlab:report form=ops experiment=toy -->", "<!-- /dgxlab -->"
BLOCK = f"{BEGIN}\nold\n{END}"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    folder = tmp_path / "plans"
    folder.mkdir()
    return folder / "plan.md"


def filled(path: Path, content: bytes, *texts: str) -> bytes:
    path.write_bytes(content)
    document = Document(path)
    document.write(document.with_texts(texts))
    return path.read_bytes()


def refused(path: Path, text: str) -> str:
    path.write_bytes(text.encode())
    with pytest.raises(SpecError) as error:
        Document(path)
    assert path.read_bytes() == text.encode()
    return error.value.message.removeprefix(f"{path}")


def test_what_a_marker_says(path: Path) -> None:
    marker = '<!--dgxlab:report form=ops wide cells="q4_K n=512, pp512" host="h"  -->'
    path.write_text(f"# x\n\n{marker}\na\n\nb\n{END}\n{BLOCK}")
    first, second = Document(path).blocks
    assert (first.line, first.text) == (3, "a\n\nb")
    assert list(first.words.items()) == [
        ("form", "ops"),
        ("wide", "yes"),
        ("cells", "q4_K n=512, pp512"),
        ("host", "h"),
    ]
    assert (second.line, second.text) == (8, "old")


def test_an_empty_block_is_filled_and_then_is_not_stale(path: Path) -> None:
    content = filled(path, f"{BEGIN}\n{END}\n".encode(), "| a |\n| --- |\n")
    assert content == f"{BEGIN}\n\n| a |\n| --- |\n\n{END}\n".encode()
    document = Document(path)
    assert not document.is_stale(document.blocks[0], "| a |\n| --- |\n")
    assert document.is_stale(document.blocks[0], "| b |\n| --- |\n")
    assert document.write(document.with_texts(["| a |\n| --- |\n"])) is False


@pytest.mark.parametrize("newline", ["\n", "\r\n"])
@pytest.mark.parametrize("bom", ["", "\ufeff"])
@pytest.mark.parametrize("last", ["", "\n", "\n\n \t"])
def test_endings_the_bom_and_a_missing_last_newline_stay(path: Path, newline: str, bom: str, last: str) -> None:
    content = f"{bom}{BLOCK}\nprose  \n\ttab\n{BLOCK}{last}".replace("\n", newline)
    wanted = content.replace("old", newline.join(["", "new", "line", ""]))
    assert filled(path, content.encode(), "new\nline\n", "new\nline\n") == wanted.encode()


def test_mixed_endings_stay_mixed(path: Path) -> None:
    content = f"a\r\nb\n{BEGIN}\r\nold\n{END}\nc\r\n{BLOCK}\r\n"
    wanted = f"a\r\nb\n{BEGIN}\r\n\r\nx\r\n\r\n{END}\nc\r\n{BEGIN}\n\ny\n\n{END}\r\n"
    assert filled(path, content.encode(), "x", "y") == wanted.encode()


@given(before=st.text(max_size=40), after=st.text(max_size=40), text=st.text(alphabet="a|-\n `é", max_size=30))
def test_nothing_outside_changes(tmp_path_factory: pytest.TempPathFactory, before: str, after: str, text: str) -> None:
    path = tmp_path_factory.mktemp("any") / "plan.md"
    around = [part.replace("`", "").replace("~", "").replace("\0", "").encode() for part in (before, after)]
    content = around[0] + b"\n" + BLOCK.encode() + b"\n" + around[1]
    changed = filled(path, content, text)
    assert changed.startswith(around[0] + b"\n" + BEGIN.encode() + b"\n\n")
    assert changed.endswith(END.encode() + b"\n" + around[1])


def test_code_is_text(path: Path) -> None:
    shown = f"```md\n{BEGIN}\n```\n~~~\n```\n{END}\n~~~\n`{BEGIN}` and ``{END}``\n````\n```\n{END}\n````\n"
    path.write_text(f"{shown}{BLOCK}\n")
    (block,) = Document(path).blocks
    assert block.text == "old"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (f"a\n{BEGIN}\n", ":2: the block has no end: a line <!-- /dgxlab --> is missing"),
        (f"{BEGIN}\n{BEGIN}\n{END}\n{END}\n", ":2: a block begins inside the one of line 1"),
        (f"\n{END}\n", ":2: the end of a block that did not begin"),
        (f"{BLOCK}\n{END}", ":4: the end of a block that did not begin"),
        (f"  {BEGIN}\n{END}", ":1: a marker stands alone on its line, without blanks before it"),
        (f"see {BEGIN}\n{END}", ":1: a marker stands alone on its line, without blanks before it"),
        (f"{BEGIN} {END}", ":1: a marker stands alone on its line, without blanks before it"),
        ("<!-- dgxlab:table form=ops -->", ":1: neither <!-- dgxlab:report form=... --> nor <!-- /dgxlab -->"),
        ("<!-- dgxlab:report form=ops\n-->", ":1: neither <!-- dgxlab:report form=... --> nor <!-- /dgxlab -->"),
        ("<!-- DGXLAB:report -->", ":1: neither <!-- dgxlab:report form=... --> nor <!-- /dgxlab -->"),
        ("<!-- dgxlab:report form -->", ":1: 'form' is not key=value or key=\"several words\""),
        ("<!-- dgxlab:report form=a b -->", ":1: 'b' is not key=value or key=\"several words\""),
        ('<!-- dgxlab:report form="a -->', ':1: \'form="a\' is not key=value or key="several words"'),
        ('<!-- dgxlab:report form="a"b=c -->', ':1: \'form="a"b=c\' is not key=value or key="several words"'),
        ("<!-- dgxlab:report form=a form=b -->", ":1: form is given twice"),
    ],
)
def test_markers_that_are_not_as_they_must_be(path: Path, text: str, message: str) -> None:
    assert refused(path, text) == message
    shifted = refused(path, f"{BLOCK}\n\n{text}")  # a block that is fine before it
    assert int(shifted.split(":")[1]) == int(message.split(":")[1]) + 4


def test_what_is_not_utf8_is_refused(tmp_path: Path) -> None:
    for content, message in (
        (BLOCK.encode("utf-16"), " is not UTF-8 text"),
        (b"a\0b", " is not UTF-8 text"),
        (b"ok\n\xe9t\xe9\n", ":2: byte 0xe9 is not UTF-8"),
    ):
        path = tmp_path / "plan.md"
        path.write_bytes(content)
        with pytest.raises(SpecError) as error:
            Document(path)
        assert error.value.message == f"{path}{message}"
    for path, message in ((tmp_path, "Is a directory"), (tmp_path / "none.md", "No such file or directory")):
        with pytest.raises(SpecError) as error:
            Document(path)
        assert error.value.message == f"{path} cannot be read: {message}"


def test_permissions_and_links_stay(path: Path) -> None:
    link = path.with_name("link.md")
    path.write_text(BLOCK)
    path.chmod(0o640)
    link.symlink_to(path)
    document = Document(link)
    assert document.write(document.with_texts(["new"])) is True
    assert "new" in path.read_text()
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    assert link.is_symlink()
    assert {file.name for file in path.parent.iterdir()} == {"link.md", "plan.md"}


def test_a_file_changed_meanwhile_is_not_overwritten(path: Path) -> None:
    path.write_text(BLOCK)
    document = Document(path)
    path.write_text(f"{BLOCK}\nmine")
    with pytest.raises(SpecError, match="changed by another"):
        document.write(document.with_texts(["new"]))
    assert path.read_text() == f"{BLOCK}\nmine"
    assert [file.name for file in path.parent.iterdir()] == ["plan.md"]


def test_a_read_only_file_is_not_replaced(path: Path) -> None:
    path.write_text(BLOCK)
    path.chmod(0o444)
    document = Document(path)
    with pytest.raises(SpecError, match="read-only") as error:
        document.write(document.with_texts(["new"]))
    assert error.value.next == f"ls -l {path}"
    assert path.read_text() == BLOCK
    assert [file.name for file in path.parent.iterdir()] == ["plan.md"]
