"""report.html: a report's Markdown as one page that holds its figures, loads nothing and runs no
script.
"""

import base64
import csv
import html as entities
import re
from collections import Counter
from collections.abc import Collection
from importlib import resources
from pathlib import Path

import bleach
import mistune

from labkit.report.text import anchor

_ALLOWED_TAGS = set(
    "a blockquote br code div em figure figcaption h1 h2 h3 h4 h5 h6 hr img li ol p pre "
    "strong".split()
)
_ALLOWED_TAGS |= set("table thead tbody tr th td ul".split())
_ALLOWED_ATTRIBUTES = {
    "*": ["class", "id"],
    "a": ["href"],
    "div": ["aria-label", "role", "tabindex"],
    "img": ["alt", "src"],
    "ol": ["start"],
    "th": ["scope"],
}

MOST_ROWS = 60
"""Rows of a full table that the page shows; a longer one is a download."""

_TABLES = re.compile(r'<a href="(?P<folder>(?:\.\./[^/"]+/)?)tables/#(?P<number>\d\d)">')
"""A chapter's link to its tables. Only a tag of the page can match: text holds no "<", an attribute
no quote.
"""

_RELATIVE = re.compile(r'<a href="(?!#|https?:)[^"]*">(.*?)</a>', re.DOTALL)
"""A link to a file, which is not there where the page is mailed."""

_FIGURE = re.compile(r'(<img alt="[^"]*" src=")([^"]+)')

_POLICY = (
    "default-src 'none'; img-src data:; style-src 'unsafe-inline'; "
    "base-uri 'none'; form-action 'none'"
)

_STYLE_SHEET = (resources.files("labkit") / "data" / "report.css").read_text(encoding="utf-8")


def html(markdown: str, folder: Path, title: str) -> str:
    """Returns a report as one page with its figures inside, contents beside it, and everything else
    escaped.

    Headings keep GitHub's anchors; the first is the page's only <h1>.

    Args:
        markdown: GitHub's Markdown; raw HTML, which only a record can hold, is shown as text.
        folder: where the figures lie. Only an SVG inside it, or in a folder of several such
            devices, is shown; another image is left as its Markdown.
        title: plain text.
    """
    figures = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*.svg")}
    figures |= {
        f"../{path.parent.name}/{path.name}": path
        for path in folder.parent.glob(f"*x-{folder.name}/*.svg")
    }
    renderer = _Renderer(figures)
    body = mistune.create_markdown(renderer=renderer, plugins=["table"])(markdown)
    body = bleach.clean(body, _ALLOWED_TAGS, _ALLOWED_ATTRIBUTES, protocols=["http", "https"])
    body = _FIGURE.sub(
        lambda match: f"{match[1]}data:image/svg+xml;base64,{_encoded(figures[match[2]])}", body
    )
    body = _with_tables(body, folder)
    top = "contents"
    contents = "".join(
        f'<li class="{"chapter" if level == 2 else "section"}"><a href="#{name}">{text}</a></li>\n'
        for level, name, text in renderer.headings
        if level in (2, 3)
    )
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{entities.escape(title)}</title>\n<style>{_STYLE_SHEET}</style>\n</head>\n<body>\n"
        f'<nav id="{top}" aria-label="Contents"><details><summary>Contents</summary>\n'
        f"<ul>\n{contents}</ul></details></nav>\n"
        f'<main>\n{body}<p class="top"><a href="#{top}">Contents</a></p></main>\n</body>\n</html>\n'
    )


def _with_tables(body: str, folder: Path) -> str:
    """Returns the page with the full tables that it links inside it, and links to files as text: no
    link is dead where the page is mailed.
    """
    paragraphs = []
    for paragraph in re.split(r"(?<=</p>)", body):
        paragraphs.append(_RELATIVE.sub(r"\1", paragraph))
        for match in _TABLES.finditer(paragraph):
            within = folder.parent / Path(match["folder"]).name if match["folder"] else folder
            paragraphs += [
                _details(path) for path in sorted(within.glob(f"tables/{match['number']}_*.csv"))
            ]
    return "".join(paragraphs)


def _details(path: Path) -> str:
    rows = list(csv.reader(path.read_text(encoding="utf-8").splitlines()))
    name = entities.escape(path.name)
    summary = f"{name}, {len(rows) - 1:,} rows"
    href = f"data:text/csv;base64,{_encoded(path)}"
    download = f'<p><a download="{name}" href="{href}">Download {name}</a></p>'
    table = ""
    if len(rows) <= MOST_ROWS:
        head = "".join(f'<th scope="col">{entities.escape(text)}</th>' for text in rows[0])
        lines = ("".join(f"<td>{entities.escape(text)}</td>" for text in row) for row in rows[1:])
        body = "".join(f"<tr>{line}</tr>" for line in lines)
        table = _scrolled(name, f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody>")
    return f"<details><summary>{summary}</summary>{download}{table}</details>"


def _encoded(path: Path) -> str:
    return base64.b64encode(path.read_bytes()).decode()


def _scrolled(label: str, table: str) -> str:
    """Returns a table in a box that scrolls, can be reached by keyboard and says what it is."""
    box = f'<div class="table" role="region" aria-label="{label}" tabindex="0">'
    return f"{box}<table>{table}</table></div>"


class _Renderer(mistune.HTMLRenderer):
    def __init__(self, figures: Collection[str]):
        super().__init__(escape=True)
        self._figures = figures
        self.headings: list[tuple[int, str, str]] = []
        self._open: list[int] = []
        self._used: Counter[str] = Counter()
        self._num_tables = 0

    def heading(self, text: str, level: int, **attrs) -> str:
        # The first heading is above all others, and each is one level below the heading that it
        # belongs to.
        level = level if self._open else 0
        self._open = [above for above in self._open if above < level] + [level]
        tag = f"h{len(self._open)}"
        plain = entities.unescape(re.sub(r"<[^>]*>", "", text))
        name = anchor(plain)
        identity = f"{name}-{self._used[name]}" if self._used[name] else name
        self._used[name] += 1
        self.headings.append((len(self._open), identity, entities.escape(plain)))
        return f'<{tag} id="{identity}">{text}</{tag}>\n'

    def image(self, text: str, url: str, title: str | None = None) -> str:
        alt = entities.escape(entities.unescape(mistune.util.striptags(text)))
        if url not in self._figures:
            return f"![{alt}]({entities.escape(url)})"
        return f'<img alt="{alt}" src="{url}">'

    def paragraph(self, text: str) -> str:
        image = re.fullmatch(r'<img alt="([^"]*)" [^>]*>', text)
        if not image:
            return f"<p>{text}</p>\n"
        # A box that scrolls on a narrow screen can be reached by keyboard.
        label = f"Figure: {image[1]}"
        return f'<div class="figure" role="region" aria-label="{label}" tabindex="0">{text}</div>\n'

    def text(self, text: str) -> str:
        return mistune.util.safe_entity(text)

    def table(self, text: str) -> str:
        self._num_tables += 1
        section = self.headings[-1][2] if self.headings else "report"
        label = f"{section}, table {self._num_tables}"
        return _scrolled(label, f"\n{text}") + "\n"

    def table_cell(self, text: str, align: str | None = None, head: bool = False) -> str:
        number = ' class="number"' if align == "right" else ""
        return f'<th scope="col"{number}>{text}</th>' if head else f"<td{number}>{text}</td>"
