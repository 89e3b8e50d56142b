"""The page in a real browser: Debian's Chromium without a window, driven over its debugging pipe.

Without a `chromium` (or `google-chrome`) on the PATH these tests are skipped.
"""

from __future__ import annotations

import base64
import contextlib
import fcntl
import json
import os
import select
import shutil
import signal
import time
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from made_up_runs import write_run

pytest.importorskip("plotly", reason="the page needs plotly: pip install 'fedquilt[report]'")
from fedquilt.report.page import data_json, render_page, write_page
from fedquilt.report.page_content import page_data

FOUND = next((path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), "")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not FOUND, reason="no chromium on the PATH: apt-get install chromium"),
]
FLAGS = [
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
    "--disable-background-networking", "--disable-component-update", "--hide-scrollbars", "--remote-debugging-pipe",
]  # fmt: skip


class Browser:
    """One page of a headless Chromium; messages go over a pair of pipes, so no port is opened and no package needed."""

    def __init__(self, profile: Path) -> None:
        ends = [fcntl.fcntl(end, fcntl.F_DUPFD, 20) for end in (*os.pipe(), *os.pipe())]
        self.incoming, self.outgoing = ends[2], ends[1]
        for end in (self.incoming, self.outgoing):
            os.set_inheritable(end, False)
        nothing = os.open(os.devnull, os.O_RDWR)
        self.process = os.posix_spawn(
            FOUND,
            [FOUND, *FLAGS, f"--user-data-dir={profile}", "about:blank"],
            dict(os.environ),
            file_actions=[
                (os.POSIX_SPAWN_DUP2, ends[0], 3),
                (os.POSIX_SPAWN_DUP2, ends[3], 4),
                (os.POSIX_SPAWN_DUP2, nothing, 1),
                (os.POSIX_SPAWN_DUP2, nothing, 2),
            ],
            setpgroup=0,
        )
        for end in (ends[0], ends[3], nothing):
            os.close(end)
        self.buffer, self.number, self.session = b"", 0, ""
        self.complaints: list[str] = []
        self.requests: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self.number += 1
        message = {"id": self.number, "method": method, "params": parameters}
        if self.session:
            message["sessionId"] = self.session
        os.write(self.outgoing, json.dumps(message).encode() + b"\0")
        while True:
            answer = self.receive()
            if answer.get("id") == self.number:
                assert "error" not in answer, answer["error"]
                return dict(answer["result"])

    def receive(self) -> dict[str, Any]:
        while b"\0" not in self.buffer:
            assert select.select([self.incoming], [], [], 60)[0], "chromium did not answer within a minute"
            piece = os.read(self.incoming, 1 << 20)
            assert piece, "chromium ended"
            self.buffer += piece
        message, _, self.buffer = self.buffer.partition(b"\0")
        event = dict(json.loads(message))
        told = event.get("params", {})
        if event.get("method") in ("Runtime.exceptionThrown", "Log.entryAdded"):
            self.complaints.append(json.dumps(told))
        if event.get("method") == "Runtime.consoleAPICalled" and told["type"] in ("error", "warning", "assert"):
            self.complaints.append(json.dumps(told["args"]))
        if event.get("method") == "Network.requestWillBeSent":
            self.requests.append(told["request"]["url"][:200])
        return event

    def open(self, page: Path | str, width: int = 1280, dark: bool = False, drawn: bool = True) -> None:
        self.complaints.clear()
        self.requests.clear()
        screen = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 700}
        self.call("Emulation.setDeviceMetricsOverride", **screen)
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.call("Emulation.setEmulatedMedia", features=scheme)
        self.call("Page.navigate", url=page.as_uri() if isinstance(page, Path) else page)
        self.until("document.readyState === 'complete'")
        if drawn:  # figures are drawn where they come into view: on a phone the first is below the table
            self.ask("document.querySelector('figure .plot').scrollIntoView()")
            self.until("document.querySelectorAll('.main-svg').length > 0")

    def ask(self, expression: str) -> Any:
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def until(self, condition: str, seconds: float = 90) -> None:
        end = time.monotonic() + seconds
        while not self.ask(f"Boolean({condition})"):
            assert time.monotonic() < end, f"waited {seconds} s in vain for: {condition}"
            time.sleep(0.02)

    def show(self, name: str) -> None:
        """Scroll a figure into sight and wait until it is drawn."""
        self.ask(f"document.getElementById('{name}').scrollIntoView({{behavior: 'instant', block: 'center'}})")
        self.until(f"document.querySelector('#{name} .main-svg, #{name} .empty')")

    def press(self, key: str, code: int, text: str = "") -> None:
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code, text=text)

    def picture(self, path: Path) -> None:
        size = self.call("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
        shot = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True, clip=clip)
        path.write_bytes(base64.b64decode(shot["data"]))

    def close(self) -> None:
        os.close(self.outgoing)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process, signal.SIGKILL)
        os.waitpid(self.process, 0)
        os.close(self.incoming)


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    found = Browser(tmp_path_factory.mktemp("profile"))
    yield found
    found.close()


FIGURES = "[...document.querySelectorAll('figure .plot')].map(plot => plot.closest('figure').id)"


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    runs = [
        write_run(folder / f"{method}-{seed}", method, seed, readouts=("received", "adapted"))
        for method in ("local", "fedavg", "feddl", "fedmn")
        for seed in (0, 1)
    ]
    return write_page(runs, folder / "report.html", title="har")


def choose(browser: Browser, where: str, option: str) -> None:
    """Choose the option that begins with these words in the first select there, as a user would."""
    browser.ask(
        f"(() => {{ const s = document.querySelector('{where} select');"
        f" s.selectedIndex = [...s.options].findIndex(o => o.text.startsWith('{option}'));"
        " s.dispatchEvent(new Event('change')); })()"
    )


def cells(browser: Browser) -> Any:
    return browser.ask("JSON.stringify(document.querySelector('#quilt .plot').data[0].z)")


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [1280, 390])
def test_every_figure_is_drawn_and_the_console_is_clean(browser: Browser, page: Path, width: int, dark: bool) -> None:
    browser.open(page, width=width, dark=dark)
    names = browser.ask(FIGURES)
    assert len(names) == 11
    for name in names:
        browser.show(name)
        assert browser.ask(f"document.querySelector('#{name} .main-svg') !== null"), f"{name} is empty"
        assert browser.ask(f"document.querySelector('#{name} .plot').getAttribute('aria-label').length > 20")
    assert browser.ask("document.documentElement.scrollWidth") == width  # nothing sticks out to the side
    paper = browser.ask("getComputedStyle(document.body).backgroundColor")
    assert (paper == "rgb(18, 22, 26)") == dark
    assert browser.complaints == []
    assert all(url == page.as_uri() or url.startswith("data:") for url in browser.requests)
    if keep := os.environ.get("FEDQUILT_PICTURES"):
        browser.ask("scrollTo({top: 0, behavior: 'instant'})")
        browser.picture(Path(keep) / f"report-{width}-{'dark' if dark else 'light'}.png")


def test_the_slider_moves_the_quilt_with_the_keyboard(browser: Browser, page: Path) -> None:
    browser.open(page)
    browser.show("quilt")
    assert browser.ask("document.querySelector('#plan select').selectedOptions[0].text") == "feddl, seed 0"
    at_end = cells(browser)
    browser.ask("document.getElementById('round').focus()")
    for _ in range(5):
        browser.press("ArrowLeft", 37)
    browser.until("document.getElementById('round-now').textContent === '5 of 10'")
    browser.until(f"JSON.stringify(document.querySelector('#quilt .plot').data[0].z) !== {json.dumps(at_end)}")
    # FedDL's second grouping came in round 5: conv2 has two circles, what lies above it is private.
    assert browser.ask("new Set(document.querySelector('#quilt .plot').data[0].z.map(row => row[1])).size") == 2
    assert browser.ask("document.querySelector('#quilt .plot').data[0].z.every(row => row[4] === null)")
    assert browser.ask("document.getElementById('round').getAttribute('aria-valuetext')") == (
        "round 5 of 10, plan of round 5"
    )
    browser.press("Home", 36)
    browser.until("document.getElementById('round-now').textContent === '0 of 10'")
    browser.ask("document.querySelector('[aria-label=\"Next change of the plan\"]').click()")
    browser.until("document.getElementById('round-now').textContent === '3 of 10'")
    assert browser.complaints == []


def test_the_tree_of_circles_and_the_routes(browser: Browser, page: Path) -> None:
    browser.open(page)
    browser.show("circles")
    told = browser.ask("document.querySelector('#circles .plot').getAttribute('aria-label')")
    assert told == (
        "Circles from unit to unit: conv1 1 circle of 12; conv2 2 circles of 6, 6; fc1 4 circles of 3, 3, 3, 3; "
        "fc2 4 circles of 2, 2, 2, 2; head private"
    )
    choose(browser, "#plan", "fedavg")  # the same for all units: one column
    ticks = "document.querySelector('#circles .plot').layout.xaxis.ticktext.join()"
    browser.until(f"{ticks} === 'conv1 – head'")
    choose(browser, "#plan", "fedmn")
    browser.until("document.querySelector('#circles .plot').getAttribute('aria-label').startsWith('Blocks in use')")
    assert "routes" in browser.ask("document.querySelector('#circles figcaption p').textContent")
    assert browser.complaints == []


def test_choices_numbers_and_theme(browser: Browser, page: Path) -> None:
    browser.open(page)
    lines = "document.querySelector('#accuracy-over-rounds .plot').data.filter(t => t.name).length"
    assert browser.ask(lines) == 4
    browser.ask("document.querySelector('#chips button').focus()")
    browser.press(" ", 32, " ")
    browser.until(f"{lines} === 3")
    browser.ask("document.querySelector('#accuracy-over-rounds summary').click()")
    browser.until("document.querySelectorAll('#accuracy-over-rounds tbody tr').length === 30")  # 3 methods, 10 rounds
    name, accuracy = browser.ask(
        "[...document.querySelector('.facts dd').childNodes].map(node => node.textContent.replace('%', '').trim())"
    )
    rows = browser.ask("[...document.querySelectorAll('#comparison tbody tr')].map(row => row.innerText)")
    assert [row for row in rows if name in row and accuracy in row]  # the tile says what the table says
    before = browser.ask("document.querySelector('#comparison tbody td:nth-child(2)').textContent")
    choose(browser, "#picks", "adapted")
    browser.until(f"document.querySelector('#comparison tbody td:nth-child(2)').textContent !== '{before}'")
    browser.ask("document.getElementById('theme').click()")
    assert browser.ask("getComputedStyle(document.body).backgroundColor") == "rgb(18, 22, 26)"
    browser.ask(
        "(() => { const make = URL.createObjectURL;"
        " URL.createObjectURL = blob => { window.saved = blob; return make.call(URL, blob); }; })()"
    )
    browser.ask("document.querySelector('[aria-label=\"Accuracy of each client: numbers as CSV\"]').click()")
    text = browser.ask("saved.text()")
    assert text.splitlines()[0] == "client,fedavg,feddl,fedmn"
    assert len(text.splitlines()) == 13
    browser.show("quilt")
    browser.ask("document.querySelector('[aria-label=\"The quilt: picture as SVG\"]').click()")
    browser.until("saved.type === 'image/svg+xml'")
    assert "<svg" in browser.ask("saved.text()")
    assert browser.complaints == []


def test_it_can_be_used_without_a_mouse(browser: Browser, page: Path) -> None:
    browser.open(page)
    browser.press("Tab", 9)
    assert browser.ask("document.activeElement.className") == "skip"
    tree = browser.call("Accessibility.getFullAXTree")["nodes"]
    roles = ("button", "combobox", "slider", "link", "image", "region")
    named = [(n["role"]["value"], n.get("name", {}).get("value", "")) for n in tree if not n.get("ignored")]
    assert {"slider", "combobox", "button"} <= {role for role, _ in named}
    assert [role for role, name in named if role in roles and not name.strip()] == []


def test_names_are_text(browser: Browser, tmp_path: Path) -> None:
    image = "<img src=x onerror='window.hacked=1'>"
    evil = ["<script>window.hacked=1</script>", image, "</script><b>", "@@plotly@@", "%{x}", "=1+1"]
    run = write_run(tmp_path / "<b>run", "feddl", clients=6, names=evil)
    told = json.loads((run / "summary.json").read_text()) | {"decisions": [image, "left as it was"], "changes": [image]}
    (run / "summary.json").write_text(json.dumps(told))
    write_run(tmp_path / "local", "local", clients=6, names=evil)
    page = write_page([run, tmp_path / "local"], tmp_path / "report.html", title=image)
    browser.open(page)
    for name in browser.ask(FIGURES):
        browser.show(name)
        browser.ask(f"document.querySelector('#{name} summary').click()")
    assert browser.ask("document.getElementById('title').textContent") == image
    options = browser.ask("[...document.querySelectorAll('#one-client-picks select')[1].options].map(o => o.text)")
    assert options == evil
    shown = browser.ask("[...document.querySelectorAll('#quilt .ytick text')].map(t => t.textContent)")
    assert "</script><b>" in shown
    choose(browser, "#plan", "feddl")
    decided = browser.ask("[...document.querySelectorAll('#decisions li')].map(li => li.textContent)")
    assert decided == [image, image, "left as it was"]  # what was changed, then all that was asked
    choose(browser, "#plan", "local")
    assert browser.ask("document.getElementById('decisions').textContent") == ""
    assert browser.ask("window.hacked") is None
    assert browser.ask("document.querySelectorAll('main img, main b:not(td b)').length") == 0
    assert browser.complaints == []


def test_a_run_with_hardly_anything_in_it(browser: Browser, tmp_path: Path) -> None:
    (tmp_path / "summary.json").write_text('{"scenario": "digits", "method": "fedavg", "seed": 0}')
    browser.open(write_page([tmp_path], tmp_path / "report.html"), drawn=False)
    browser.show("accuracy-over-rounds")
    assert "No rounds have been evaluated yet" in browser.ask("document.body.textContent")
    assert browser.ask("document.querySelector('#accuracy-over-rounds button').checkVisibility()") is False
    assert browser.complaints == []


def test_a_page_of_numbers_has_no_figures_of_classes(browser: Browser, tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", "fedavg", clients=3, rounds=2)
    (run / "confusion.json").unlink()
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    without = [{key: value for key, value in row.items() if key != "f_by_class"} for row in rows]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in without))
    browser.open(write_page([run], tmp_path / "report.html"), drawn=False)
    browser.show("client-over-rounds")
    assert browser.ask("document.querySelectorAll('#client-classes, #client-confusion').length") == 0
    assert browser.complaints == []


def test_500_clients_and_200_rounds_open_in_a_few_seconds(browser: Browser, tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", "fedmn", clients=500, rounds=200)  # whose plan changes in every round
    started = time.monotonic()
    page = write_page([run], tmp_path / "report.html")
    written = time.monotonic() - started
    assert page.stat().st_size < 8e6  # of which plotly.js takes 5
    # The page's own processor time: what it costs on a machine that has nothing else to do.
    browser.call("Performance.enable", timeDomain="threadTicks")
    started = time.monotonic()
    browser.open(page)
    opened = time.monotonic() - started
    spent = {m["name"]: m["value"] for m in browser.call("Performance.getMetrics")["metrics"]}["TaskDuration"]
    browser.show("quilt")
    browser.until("document.querySelector('#quilt .plot').data[0].z.length === 500")
    step = browser.ask(
        "(async () => { const range = document.getElementById('round'), start = performance.now();"
        " for (let i = 0; i < 5; i++) { range.value = 100 + i; range.dispatchEvent(new Event('input'));"
        " await new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done))); }"
        " return (performance.now() - start) / 5; })()"
    )
    print(f"written in {written:.1f} s, opened in {opened:.1f} s ({spent:.1f} s of work), slider {step:.0f} ms a step")
    assert spent < 8  # 2 to 3 on an idle machine; the wide limits below are for one that is busy
    assert opened < 90
    assert step < 6000
    assert browser.complaints == []


def test_a_watched_page_follows_its_run(browser: Browser, tmp_path: Path) -> None:
    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, format: str, *args: Any) -> None:
            pass

    run = write_run(tmp_path / "run", "feddl", rounds=4)
    (tmp_path / "index.html").write_text(render_page(page_data([run]), every=0.1), encoding="utf-8")
    (tmp_path / "data.json").write_text(data_json(page_data([run])), encoding="utf-8")
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(tmp_path))) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        browser.open(f"http://127.0.0.1:{server.server_port}/index.html")
        browser.until("document.getElementById('round').max === '4'")
        write_run(tmp_path / "run", "feddl", rounds=6)
        (tmp_path / "data.part").write_text(data_json(page_data([run])), encoding="utf-8")
        os.replace(tmp_path / "data.part", tmp_path / "data.json")
        browser.until("document.getElementById('round').max === '6'")
        browser.open(tmp_path / "index.html", drawn=False)  # away from the server, which is about to stop
        server.shutdown()
