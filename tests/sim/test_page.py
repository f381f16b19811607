"""The page of `reproduce`: self-contained, every figure drawn, no error in a real browser."""

import base64
import itertools
import json
import os
import re
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from trainingcxl.sim.figures import FIGURES, draw_figures
from trainingcxl.sim.page import render_page

CHROMIUM = Path("/usr/bin/chromium")
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--remote-debugging-pipe",
    "--window-size=1200,1000",
)


@pytest.fixture(scope="session")
def page(evaluation, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("reproduce")
    text = render_page(evaluation, draw_figures(evaluation, folder))
    path = folder / "index.html"
    path.write_text(text, encoding="utf-8")
    return path


class _Links(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self.tags: set[str] = set()

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        self.found += [value for key, value in attrs if key in ("src", "href", "data")]


def test_nothing_leaves_the_page(page):
    text = page.read_text()
    links = _Links()
    links.feed(text)
    assert all(link.startswith("data:") for link in links.found)
    assert not links.tags & {"script", "iframe", "object", "embed"}
    assert "url(" not in text
    assert "default-src 'none'" in text
    for data in re.findall(r"data:image/svg\+xml;base64,([A-Za-z0-9+/=]+)", text):
        svg = base64.b64decode(data).decode()
        links = re.findall(r'(?:href|src)="([^"]*)"', svg)
        assert all(link.startswith("#") for link in links)


def test_every_figure_is_on_disk_and_on_the_page(page):
    text = page.read_text()
    for name in FIGURES:
        assert (page.parent / f"{name}.png").stat().st_size > 5000
        assert (page.parent / f"{name}.svg").stat().st_size > 5000
        assert f'id="figure-{name}"' in text


def test_targets_misses_and_the_unfitted_run_are_shown(page):
    text = page.read_text()
    assert text.count("MISSED") == 1
    assert "nothing fitted" in text
    for words in ("predicted", "fitted", "host-bounced", "DRAM pool of 192 DIMMs", "never from a"):
        assert words in text


def test_hatches_beside_colours(page):
    for name in ("breakdown", "energy", "utilisation", "ladder"):
        svg = (page.parent / f"{name}.svg").read_text()
        assert svg.count("<pattern") >= 3, f"{name} is told apart by colour alone"


class Browser:
    """Headless Chromium, driven over its debugging pipe; loopback is not used either."""

    def __init__(self, profile: Path) -> None:
        to_child, self._write = os.pipe()
        self._read, from_child = os.pipe()

        def place() -> None:
            # Move both ends out of the way first, then to the descriptors Chromium expects.
            source, sink = os.dup(to_child), os.dup(from_child)
            os.dup2(source, 3)
            os.dup2(sink, 4)

        self._process = subprocess.Popen(
            [str(CHROMIUM), *FLAGS, f"--user-data-dir={profile}"],
            preexec_fn=place,
            pass_fds=(3, 4),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_child)
        os.close(from_child)
        self._buffer = b""
        self._ids = itertools.count(1)
        self.events: list[dict[str, Any]] = []

    def call(self, method: str, session: str | None = None, **params: Any) -> dict[str, Any]:
        number = next(self._ids)
        message: dict[str, Any] = {"id": number, "method": method, "params": params}
        if session:
            message["sessionId"] = session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            reply = self._next(time.monotonic() + 60)
            if reply.get("id") == number:
                assert "error" not in reply, reply
                return reply["result"]
            self.events.append(reply)

    def wait_for(self, method: str, seconds: float = 60) -> None:
        deadline = time.monotonic() + seconds
        while not any(e.get("method") == method for e in self.events):
            self.events.append(self._next(deadline))

    def _next(self, deadline: float) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            left = deadline - time.monotonic()
            ready, _, _ = select.select([self._read], [], [], max(left, 0))
            assert ready, "Chromium does not answer"
            self._buffer += os.read(self._read, 1 << 20)
        text, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(text)

    def close(self) -> None:
        self.call("Browser.close")
        self._process.wait(timeout=30)
        os.close(self._write)
        os.close(self._read)


@pytest.fixture
def browser(tmp_path) -> Iterator[Browser]:
    if not CHROMIUM.exists():
        pytest.skip(f"{CHROMIUM} is not installed")
    profile = tmp_path / "profile"
    found = Browser(profile)
    yield found
    found.close()
    shutil.rmtree(profile, ignore_errors=True)


def test_page_in_chromium(page, browser):
    target = browser.call("Target.createTarget", url="about:blank")["targetId"]
    session = browser.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
    for domain in ("Page", "Runtime", "Log", "Network"):
        browser.call(f"{domain}.enable", session)
    browser.call("Page.navigate", session, url=page.as_uri())
    browser.wait_for("Page.loadEventFired")
    script = (
        "Promise.all([...document.images].map(i => i.decode().then(() => "
        "[i.id, i.naturalWidth, i.naturalHeight, i.getBoundingClientRect().width])))"
    )
    found = browser.call(
        "Runtime.evaluate", session, expression=script, awaitPromise=True, returnByValue=True
    )
    assert "exceptionDetails" not in found
    images = found["result"]["value"]
    assert {name for name, *_ in images} == {f"figure-{name}" for name in FIGURES}
    for name, width, height, shown in images:
        assert min(width, height, shown) > 200, name
    wide = browser.call(
        "Runtime.evaluate",
        session,
        expression="document.documentElement.scrollWidth <= window.innerWidth",
        returnByValue=True,
    )
    assert wide["result"]["value"], "the page scrolls sideways"
    methods = [e.get("method") for e in browser.events]
    assert "Runtime.exceptionThrown" not in methods
    assert "Runtime.consoleAPICalled" not in methods
    errors = [e for e in browser.events if e.get("method") == "Log.entryAdded"]
    assert not errors
    urls = [
        e["params"]["request"]["url"]
        for e in browser.events
        if e.get("method") == "Network.requestWillBeSent"
    ]
    outside = [u for u in urls if u != page.as_uri() and not u.startswith("data:")]
    assert outside == []
    shot = browser.call("Page.captureScreenshot", session, captureBeyondViewport=True)
    data = base64.b64decode(shot["data"])
    assert data.startswith(b"\x89PNG")
    if folder := os.environ.get("TRAININGCXL_SCREENSHOTS"):
        metrics = browser.call("Page.getLayoutMetrics", session)["cssContentSize"]
        for part in range(int(metrics["height"] // 1400) + 1):
            clip = {"x": 0, "y": part * 1400, "width": 1200, "height": 1400, "scale": 1}
            shot = browser.call("Page.captureScreenshot", session, clip=clip,
                                captureBeyondViewport=True)  # fmt: skip
            path = Path(folder) / f"page-{part}.png"
            path.write_bytes(base64.b64decode(shot["data"]))
        printed = browser.call("Page.printToPDF", session)
        (Path(folder) / "page.pdf").write_bytes(base64.b64decode(printed["data"]))
