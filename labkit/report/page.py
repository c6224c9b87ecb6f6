"""report.html: a report's Markdown as one page that holds its figures, loads nothing and runs no
script.
"""

import base64
import csv
import html as entities
import re
from collections import Counter
from pathlib import Path

import mistune
from mistune.toc import add_toc_hook, render_toc_ul

from labkit.configs import DATA
from labkit.report.text import anchor

MOST_ROWS = 60
"""Rows of a full table that the page shows; a longer one is a download."""

_BESIDE = r"(?:\.\./\d+x-[^/]+/)?"
"""Of a file beside the page, or in the folder of several such devices."""

_POLICY = (
    "default-src 'none'; img-src data:; style-src 'unsafe-inline'; "
    "base-uri 'none'; form-action 'none'"
)

_STYLE_SHEET = (DATA / "report.css").read_text(encoding="utf-8")


def html(markdown: str, folder: Path, title: str) -> str:
    """Returns a report as one page with its figures and full tables inside, contents beside it, and
    everything else escaped.

    Headings below the first level have GitHub's anchors.

    Args:
        markdown: GitHub's Markdown; raw HTML, which only a record can hold, is shown as text.
        folder: where the figures lie. Only an SVG inside it, or in a folder of several such
            devices, is shown; another image is left as its Markdown.
        title: plain text.
    """
    names = Counter()

    def identity(heading: dict, _: int) -> str:
        name = anchor(heading["text"])
        names[name] += 1
        return f"{name}-{names[name] - 1}" if names[name] > 1 else name

    reader = mistune.create_markdown(renderer=_Renderer(folder), plugins=["table"])
    add_toc_hook(reader, min_level=2, heading_id=identity)
    body, state = reader.parse(markdown)
    contents = render_toc_ul(state.env["toc_items"])
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{entities.escape(title)}</title>\n<style>{_STYLE_SHEET}</style>\n</head>\n<body>\n"
        '<nav id="contents" aria-label="Contents"><details><summary>Contents</summary>\n'
        f"{contents}</details></nav>\n"
        f'<main>\n{body}<p class="top"><a href="#contents">Contents</a></p></main>\n'
        "</body>\n</html>\n"
    )


def _details(path: Path) -> str:
    rows = list(csv.reader(path.read_text(encoding="utf-8").splitlines()))
    name = entities.escape(path.name)
    summary = f"{name}, {len(rows) - 1:,} rows"
    href = _data_url("text/csv", path)
    download = f'<p><a download="{name}" href="{href}">Download {name}</a></p>'
    table = ""
    if len(rows) <= MOST_ROWS:
        head = "".join(f'<th scope="col">{entities.escape(text)}</th>' for text in rows[0])
        lines = ("".join(f"<td>{entities.escape(text)}</td>" for text in row) for row in rows[1:])
        body = "".join(f"<tr>{line}</tr>" for line in lines)
        table = _scrolled(name, f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody>")
    return f"<details><summary>{summary}</summary>{download}{table}</details>"


def _data_url(kind: str, path: Path) -> str:
    return f"data:{kind};base64,{base64.b64encode(path.read_bytes()).decode()}"


def _scrolled(label: str, table: str) -> str:
    """Returns a table in a box that scrolls, can be reached by keyboard and says what it is."""
    box = f'<div class="table" role="region" aria-label="{label}" tabindex="0">'
    return f"{box}<table>{table}</table></div>"


class _Renderer(mistune.HTMLRenderer):
    def __init__(self, folder: Path):
        super().__init__(escape=True)
        self._folder = folder
        self._linked: list[Path] = []
        self._num_tables = 0

    def image(self, text: str, url: str, title: str | None = None) -> str:
        alt = entities.escape(entities.unescape(mistune.util.striptags(text)))
        path = self._folder / url
        if not re.fullmatch(_BESIDE + r"[^/]+\.svg", url) or not path.is_file():
            return f"![{alt}]({entities.escape(url)})"
        source = _data_url("image/svg+xml", path)
        return f'<img alt="{alt}" src="{source}">'

    def link(self, text: str, url: str, title: str | None = None) -> str:
        if url.startswith(("#", "http://", "https://")):
            return f'<a href="{entities.escape(url)}">{text}</a>'
        tables = re.fullmatch(f"({_BESIDE}tables)/#(\\d\\d)", url)
        if tables:
            self._linked += sorted((self._folder / tables[1]).glob(f"{tables[2]}_*.csv"))
        # A file is not there where the page is mailed.
        return text

    def paragraph(self, text: str) -> str:
        image = re.fullmatch(r'<img alt="([^"]*)" [^>]*>', text)
        if image:
            # A box that scrolls on a narrow screen can be reached by keyboard.
            box = f'class="figure" role="region" aria-label="Figure: {image[1]}" tabindex="0"'
            return f"<div {box}>{text}</div>\n"
        details = "".join(map(_details, self._linked))
        self._linked.clear()
        return f"<p>{text}</p>\n{details}"

    def text(self, text: str) -> str:
        return mistune.util.safe_entity(text)

    def table(self, text: str) -> str:
        self._num_tables += 1
        return _scrolled(f"table {self._num_tables}", f"\n{text}") + "\n"

    def table_cell(self, text: str, align: str | None = None, head: bool = False) -> str:
        number = ' class="number"' if align == "right" else ""
        return f'<th scope="col"{number}>{text}</th>' if head else f"<td{number}>{text}</td>"
