"""The HTML report: what is in it, and what hostile names in records come to."""

import pandas as pd
import pytest
from bs4 import BeautifulSoup

from labkit.report import page, tables

HOSTILE = [
    "</title><script>document.title = 'taken'</script>",
    '<img src="https://example.com/x.png" onerror="document.title = 1">',
    "[press](javascript:alert(1))",
    "[press](&#106;avascript&colon;alert(1))",
    "<javascript:alert(2)>",
    "![figure](../secret.svg)",
    "</table></main><iframe src='//example.com'></iframe>",
    "<details open ontoggle=alert(1)>",
    "<style>* { display: none }</style>",
]

FIGURE = '<svg xmlns="http://www.w3.org/2000/svg" width="990" height="330"></svg>'

MARKDOWN = """# A transformer measured on {device}

1. **The host sets the pace.** → [Who sets the pace?](#who-sets-the-pace) and
   [its second half](#environment-1)

![Rates <of> "a" step](01_rates.svg)

## 01 · Benchmarking
### Who sets the pace?

All statistics of {device}

{table}

[tables](tables/#01) and [a *notebook*](../../notebooks/01_benchmarking.ipynb)

### Environment

## 02 · Kernels
### Environment
"""


@pytest.fixture
def report(tmp_path) -> BeautifulSoup:
    """A small report of a device with a hostile name, as parsed from report.html."""
    (tmp_path / "secret.svg").write_text(FIGURE)
    folder = tmp_path / "device"
    (folder / "tables").mkdir(parents=True)
    (folder / "01_rates.svg").write_text(FIGURE)
    (folder / "tables" / "01_steps.csv").write_text("name\n<b>bold</b>\n")
    table = tables.to_markdown(pd.DataFrame({"name": HOSTILE, "ms": 1.0}))
    text = MARKDOWN.format(device=HOSTILE[0], table=table)
    return BeautifulSoup(page.html(text, folder, f"Measured on {HOSTILE[0]}"), "html.parser")


def test_headings_are_in_the_contents_and_every_link_arrives(report):
    headings = [(tag.name, tag["id"]) for tag in report.find_all(["h2", "h3"])]
    assert headings == [
        ("h2", "01--benchmarking"),
        ("h3", "who-sets-the-pace"),
        ("h3", "environment"),
        ("h2", "02--kernels"),
        ("h3", "environment-1"),
    ]
    anchors = {"#contents", *(f"#{anchor}" for _, anchor in headings)}
    links = {link["href"] for link in report.find_all("a") if not link.get("download")}
    assert {link for link in links if not link.startswith("#harmful")} <= anchors
    assert "tables and a notebook" in report.find("main").text, "a file's link is its text"


def test_the_page_holds_its_figures_and_tables_and_loads_nothing(report):
    (image,) = report.find_all("img")
    assert image["src"].startswith("data:image/svg+xml;") and image["alt"] == 'Rates <of> "a" step'
    # A box that scrolls on a narrow screen can be reached by keyboard.
    assert image.parent["tabindex"] == "0" and image.parent["aria-label"]
    details = report.find("main").find("details")
    assert "01_steps.csv, 1 rows" in details.text and "<b>bold</b>" in details.text
    assert details.find("a")["href"].startswith("data:text/csv;base64,")
    assert "default-src 'none'" in report.find("meta", {"http-equiv": True})["content"]


def test_hostile_names_are_text(report):
    shown = report.find("main").text
    assert report.find("title").text == f"Measured on {HOSTILE[0]}"
    for text in HOSTILE:
        if not text.startswith("[press]"):
            assert text.strip("<>") in shown
    assert not report.find("main").find_all(["script", "iframe", "object", "style"])
    attributes = {name for tag in report.find("main").find_all() for name in tag.attrs}
    assert attributes <= {
        "alt",
        "aria-label",
        "class",
        "download",
        "href",
        "id",
        "role",
        "scope",
        "src",
        "start",
        "tabindex",
    }
    for link in report.find_all("a"):
        assert link["href"].startswith(("#", "data:text/csv;base64,")), link
