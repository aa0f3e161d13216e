"""Living documents: fill the blocks of several at once, or say which are stale."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from dgxlab.cli._out import Out, plural
from dgxlab.errors import CheckFailed, SpecError, UsageError, edit

if TYPE_CHECKING:
    from dgxlab.document import Block, Document
    from dgxlab.report import Query
    from dgxlab.store import Store


@dataclass(frozen=True)
class Found:
    """One block as the record sees it.

    Attributes:
        file: The document.
        line: Of the block's marker.
        form: What it shows.
        state: current, stale, or missing where it names data that does not exist.
        reason: What is missing.
    """

    file: str
    line: int
    form: str
    state: str
    reason: str = ""

    @property
    def sentence(self) -> str:
        """Say where it is and how it stands."""
        return f"{self.file}:{self.line}: form={self.form} is {self.state}" + (f": {self.reason}" * bool(self.reason))


@dataclass(frozen=True)
class _Filled:
    """A document with what its blocks are to hold, None where that does not exist."""

    document: Document
    found: tuple[Found, ...]
    texts: tuple[str | None, ...]


def update(store: Store, paths: Sequence[Path], out: Out) -> None:
    """Fill every block of every document, or none of any.

    Raises:
        SpecError: if a marker is not as it must be, or a block names data that does not exist.
    """
    filled = _fill(store, paths)
    missing = [one for document in filled for one in document.found if one.state == "missing"]
    if missing:
        first, *others = missing
        details = "\n".join(one.sentence for one in others)
        raise SpecError(
            f"{first.file}:{first.line}: {first.reason}; nothing was written", next=edit(first.file), details=details
        )
    for one in filled:
        one.document.write(one.document.with_texts([text for text in one.texts if text is not None]))
    found = [found for one in filled for found in one.found]
    out.result({"blocks": found}, "\n".join(_counted(one) for one in filled))


def check(store: Store, paths: Sequence[Path], out: Out) -> None:
    """Say of every block that is not current what is wrong with it.

    Raises:
        SpecError: if a marker is not as it must be.
        CheckFailed: if there is such a block.
    """
    found = [found for one in _fill(store, paths) for found in one.found]
    wrong = [one for one in found if one.state != "current"]
    out.result({"blocks": found}, "\n".join(one.sentence for one in wrong) or f"{plural(len(found), 'block')}: current")
    if wrong:
        missing = next((one for one in wrong if one.state == "missing"), None)
        again = shlex.join(["dgxlab", "report", "--update", *dict.fromkeys(one.file for one in wrong)])
        raise CheckFailed(
            f"{len(wrong)} of {plural(len(found), 'block')} {'is' if len(wrong) == 1 else 'are'} not current",
            next=edit(missing.file) if missing else again,
        )


def _counted(one: _Filled) -> str:
    stale = sum(found.state == "stale" for found in one.found)
    return f"{one.document.path}: {plural(len(one.found), 'block')}, {stale or 'none'} filled anew"


def _fill(store: Store, paths: Sequence[Path]) -> list[_Filled]:
    """Read all documents before the record is asked, and ask it the same only once."""
    from dgxlab.document import Document

    once = {path.resolve(): path for path in reversed(paths)}  # under the first of its names
    documents = [Document(path) for path in reversed(once.values())]
    wanted = [[_wanted(document, block) for block in document.blocks] for document in documents]
    known: dict[Query, str | UsageError] = {}
    filled = []
    for document, asks in zip(documents, wanted, strict=True):
        for ask in asks:
            if ask not in known:
                known[ask] = _text(store, ask)
        texts = [known[ask] for ask in asks]
        found = tuple(_found(document, *pair) for pair in zip(document.blocks, texts, strict=True))
        filled.append(_Filled(document, found, tuple(text if isinstance(text, str) else None for text in texts)))
    return filled


def _wanted(document: Document, block: Block) -> Query:
    from dgxlab.report import query

    try:
        return query(block.words)
    except UsageError as error:
        raise SpecError(f"{document.path}:{block.line}: {error.message}", next=edit(document.path)) from error


def _text(store: Store, ask: Query) -> str | UsageError:
    from dgxlab import report

    try:
        return report.render_page(report.page(store, ask))
    except UsageError as error:
        return error


def _found(document: Document, block: Block, text: str | UsageError) -> Found:
    where = (str(document.path), block.line, block.words["form"])
    if isinstance(text, UsageError):
        return Found(*where, "missing", text.message)
    return Found(*where, "stale" if document.is_stale(block, text) else "current")
