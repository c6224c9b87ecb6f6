"""The HTML report and the notebooks as a browser shows them, and what hostile names in records come
to.
"""

import base64
import contextlib
import itertools
import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import nbformat
import pandas as pd
import pytest
import websocket

from labkit.configs import REPOSITORY
from labkit.report import page, tables

CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")

HOSTILE = [
    "</title><script>document.title = 'taken'</script>",
    '<img src="https://example.com/x.png" onerror="document.title = 1">',
    "[press](javascript:alert(1))",
    "<javascript:alert(2)>",
    "![figure](../secret.svg)",
    "</table></main><iframe src='//example.com'></iframe>",
    "<details open ontoggle=alert(1)>",
    "<style>* { display: none }</style>",
]

FIGURE = (
    '<svg xmlns="http://www.w3.org/2000/svg" width="990" height="330">'
    '<rect width="90%" height="90%"/></svg>'
)

MARKDOWN = """# A transformer measured on {device}

| | |
|---|---|
| device | {device} |

## Things to know

1. **The host sets the pace.** → [Who sets the pace?](#who-sets-the-pace) and
   [its second half](#environment-1)

![Rates <of> "a" step](01_rates.svg)

# 01 · Benchmarking
## Who sets the pace?

{table}

All statistics of {device}

{table}

- `a_kernel_name<{long}>` takes 2¹⁰ calls; all of them: [table](tables/01_phases.csv)

### Environment

# 02 · Kernels
### Environment
"""


@pytest.fixture
def report(tmp_path) -> Path:
    """A small report of a device with a hostile name, as report.html."""
    (tmp_path / "secret.svg").write_text(FIGURE)
    folder = tmp_path / "device"
    folder.mkdir()
    (folder / "01_rates.svg").write_text(FIGURE)
    table = tables.to_markdown(pd.DataFrame({f"quantity {n} (ms)": HOSTILE for n in range(12)}))
    device = HOSTILE[0]
    text = MARKDOWN.format(
        device=device, table=table, long="nothing_to_break_at, " * 20 + "x" * 200
    )
    path = folder / "report.html"
    path.write_text(
        page.html(text, folder, f"A transformer measured on {device}"), encoding="utf-8"
    )
    return path


@needs_chromium
@pytest.mark.parametrize("width", [390, 1400])
def test_the_page_is_readable_at_this_width(report, width, browser):
    browser.open(report.as_uri(), width, mobile=width < 600)
    seen = browser.value(
        "[innerWidth, document.documentElement.scrollWidth, document.images.length]"
    )
    assert seen[0] == width >= seen[1] and seen[2] == 1
    assert browser.value("[...document.images].every(image => image.naturalWidth && image.alt)")
    assert (
        browser.value("parseFloat(getComputedStyle(document.querySelector('td')).fontSize)") >= 13
    )
    assert browser.complaints() == []
    requests = [
        event["params"]["request"]["url"] for event in browser.events("Network.requestWillBeSent")
    ]
    assert (
        len(requests) == 2
        and requests[0] == report.as_uri()
        and requests[1].startswith("data:image/svg+xml;")
    )
    # A table wider than the page scrolls inside its own box.
    assert browser.value(
        "(box => box.scrollWidth > box.clientWidth)"
        "([...document.querySelectorAll('.table')].at(-1))"
    )
    # The contents are folded on a phone and open beside the text.
    assert browser.value("document.querySelector('nav a').checkVisibility()") == (width > 1000)


@needs_chromium
def test_headings_are_in_order_and_every_link_arrives(report, browser):
    browser.open(report.as_uri(), 1400)
    headings = browser.value(
        "[...document.querySelectorAll('h1,h2,h3,h4,h5,h6')].map(h => [h.tagName, h.id])"
    )
    assert [level for level, _ in headings] == ["H1", "H2", "H2", "H3", "H4", "H2", "H3"]
    assert [anchor for _, anchor in headings][1:] == [
        "things-to-know",
        "01--benchmarking",
        "who-sets-the-pace",
        "environment",
        "02--kernels",
        "environment-1",
    ]
    links = browser.value("[...document.links].map(link => link.getAttribute('href'))")
    assert {link for link in links if not link.startswith("#")} == {"tables/01_phases.csv"}
    sections = {anchor for level, anchor in headings if level in ("H2", "H3")}
    assert {link[1:] for link in links if link.startswith("#")} == {"contents", *sections}
    assert browser.value("[...document.querySelectorAll('th')].every(cell => cell.scope == 'col')")
    assert browser.value(
        "[document.documentElement.lang, document.querySelectorAll('nav, main').length]"
    ) == ["en", 2]


@needs_chromium
def test_hostile_names_are_text(report, browser):
    browser.open(report.as_uri(), 1400)
    shown = browser.value("document.querySelector('main').innerText")
    for text in HOSTILE:
        assert shown.count(text.strip("<>") if text.startswith("<javascript") else text) >= 24, text
    assert browser.value("document.title") == f"A transformer measured on {HOSTILE[0]}"
    assert browser.value("document.querySelectorAll('main details').length") == 0
    assert (
        browser.value(
            "document.querySelectorAll('script, iframe, object, main style, [style]').length"
        )
        == 0
    )
    attributes = browser.value(
        "[...document.querySelectorAll('body *')].flatMap(tag => tag.getAttributeNames())"
    )
    assert set(attributes) <= {
        "alt",
        "aria-label",
        "class",
        "href",
        "id",
        "open",
        "role",
        "scope",
        "src",
        "tabindex",
    }
    assert not browser.events("Page.javascriptDialogOpening")


@pytest.mark.parametrize(
    ("heading", "expected"),
    [
        ("Precision and compilation", "precision-and-compilation"),
        ("06 · FlashAttention", "06--flashattention"),
        ("Who's first? (µs, 2³⁰ bytes)", "whos-first-µs-2-bytes"),
        ("A `code_name` – so", "a-code_name--so"),
    ],
)
def test_anchors_are_those_of_github(heading, expected):
    assert page.anchor(heading) == expected


@needs_chromium
@pytest.mark.slow
@pytest.mark.parametrize("name", ["01_benchmarking", "06_flash_attention"])
def test_jupyterlab_shows_a_notebook_and_runs_its_first_cells(name, jupyterlab, browser):
    url, token = jupyterlab
    browser.open(f"{url}/lab/tree/{name}.ipynb?token={token}", 1400)
    panel = ".jp-NotebookPanel:not(.lm-mod-hidden)"
    browser.wait_for(f"document.querySelectorAll('{panel} .jp-CodeCell').length >= 3")
    title = (
        nbformat.read(REPOSITORY / "notebooks" / f"{name}.ipynb", 4)
        .cells[0]
        .source.split("\n")[0]
        .lstrip("# ")
    )
    browser.wait_for(
        f"document.querySelector('{panel} h1')?.innerText.startsWith({json.dumps(title)})"
    )

    # Cells are drawn as they come into view.
    figure = f"document.querySelector('{panel} .jp-OutputArea img')"
    scroll = f"document.querySelector('{panel} .jp-WindowedPanel-outer').scrollBy(0, 300)"
    browser.wait_for(f"{figure}?.naturalWidth > 100 || void {scroll}")
    browser.value(f"{figure}.scrollIntoView()")
    browser.screenshot(f"{name}_figure")

    # The title, what the lesson needs, and the four cells of set-up. They are collapsed: the prompt
    # of the last one's output, the line that says where the records come from, tells that all were
    # run.
    browser.value(f"document.querySelector('{panel} .jp-WindowedPanel-outer').scrollTo(0, 0)")
    browser.wait_for(
        "document.querySelector('.jp-Notebook-ExecutionIndicator')?.dataset.status == 'idle'"
    )
    browser.click(f"{panel} .jp-MarkdownCell h1")
    for _ in range(6):
        browser.press_shift_enter()
    prompts = (
        f"[...document.querySelectorAll('{panel} .jp-OutputPrompt')]"
        ".map(prompt => prompt.innerText)"
    )
    browser.wait_for(f"({prompts}).includes('[4]:')")
    browser.screenshot(f"{name}_run")
    error = (
        "[data-mime-type='application/vnd.jupyter.error'], "
        "[data-mime-type='application/vnd.jupyter.stderr']"
    )
    assert browser.value(f"document.querySelectorAll({json.dumps(error)}).length") == 0


class Browser:
    """A headless Chromium, spoken to through its DevTools protocol."""

    def __init__(self, port_file: Path, screenshots: Path):
        _wait_for(lambda: port_file.exists() and len(port_file.read_text().split()) == 2)
        port, path = port_file.read_text().split()
        self._socket = websocket.create_connection(
            f"ws://127.0.0.1:{port}{path}", timeout=60, suppress_origin=True
        )
        self._numbers = itertools.count()
        self._session: str | None = None
        self._events: list[dict] = []
        self._screenshots = screenshots

    def call(self, method: str, **parameters) -> dict:
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": parameters}
        self._socket.send(
            json.dumps(message | ({"sessionId": self._session} if self._session else {}))
        )
        while (answer := json.loads(self._socket.recv())).get("id") != number:
            self._events.append(answer)
        assert "error" not in answer, answer
        return answer["result"]

    def open(self, url: str, width: int, *, mobile: bool = False) -> None:
        """Loads `url` in a new page; `mobile` lays it out as a phone does, which asks for a
        viewport.
        """
        self._session = None
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)[
            "sessionId"
        ]
        self._events.clear()
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=900,
            deviceScaleFactor=1 + mobile,
            mobile=mobile,
        )
        self.call("Page.navigate", url=url)
        while not self.events("Page.loadEventFired"):
            self._events.append(json.loads(self._socket.recv()))

    def events(self, method: str) -> list[dict]:
        return [event for event in self._events if event.get("method") == method]

    def complaints(self) -> list[dict]:
        """Returns what the page and the browser have written to the console, and exceptions."""
        return [
            event
            for method in ("Log.entryAdded", "Runtime.consoleAPICalled", "Runtime.exceptionThrown")
            for event in self.events(method)
        ]

    def value(self, expression: str):
        answer = self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def wait_for(self, expression: str) -> None:
        try:
            _wait_for(lambda: self.value(expression))
        except TimeoutError as error:
            self.screenshot("timeout")
            raise AssertionError(f"never came true: {expression}") from error

    def click(self, selector: str) -> None:
        x, y = self.value(
            f"(box => [box.x + box.width / 2, box.y + box.height / 2])"
            f"(document.querySelector({json.dumps(selector)}).getBoundingClientRect())"
        )
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def press_shift_enter(self) -> None:
        key = {"key": "Enter", "code": "Enter", "windowsVirtualKeyCode": 13, "modifiers": 8}
        self.call("Input.dispatchKeyEvent", type="keyDown", text="\r", **key)
        self.call("Input.dispatchKeyEvent", type="keyUp", **key)

    def screenshot(self, name: str) -> None:
        image = self.call("Page.captureScreenshot")["data"]
        (self._screenshots / f"{name}.png").write_bytes(base64.b64decode(image))


@pytest.fixture(scope="module")
def browser(tmp_path_factory) -> Iterator[Browser]:
    profile = tmp_path_factory.mktemp("chromium")
    options = (
        "--headless --no-sandbox --disable-gpu --disable-quic "
        "--no-first-run --disable-background-networking"
    )
    options += " --disable-component-update --disable-sync --remote-debugging-port=0"
    command = [CHROMIUM, *options.split(), f"--user-data-dir={profile}", "about:blank"]
    with _ended(subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)):
        yield Browser(profile / "DevToolsActivePort", tmp_path_factory.mktemp("screenshots"))


@pytest.fixture(scope="module")
def jupyterlab(tmp_path_factory) -> Iterator[tuple[str, str]]:
    """A server started as the README says, on copies of the notebooks since JupyterLab saves what
    is run.
    """
    folder = tmp_path_factory.mktemp("jupyterlab")
    (folder / "notebooks").mkdir()
    for path in (REPOSITORY / "notebooks").glob("*.ipynb"):
        notebook = nbformat.read(path, 4)
        for cell in notebook.cells:
            if "remove_cell" in cell.metadata.get("tags", []):
                cell.outputs = []  # so that one says that the cell was run
        nbformat.write(notebook, folder / "notebooks" / path.name)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    token = secrets.token_hex()
    runtime = folder / "runtime"
    settings = folder / "config" / "labconfig" / "page_config.json"
    settings.parent.mkdir(parents=True)
    settings.write_text(
        '{"disabledExtensions": {"@jupyterlab/apputils-extension:announcements": true}}'
    )
    environment = os.environ | {
        "PYTHONPATH": str(REPOSITORY),
        "JUPYTER_RUNTIME_DIR": str(runtime),
        "JUPYTER_CONFIG_DIR": str(folder / "config"),
        "JUPYTER_DATA_DIR": str(folder / "data"),
        "IPYTHONDIR": str(folder / "ipython"),
    }
    command = [sys.executable, "-m", "jupyter", "lab", "notebooks/", "--no-browser", "--allow-root"]
    command += [
        f"--ServerApp.port={port}",
        "--ServerApp.port_retries=0",
        f"--IdentityProvider.token={token}",
    ]
    with (folder / "log").open("w") as log:
        server = subprocess.Popen(
            command, cwd=folder, env=environment, stdout=log, stderr=subprocess.STDOUT
        )
    with _ended(server):
        _wait_for(lambda: list(runtime.glob("jpserver-*.json")) or server.poll() is not None)
        assert server.poll() is None, (folder / "log").read_text()
        yield f"http://127.0.0.1:{port}", token
    assert not list(runtime.glob("kernel-*.json")), "kernels outlived their server"


@contextlib.contextmanager
def _ended(process: subprocess.Popen) -> Iterator[None]:
    try:
        yield
    finally:
        process.terminate()
        try:
            process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait_for(look: Callable, seconds: float = 90):
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if found := look():
            return found
        time.sleep(0.1)
    raise TimeoutError
