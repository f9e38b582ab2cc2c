"""The page that searches pictures by text: over HTTP, from elsewhere, and in a real browser."""

from __future__ import annotations

import http.client
import io
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from browsers import NAMES, PROGRAM, Browser
from polyfed import load_model, open_run
from polyfed.core.errors import ConfigError, DataError
from polyfed.export.search_page import pictures_in, pictures_of_run, search_server

QUERY = "a red square"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    top = tmp_path_factory.mktemp("pictures")
    (top / "below").mkdir()
    values = np.random.default_rng(0).integers(0, 255, (6, 20, 30, 3), dtype=np.uint8)
    for number, pixels in enumerate(values):
        Image.fromarray(pixels).save(top / ("below" if number % 2 else "") / f"{number}.png")
    (top / "broken.jpg").write_bytes(b"no picture")
    (top / "notes.txt").write_text("no picture either")
    (top / "<b>.png").write_bytes((top / "0.png").read_bytes())
    return top


@pytest.fixture(scope="module")
def port(tiny_run: Path, folder: Path) -> Iterator[int]:
    model = load_model(tiny_run)
    with search_server(model, pictures_in(folder, model), k=5) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        yield server.server_address[1]
        server.shutdown()
        thread.join()


def asked(port: int, path: str, method: str = "GET", **headers: str) -> tuple[int, dict[str, str], bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    connection.request(method, path, headers=headers)
    answer = connection.getresponse()
    content = answer.read()
    connection.close()
    return answer.status, dict(answer.getheaders()), content


def test_what_is_found_is_what_the_model_finds(port: int, tiny_run: Path, folder: Path) -> None:
    status, headers, content = asked(port, "/?q=a+red+square")
    names = re.findall(r"<figcaption>(.*?) <span", content.decode())
    model = load_model(tiny_run)
    pictures = pictures_in(folder, model)
    expected = [pictures.names[hit.position] for hit in model.search(QUERY, pictures.vectors, 5)]
    assert (status, len(pictures)) == (200, 7)
    assert [name.replace("&lt;", "<").replace("&gt;", ">") for name in names] == expected
    assert headers["Cache-Control"] == "no-store"
    assert headers["X-Frame-Options"] == "DENY"
    assert b"<b>" not in content


def test_a_picture_opens_as_a_jpeg_and_nothing_else_opens(port: int) -> None:
    status, headers, content = asked(port, "/picture/0")
    assert (status, headers["Content-Type"]) == (200, "image/jpeg")
    assert Image.open(io.BytesIO(content)).size == (30, 20)
    for path in (
        "/picture/7",
        "/picture/-1",
        "/picture/x",
        "/picture/²",
        "/picture/../notes.txt",
        "/notes.txt",
        "/etc/passwd",
    ):
        assert asked(port, path.replace("²", "%C2%B2"))[0] == 404, path


@pytest.mark.parametrize("host", ["evil.example", "evil.example:80", "127.0.0.1", "127.0.0.1.evil.example", ""])
def test_another_host_is_refused(port: int, host: str) -> None:
    status, _, content = asked(port, "/?q=red", Host=host)
    assert (status, b"polyfed search" in content) == (403, False)
    assert asked(port, "/picture/0", Host=host)[0] == 403
    assert asked(port, "/", Host=f"localhost:{port}")[0] == 200


def test_it_listens_on_the_loopback_address_alone_and_changes_nothing(port: int) -> None:
    others = {info[4][0] for info in socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET)}
    for address in others - {"127.0.0.1", "127.0.1.1"}:
        with pytest.raises(OSError), socket.create_connection((address, port), timeout=2):  # noqa: PT011
            pass
    assert asked(port, "/", "POST")[0] == 501
    assert asked(port, "/", "HEAD")[2] == b""


def test_odd_queries_are_answered(port: int) -> None:
    for query in ("%00", "%3Cscript%3E", "x" * 5000, "%ff", "&q=1&q=2&q=3", "+"):
        status, _, content = asked(port, f"/?q={query}")
        assert status in (200, 400) or not content, query
        assert b"<script>\xff" not in content
    assert asked(port, "/?q=%3Cscript%3Ealert(1)%3C/script%3E")[2].count(b"<script>") == 1


def test_pictures_of_the_runs_own_test_data(tiny_run: Path) -> None:
    opened = open_run(tiny_run)
    pictures = pictures_of_run(opened, opened.model)
    assert (pictures.title, len(pictures)) == ("scenes, test", 12)
    np.testing.assert_allclose(pictures.vectors[:1], opened.model.encode(images=pictures.read(0)), atol=1e-6)


def test_what_cannot_be_served_says_why(tiny_run: Path, classifier_run: Path, tmp_path: Path, folder: Path) -> None:
    model = load_model(tiny_run)
    with pytest.raises(DataError, match="has no readable picture"):
        pictures_in(tmp_path, model)
    with pytest.raises(DataError, match="there is no folder"):
        pictures_in(tmp_path / "gone", model)
    other = load_model(classifier_run)
    with pytest.raises(ConfigError, match="no encoder of texts"):
        search_server(other, pictures_in(folder, other))
    with (
        search_server(model, pictures_in(folder, model)) as server,
        pytest.raises(ConfigError, match=r"cannot be used .*choose another --port"),
    ):
        search_server(model, pictures_in(folder, model), server.server_address[1])


def test_the_command_serves_until_it_is_interrupted(tiny_run: Path, folder: Path) -> None:
    command = [sys.executable, "-m", "polyfed.cli", "serve", str(tiny_run), "--pictures", str(folder), "--port", "0"]
    environment = os.environ | {"PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
        # also where these tests run in the background of a shell that has it ignored
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    with process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            port = int(line.split("http://127.0.0.1:")[1].split("/")[0])
            assert line.startswith("7 pictures at")
            assert asked(port, "/?q=red")[0] == 200
            process.send_signal(signal.SIGINT)
            assert process.wait(30) == 0
        finally:
            process.kill()


@pytest.mark.skipif(PROGRAM is None, reason=f"no browser found: none of {', '.join(NAMES)} is installed")
def test_a_browser_searches(port: int, tmp_path: Path) -> None:
    browser: Any = Browser(tmp_path / "profile")
    try:
        browser.open(f"http://127.0.0.1:{port}/")
        assert browser.js("document.querySelectorAll('img').length") == 0
        browser.js("document.getElementById('q').value = 'a red square'")
        browser.events.clear()
        browser.click("document.querySelector('button[type=submit]')")
        while not browser.named("Page.loadEventFired"):
            browser.events.append(browser._next())
        assert browser.js("location.search") == "?q=a+red+square"
        assert browser.js("[...document.images].every(image => image.naturalWidth > 0) && document.images.length") == 5
        assert browser.js("document.getElementById('q').value") == QUERY
        assert [entry for entry in browser.complaints() if "favicon" not in str(entry)] == []
    finally:
        browser.close()
