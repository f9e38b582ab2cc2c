"""A page that searches pictures by text with a trained model, for whoever knows its address on this machine.

The address has a random token, as that of a notebook: other users of the machine reach the port, and get nothing. A
browser keeps the token in a cookie, so that it stands neither in its history nor in links.
"""

from __future__ import annotations

import io
import logging
import secrets
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import parse_qs, urlsplit

import numpy as np
from PIL import Image, ImageOps

from polyfed.core.errors import ConfigError, DataError, RunError
from polyfed.core.untrusted import plain
from polyfed.data.pictures import opened_picture, picture_bytes
from polyfed.reporting.gallery import picture_shelf, thumbnail
from polyfed.reporting.page import rendered_page
from polyfed.runs.loaded import IMAGES, TEXTS, LoadedModel, Vectors
from polyfed.runs.opened import Run

HOST = "127.0.0.1"
_ENDINGS = {".jpg", ".jpeg", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff", ".avif"}
_LONGEST = 1000  # characters of a query
_SHOWN = 1024  # pixels of the longer side of a picture that is opened
_CHUNK = 256
_CONNECTIONS = 32  # at once, each with a thread
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class SearchedPictures:
    """Pictures that are searched.

    Attributes:
        title: where they are from.
        names: of each.
        read: number -> encoded picture.
        vectors: of each, by the model.
    """

    title: str
    names: Sequence[str]
    read: Callable[[int], bytes]
    vectors: Vectors

    def __len__(self) -> int:
        return len(self.names)


def pictures_in(folder: Path, model: LoadedModel) -> SearchedPictures:
    """All pictures below a folder; those that cannot be read are left out, and a warning says how many.

    Links that lead out of the folder, pipes and devices are not read.

    Raises:
        DataError: there is no such folder, or no readable picture in it.
    """
    if not folder.is_dir():
        raise DataError(f"there is no folder '{folder}'; give one with pictures")
    readable = _readable_in(folder)
    # in parts: a folder may hold more pictures than memory
    parts = (readable[start : start + _CHUNK] for start in range(0, len(readable), _CHUNK))
    vectors = np.concatenate([model.encode(images=[_encoded(folder, path) for path in part]) for part in parts])
    names = [plain(path.relative_to(folder).as_posix()) for path in readable]
    return SearchedPictures(plain(str(folder)), names, lambda number: _encoded(folder, readable[number]), vectors)


def pictures_of_run(run: Run, model: LoadedModel, most: int = 2000) -> SearchedPictures:
    """The pictures of a run's test data, the first ``most`` items.

    Raises:
        RunError: nobody has test data with pictures.
    """
    title, shelf = picture_shelf(run, most)
    if shelf is None:
        raise RunError(f"the test data of '{run.folder}' have no pictures; give a folder with --pictures")
    values = [value for value in shelf.values if isinstance(value, bytes)]
    names = [f"item {number}" for number in shelf.items.tolist()]
    return SearchedPictures(title, names, values.__getitem__, model.encode(images=values))


class SearchServer(ThreadingHTTPServer):
    """A server on the loopback address that answers whoever has its ``token``, a few connections at once."""

    daemon_threads, request_queue_size = True, _CONNECTIONS

    def __init__(self, port: int, handler: type[BaseHTTPRequestHandler]) -> None:
        self.token = secrets.token_urlsafe(32)
        self._free = threading.BoundedSemaphore(_CONNECTIONS)
        super().__init__((HOST, port), handler)

    @property
    def address(self) -> str:
        return f"http://{HOST}:{self.server_address[1]}/?token={self.token}"

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer in a thread, or not at all if all are busy."""
        if self._free.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say so in a line: most often the browser has gone; no traceback, which may show what was asked."""
        _log.warning("a request for the page was not answered (%s)", type(sys.exception()).__name__)


def search_server(model: LoadedModel, pictures: SearchedPictures, port: int = 0, k: int = 24) -> SearchServer:
    """The server of a page, ready for ``serve_forever``; whoever calls closes it.

    Args:
        model: of pictures and texts.
        pictures: what is searched.
        port: 0: any that is free.
        k: how many pictures are shown.

    Raises:
        ConfigError: the model has no encoder of texts or pictures, or the port is taken.
    """
    for kind in (TEXTS, IMAGES):
        model.modality_of(kind)
    handler = type(
        "SearchHandler", (_Handler,), {"model": model, "pictures": pictures, "k": k, "lock": threading.Lock()}
    )
    try:
        return SearchServer(port, handler)
    except (OSError, OverflowError) as error:
        raise ConfigError(f"port {port} cannot be used ({error}); choose another --port, or 0 for any") from error


def _readable_in(folder: Path) -> list[Path]:
    paths = sorted(path for path in folder.rglob("*") if path.suffix.lower() in _ENDINGS and not path.is_dir())
    readable = [path for path in paths if _opens(folder, path)]
    if not readable:
        raise DataError(f"'{folder}' has no readable picture ({', '.join(sorted(_ENDINGS))}); give another folder")
    if len(readable) < len(paths):
        _log.warning("%d of %d pictures in '%s' cannot be read", len(paths) - len(readable), len(paths), folder)
    return readable


def _encoded(folder: Path, path: Path) -> bytes:
    return picture_bytes({"path": path.relative_to(folder)}, folder)


def _opens(folder: Path, path: Path) -> bool:
    try:
        with opened_picture(_encoded(folder, path)) as image:
            image.load()
    except Exception:  # Pillow's decoders raise errors of many kinds
        return False
    return True


class _Handler(BaseHTTPRequestHandler):
    """Answers the page, and pictures by number; nothing is read from paths that a request names."""

    model: ClassVar[LoadedModel]
    pictures: ClassVar[SearchedPictures]
    k: ClassVar[int]
    lock: ClassVar[threading.Lock]
    server: SearchServer
    server_version, sys_version, timeout = "polyfed", "", 10

    def do_GET(self) -> None:
        """Answer, if the request has the token and names this machine: another name is a page's that was led here (DNS
        rebinding)."""
        port = self.server.server_address[1]
        if self.headers.get("Host") not in (f"{HOST}:{port}", f"localhost:{port}"):
            self._refuse(HTTPStatus.FORBIDDEN, "this page is for its own machine")
            return
        try:
            address = urlsplit(self.path)
            asked = {name: values[0] for name, values in parse_qs(address.query, max_num_fields=4).items()}
        except ValueError:
            self._refuse(HTTPStatus.BAD_REQUEST, "this is no address of the page")
            return
        if self._is_token(asked.get("token", "")):
            cookie = f"{self._cookie}={self.server.token}; HttpOnly; SameSite=Strict; Path=/"
            self._answer(HTTPStatus.SEE_OTHER, b"", "text/plain", {"Location": "/", "Set-Cookie": cookie})
        elif any(map(self._is_token, self._cookies())):
            self._give(address.path, asked.get("q", ""))
        else:
            self._refuse(HTTPStatus.FORBIDDEN, "open the address that polyfed serve printed, with its token")

    @property
    def _cookie(self) -> str:
        return f"polyfed-{self.server.server_address[1]}"  # of all ports of a machine a browser keeps cookies together

    def _cookies(self) -> list[str]:
        """Values of the page's cookie; one of this name may be of another page."""
        parts = [part.strip().partition("=") for part in self.headers.get("Cookie", "").split(";")]
        return [value for name, _, value in parts if name == self._cookie]

    def _is_token(self, text: str) -> bool:
        return secrets.compare_digest(text.encode(errors="replace"), self.server.token.encode())

    def _give(self, path: str, query: str) -> None:
        """The page, or a picture."""
        kind, _, number = path.removeprefix("/").partition("/")
        if path == "/":
            self._answer(HTTPStatus.OK, self._page(query[:_LONGEST]).encode(), "text/html; charset=utf-8")
            return
        is_number = kind == "picture" and number.isascii() and number.isdigit() and len(number) < 10
        picture = self._picture(int(number)) if is_number and int(number) < len(self.pictures) else b""
        if picture:
            self._answer(HTTPStatus.OK, picture, "image/jpeg")
        else:
            self._refuse(HTTPStatus.NOT_FOUND, "there is no such page")

    def _picture(self, number: int) -> bytes:
        try:
            return _shown(self.pictures.read(number))
        except Exception:  # as for a thumbnail
            return b""

    def _refuse(self, status: HTTPStatus, reason: str) -> None:
        self._answer(status, reason.encode(), "text/plain")

    def do_HEAD(self) -> None:
        self.do_GET()

    def log_message(self, format: str, *args: object) -> None:
        """Queries are nobody's business: nothing is logged."""

    def _page(self, query: str) -> str:
        with self.lock:  # one query at a time: each may use all threads
            hits = self.model.search(query, self.pictures.vectors, self.k) if query.strip() else []
            found = [(hit, self.pictures.names[hit.position], self._thumbnail(hit.position)) for hit in hits]
        return rendered_page(
            "search.html.j2",
            form_action="'self'",
            title=self.model.name,
            source=self.pictures.title,
            count=len(self.pictures),
            query=query,
            found=found,
        )

    def _thumbnail(self, number: int) -> str:
        try:
            return thumbnail(self.pictures.read(number))
        except Exception:  # the file is gone since, or another one
            return ""

    def _answer(self, status: HTTPStatus, content: bytes, kind: str, more: Mapping[str, str] | None = None) -> None:
        self.send_response(status)
        headers = {
            **(more or {}),
            "Content-Type": kind,
            "Content-Length": str(len(content)),
            "Cache-Control": "no-store",
            "X-Content-Type-Options": "nosniff",
            "X-Frame-Options": "DENY",
            "Referrer-Policy": "no-referrer",
            "Cross-Origin-Resource-Policy": "same-origin",
        }
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)


def _shown(data: bytes) -> bytes:
    """A picture as a JPEG of bearable size: the browser never decodes a file as it lies there."""
    with opened_picture(data) as image:
        upright = ImageOps.exif_transpose(image).convert("RGB")
        upright.thumbnail((_SHOWN, _SHOWN), Image.Resampling.LANCZOS)
    stream = io.BytesIO()
    upright.save(stream, "JPEG", quality=90)
    return stream.getvalue()
