"""The HTML report in a real browser, driven through the DevTools protocol over a pipe (no port, no dependency)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from browsers import NAMES, PROGRAM, Browser
from polyfed.reporting.page import write_html_report
from polyfed.runs.records import RunRecords
from run_folders import write_run

HOSTILE = "<script>window.pwned = 1</script><img src=x onerror='window.pwned = 1'>\"&"

pytestmark = pytest.mark.skipif(PROGRAM is None, reason=f"no browser found: none of {', '.join(NAMES)} is installed")


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> RunRecords:
    folder = write_run(
        tmp_path_factory.mktemp("runs") / "run", name=HOSTILE, description=HOSTILE, algorithm={"name": "creamfl"}
    )
    event = {"round": 4, "participant": HOSTILE, "kind": "event", "event": "client_excluded", "reason": HOSTILE}
    measured = {"round": 12, "participant": HOSTILE, "kind": "test", "metrics": {"accuracy": 1.0}}
    sent = {"round": 12, "client": HOSTILE, "direction": "up", "step": HOSTILE, "bundle": HOSTILE, "kind": HOSTILE}
    with (folder / "metrics.jsonl").open("a") as stream:
        stream.writelines(json.dumps(line) + "\n" for line in (event, measured))
    with (folder / "ledger.jsonl").open("a") as stream:
        stream.write(json.dumps(sent | {"dtype": "float32", "bytes": 9_000_000_000}) + "\n")
    return RunRecords.load(folder)


@pytest.fixture(scope="module")
def report(records: RunRecords) -> Path:
    return write_html_report(records)


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    opened = Browser(tmp_path_factory.mktemp("profile"))
    yield opened
    opened.close()


@pytest.fixture
def page(browser: Browser, report: Path) -> Iterator[Browser]:
    browser.open(report)
    yield browser
    assert browser.complaints() == []


def test_nothing_is_requested_and_nothing_runs(page, report):
    urls = {event["request"]["url"] for event in page.named("Network.requestWillBeSent")}
    assert report.as_uri() in urls
    assert all(url == report.as_uri() or url.startswith("data:image/png;base64,") for url in urls)
    assert page.js("document.scripts.length") == 0


def test_hostile_text_stays_text(page):
    assert page.js("window.pwned") is None
    assert page.js("document.querySelector('h1').textContent") == HOSTILE
    names = "[...document.querySelectorAll('#clients tbody th')].map(cell => cell.textContent)"
    assert HOSTILE in page.js(names)
    assert page.js("document.querySelectorAll('img').length") == 0


def test_scripts_are_refused(browser, report):
    browser.open(report)
    browser.js("{ const s = document.createElement('script'); s.text = 'window.pwned = 1'; document.body.append(s); }")
    assert browser.js("window.pwned") is None
    assert "Content Security Policy" in json.dumps(browser.complaints())


def test_drawings_are_shown_with_their_values(page, records):
    assert page.js("[...document.querySelectorAll('.drawing svg')].every(s => s.getBoundingClientRect().width > 300)")
    titles = page.js("[...document.querySelectorAll('#server svg title')].map(title => title.textContent)")
    last = records.last("server")["r1_sum"]
    assert any(text.startswith("round 12\n") and f"r1_sum test: {last:.2f}" in text for text in titles)


@pytest.mark.parametrize("width", [400, 768, 1280])
def test_no_width_needs_sideways_scrolling(browser, report, width):
    browser.call("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False)
    try:
        browser.open(report)
        assert browser.js("document.documentElement.scrollWidth") <= width
    finally:
        browser.call("Emulation.clearDeviceMetricsOverride")


def test_dark_mode(page):
    background = "getComputedStyle(document.body).backgroundColor"
    light = page.js(background)
    page.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": "dark"}])
    dark = page.js(background)
    page.call("Emulation.setEmulatedMedia", features=[])
    assert (light, dark) == ("rgb(245, 246, 248)", "rgb(15, 19, 23)")


def test_on_paper_the_menu_is_gone(page):
    page.call("Emulation.setEmulatedMedia", media="print")
    assert page.js("[...document.querySelectorAll('nav')].filter(e => e.offsetParent).length") == 0
    page.call("Emulation.setEmulatedMedia", media="")
