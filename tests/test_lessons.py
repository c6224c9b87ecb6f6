"""A lesson's menus: without ipywidgets, and moved in a browser."""

import json
import os
import shutil
import subprocess
import sys
import urllib.request

import nbformat
import pytest
from conftest import more
from processes import is_true_within

from labkit import notebooks

CELLS = ("peaks-answer", "peaks-answer-contexts", "peaks-controls-live")
"""Of notebook 04, what its menus of batch and context need."""

BEFORE, AFTER = "58.7 GiB", "50.8 GiB"
"""The peak at the first context, 512, and at the next, 128."""


def cells():
    return [cell for cell in notebooks.read("04_memory").cells if cell["id"] in CELLS]


def test_without_widgets_a_menu_is_its_first_choice(monkeypatch):
    from IPython.core.interactiveshell import InteractiveShell

    monkeypatch.setitem(sys.modules, "ipywidgets", None)
    shell = InteractiveShell()
    shown = [shell.run_cell(cell["source"]).result for cell in cells()]
    assert shown[-1] == BEFORE
    assert shell.user_ns["peak"](4, 128) == AFTER


@pytest.mark.slow
@pytest.mark.parametrize("browser", more("chromium"))
def test_a_menu_that_is_moved_in_a_browser_changes_the_picture(browser, tmp_path, request):
    """In JupyterLab, with a kernel, by Chromium's DevTools protocol."""
    for name in ("ipywidgets", "jupyterlab"):
        pytest.importorskip(name)
    websocket = pytest.importorskip("websocket")
    if not shutil.which(browser):
        pytest.skip(f"needs {browser}")
    notebook = notebooks.read("04_memory")
    notebook.cells = cells()
    notebook.cells[-1].outputs = []
    nbformat.write(notebook, tmp_path / "menu.ipynb")
    folders = {"HOME": str(tmp_path), "JUPYTER_RUNTIME_DIR": str(tmp_path)}

    def start(*command, writes):
        process = subprocess.Popen(command, cwd=tmp_path, env=os.environ | folders)
        request.addfinalizer(process.wait)
        request.addfinalizer(process.terminate)
        assert is_true_within(120, lambda: any(tmp_path.glob(writes)))
        return next(tmp_path.glob(writes)).read_text()

    def ask(method, **parameters):
        page.send(json.dumps({"id": 1, "method": method, "params": parameters}))
        answer = {}
        while "id" not in answer:
            answer = json.loads(page.recv())
        return answer["result"]

    def value(script):
        return ask("Runtime.evaluate", expression=script)["result"].get("value") or ""

    def picture_with(text):
        assert is_true_within(120, lambda: text in value("document.body.innerText")), text
        return ask("Page.captureScreenshot")["data"]

    lab = "--port=0", "--no-browser", "--allow-root", "--IdentityProvider.token="
    lab += ("--LabApp.expose_app_in_browser=True",)
    server = start(sys.executable, "-m", "jupyterlab", *lab, writes="jpserver-*.json")
    url = json.loads(server)["url"] + "lab/tree/menu.ipynb"
    quiet = "--headless", "--no-sandbox", "--remote-debugging-port=0", f"--user-data-dir={tmp_path}"
    size = "--window-size=1200,900"
    port = start(browser, *quiet, size, url, writes="DevToolsActivePort").split()[0]
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/json") as answer:
        targets = [one for one in json.load(answer) if one["type"] == "page"]
    page = websocket.create_connection(targets[0]["webSocketDebuggerUrl"], suppress_origin=True)
    picture_with("| Idle")
    value("jupyterapp.commands.execute('notebook:run-all-cells')")
    before = picture_with(BEFORE)
    # What a choice does; a key would be the notebook's.
    menu = "[...document.querySelectorAll('.widget-dropdown select')].at(-1)"
    value(f"{menu}.selectedIndex = 1")
    value(f"{menu}.dispatchEvent(new Event('change', {{bubbles: true}}))")
    assert picture_with(AFTER) != before
