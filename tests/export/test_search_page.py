"""The page that searches pictures by text: over HTTP, from elsewhere, and in a real browser."""

from __future__ import annotations

import contextlib
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
from polyfed.export.search_page import SearchServer, pictures_in, pictures_of_run, search_server

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
def page(tiny_run: Path, folder: Path) -> Iterator[SearchServer]:
    model = load_model(tiny_run)
    with search_server(model, pictures_in(folder, model), k=5) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def cookie(page: SearchServer) -> str:
    return f"polyfed-{page.server_address[1]}={page.token}"


def asked(page: SearchServer, path: str, method: str = "GET", **headers: str) -> tuple[int, dict[str, str], bytes]:
    """As a browser that was given the token."""
    connection = http.client.HTTPConnection("127.0.0.1", page.server_address[1], timeout=30)
    connection.request(method, path, headers={"Cookie": cookie(page)} | headers)
    answer = connection.getresponse()
    content = answer.read()
    connection.close()
    return answer.status, dict(answer.getheaders()), content


def test_what_is_found_is_what_the_model_finds(page: SearchServer, tiny_run: Path, folder: Path) -> None:
    status, headers, content = asked(page, "/?q=a+red+square")
    names = re.findall(r"<figcaption>(.*?) <span", content.decode())
    model = load_model(tiny_run)
    pictures = pictures_in(folder, model)
    expected = [pictures.names[hit.position] for hit in model.search(QUERY, pictures.vectors, 5)]
    assert (status, len(pictures)) == (200, 7)
    assert [name.replace("&lt;", "<").replace("&gt;", ">") for name in names] == expected
    assert headers["Cache-Control"] == "no-store"
    assert headers["X-Frame-Options"] == "DENY"
    assert b"<b>" not in content


def test_a_picture_opens_as_a_jpeg_and_nothing_else_opens(page: SearchServer) -> None:
    status, headers, content = asked(page, "/picture/0")
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
        assert asked(page, path.replace("²", "%C2%B2"))[0] == 404, path


@pytest.mark.parametrize("host", ["evil.example", "evil.example:80", "127.0.0.1", "127.0.0.1.evil.example", ""])
def test_another_host_is_refused(page: SearchServer, host: str) -> None:
    status, _, content = asked(page, "/?q=red", Host=host)
    assert (status, b"polyfed search" in content) == (403, False)
    assert asked(page, "/picture/0", Host=host)[0] == 403
    assert asked(page, "/", Host=f"localhost:{page.server_address[1]}")[0] == 200


def test_without_the_token_nothing_is_answered(page: SearchServer) -> None:
    token, port = page.token, page.server_address[1]
    for path in ("/", "/?q=red", "/picture/0", "/x", "/?token=", f"/?token={token[:-1]}", "/?token=%ff%00"):
        for cookies in ("", f"polyfed-{port}={token}x", f"polyfed={token}", "polyfed-1; =;;", "\xff\xfe=\x80"):
            status, headers, content = asked(page, path, Cookie=cookies)
            assert status in (400, 403), (path, cookies)
            assert token.encode() not in content
            assert token not in str(headers)


def test_the_address_that_is_printed_leaves_the_token_in_a_cookie_alone(page: SearchServer, capfd: Any) -> None:
    assert page.address.startswith(f"http://127.0.0.1:{page.server_address[1]}/?token=")
    path = page.address.removeprefix(f"http://127.0.0.1:{page.server_address[1]}")
    status, headers, content = asked(page, path, Cookie="")
    assert (status, headers["Location"], content) == (303, "/", b"")
    assert headers["Set-Cookie"] == f"{cookie(page)}; HttpOnly; SameSite=Strict; Path=/"
    assert headers["Referrer-Policy"] == "no-referrer"
    other = f"polyfed-{page.server_address[1]}=of-another-page; a=b; {cookie(page)}"
    for below in ("/", "/picture/0"):
        status, headers, content = asked(page, below, Cookie=other)
        assert status == 200
        assert page.token.encode() not in content
    assert page.token not in "".join(capfd.readouterr())
    assert asked(page, path, Cookie="", Host="evil.example")[0] == 403


MALFORMED = {
    "too many fields": "/?q=x&a&b&c&d&e&f",
    "an unfinished bracket": "http://[/",
    "many fields": "/?" + "&".join("q" * 50),
}


@pytest.mark.parametrize("path", MALFORMED.values(), ids=MALFORMED)
def test_a_malformed_address_is_refused(page: SearchServer, path: str, capfd: Any) -> None:
    assert asked(page, path, Host=f"127.0.0.1:{page.server_address[1]}")[0] == 400
    assert capfd.readouterr() == ("", "")


REQUESTS = {
    "no request": (b"\r\n\r\n", b""),
    "noise": (bytes(range(256)) + b"\r\n\r\n", b" 400 "),
    "an old request": (b"GET /\r\n\r\n", b"its own machine"),
    "an odd version": (b"GET / HTTP/x.y\r\n\r\n", b" 400 "),
    "another version": (b"GET / HTTP/9.9\r\n\r\n", b" 505 "),
    "a long address": (b"GET /" + b"x" * 70_000 + b" HTTP/1.0\r\n\r\n", b" 414 "),
    "a long header": (b"GET / HTTP/1.0\r\nCookie: " + b"x" * 70_000 + b"\r\n\r\n", b" 431 "),
    "many headers": (b"GET / HTTP/1.0\r\n" + b"a: b\r\n" * 200 + b"\r\n", b" 431 "),
    "no header": (b"GET / HTTP/1.0\r\nno header\r\n\r\n", b" 403 "),
    "an unknown method": (b"PUT / HTTP/1.0\r\n\r\n", b" 501 "),
}


@pytest.mark.parametrize(("request_", "status"), REQUESTS.values(), ids=REQUESTS)
def test_a_malformed_request_is_answered_and_shows_nothing(
    page: SearchServer, request_: bytes, status: bytes, capfd: Any
) -> None:
    with socket.create_connection(("127.0.0.1", page.server_address[1]), 30) as stream:
        stream.sendall(request_)
        stream.shutdown(socket.SHUT_WR)
        answer = stream.makefile("rb").read()
    assert status in answer
    assert page.token.encode() not in answer
    assert "Traceback" not in "".join(capfd.readouterr())
    assert asked(page, "/")[0] == 200


@pytest.mark.slow
def test_connections_that_wait_are_bounded(page: SearchServer) -> None:
    before = threading.active_count()
    waiting = [socket.create_connection(("127.0.0.1", page.server_address[1]), 30) for _ in range(60)]
    with pytest.raises(OSError):  # noqa: PT011 - of two kinds, by when the server closes it
        asked(page, "/")
    assert threading.active_count() - before <= 32
    for stream in waiting:
        stream.close()
    for _ in range(100):
        with contextlib.suppress(OSError):
            if asked(page, "/")[0] == 200:
                return
    pytest.fail("the server does not answer any more")


def test_pictures_outside_the_folder_and_what_is_no_file_are_not_read(tiny_run: Path, tmp_path: Path) -> None:
    inside = tmp_path / "pictures"
    inside.mkdir()
    picture = np.zeros((4, 4, 3), np.uint8)
    for path in (inside / "own.png", tmp_path / "secret.png", inside / "gone.png"):
        Image.fromarray(picture).save(path)
    (inside / "link.png").symlink_to(tmp_path / "secret.png")
    (inside / "inner.png").symlink_to("own.png")
    (inside / "loop.png").symlink_to("loop.png")
    (inside / "zero.png").symlink_to("/dev/zero")
    os.mkfifo(inside / "pipe.png")
    model = load_model(tiny_run)
    pictures = pictures_in(inside, model)
    assert list(pictures.names) == ["gone.png", "inner.png", "own.png"]
    (inside / "gone.png").unlink()
    (inside / "gone.png").symlink_to(tmp_path / "secret.png")  # exchanged while it is served
    with search_server(model, pictures) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        assert [asked(server, f"/picture/{number}")[0] for number in range(3)] == [404, 200, 200]
        server.shutdown()
        thread.join()


def test_it_listens_on_the_loopback_address_alone_and_changes_nothing(page: SearchServer) -> None:
    others = {info[4][0] for info in socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET)}
    for address in others - {"127.0.0.1", "127.0.1.1"}:
        with pytest.raises(OSError), socket.create_connection((address, page.server_address[1]), timeout=2):  # noqa: PT011
            pass
    assert asked(page, "/", "POST")[0] == 501
    assert asked(page, "/", "HEAD")[2] == b""


def test_odd_queries_are_answered(page: SearchServer) -> None:
    for query in ("%00", "%3Cscript%3E", "x" * 5000, "%ff", "&q=1&q=2&q=3", "+"):
        status, _, content = asked(page, f"/?q={query}")
        assert status == 200, query
        assert b"<script>\xff" not in content
    assert asked(page, "/?q=%3Cscript%3Ealert(1)%3C/script%3E")[2].count(b"<script>") == 0


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


@pytest.mark.slow  # a process that starts; the tests above ask a server in this one
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
            port, token = re.search(r"http://127\.0\.0\.1:(\d+)/\?token=([\w-]{43}) ", line).groups()  # type: ignore[union-attr]
            assert line.startswith("7 pictures at")
            for path, status in (("/?q=red", 403), (f"/?token={token}", 303)):
                with socket.create_connection(("127.0.0.1", int(port)), 30) as stream:
                    stream.sendall(f"GET {path} HTTP/1.0\r\nHost: 127.0.0.1:{port}\r\n\r\n".encode())
                    assert f" {status} " in stream.makefile().readline()
            process.send_signal(signal.SIGINT)
            assert process.wait(30) == 0
        finally:
            process.kill()


@pytest.mark.skipif(PROGRAM is None, reason=f"no browser found: none of {', '.join(NAMES)} is installed")
def test_a_browser_searches(page: SearchServer, tmp_path: Path) -> None:
    browser: Any = Browser(tmp_path / "profile")
    try:
        browser.open(page.address)
        assert browser.js("location.search + document.cookie") == ""
        assert browser.js("document.querySelectorAll('img').length") == 0
        browser.js("document.getElementById('q').value = 'a red square'")
        browser.events.clear()
        browser.click("document.querySelector('button[type=submit]')")
        while not browser.named("Page.loadEventFired"):
            browser.events.append(browser.next_event())
        assert browser.js("location.search") == "?q=a+red+square"
        assert browser.js("[...document.images].every(image => image.naturalWidth > 0) && document.images.length") == 5
        assert browser.js("document.getElementById('q').value") == QUERY
        assert [entry for entry in browser.complaints() if "favicon" not in str(entry)] == []
    finally:
        browser.close()
