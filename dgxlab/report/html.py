"""A report as one HTML file: the markdown of `markdown`, whose tables sort by a click, with pictures in it.

It is the same text with the same escaping, and needs nothing beside it: style, script and pictures are in the file, and
its policy forbids everything else.
"""

from __future__ import annotations

import base64
import hashlib
import itertools
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from dgxlab.report.cells import OUTCOME, OUTCOMES

if TYPE_CHECKING:
    from markdown_it import MarkdownIt
    from markdown_it.token import Token

TEMPLATES = Path(__file__).parent.parent / "templates"


def document(markdown: str, title: str, pictures: Mapping[str, str] | None = None) -> str:
    """Return a page of HTML, given a report's markdown and, by name, the SVG text of its pictures.

    `title` is the page's where the markdown has no heading.
    """
    import jinja2
    from markupsafe import Markup

    tokens = _parser().parse(markdown)
    titles = _number(tokens)
    body = _parser().renderer.render(tokens, _parser().options, {})
    above = body.find("</h1>") + len("</h1>") if titles else 0
    script = (TEMPLATES / "page.js").read_text()
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    environment = jinja2.Environment(loader=jinja2.FileSystemLoader(TEMPLATES), autoescape=True, trim_blocks=True)
    page = environment.get_template("page.html.j2")
    return page.render(
        title=next(iter(titles.values()), title),
        contents=dict(list(titles.items())[1:]),
        # the markdown is escaped, the rest is ours
        above=Markup(body[:above]),  # noqa: S704
        body=Markup(body[above:]),  # noqa: S704
        pictures={name: Markup(svg) for name, svg in (pictures or {}).items()},  # noqa: S704
        style=Markup((TEMPLATES / "page.css").read_text()),  # noqa: S704
        script=Markup(script),  # noqa: S704
        digest=digest,
    )


@cache
def _parser() -> MarkdownIt:
    from markdown_it import MarkdownIt

    parser = MarkdownIt("commonmark").enable("table")  # HTML in it is the templates' own: see `markdown.escape`
    rules = parser.renderer.rules  # type: ignore[attr-defined]  # of the renderer for HTML, which it has by default
    rules["table_open"] = lambda *_: '<div class="wide"><table>\n'
    rules["table_close"] = lambda *_: "</table></div>\n"
    rules["td_open"] = _cell
    return parser


def _cell(tokens: Sequence[Token], at: int, *_: object) -> str:
    style = f' style="{tokens[at].attrs["style"]}"' if "style" in tokens[at].attrs else ""
    if word := OUTCOME.match(tokens[at + 1].content):
        style += f' class="{OUTCOMES[word[1]]}"'
    return f"<td{style}>"


def _number(tokens: Sequence[Token]) -> dict[str, str]:
    """Give each heading an id; return their texts by it."""
    titles: dict[str, str] = {}
    for opening, inline in itertools.pairwise(tokens):
        if opening.type == "heading_open":
            opening.attrs["id"] = name = f"part-{len(titles)}"
            titles[name] = "".join(child.content for child in inline.children or ())
    return titles
