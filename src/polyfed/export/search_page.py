"""A page on this machine that searches pictures by text with a trained model; nobody else can reach it."""

from __future__ import annotations

import io
import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar
from urllib.parse import parse_qs, urlsplit

import numpy as np
from PIL import Image, ImageOps

from polyfed.core.errors import ConfigError, DataError, RunError
from polyfed.data.pictures import opened_picture
from polyfed.reporting.gallery import picture_shelf, thumbnail
from polyfed.reporting.html.page import rendered_page
from polyfed.runs.loaded import IMAGES, TEXTS, LoadedModel, Vectors
from polyfed.runs.opened import Run

HOST = "127.0.0.1"
_ENDINGS = {".jpg", ".jpeg", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff", ".avif"}
_LONGEST = 1000  # characters of a query
_SHOWN = 1024  # pixels of the longer side of a picture that is opened
_CHUNK = 256
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

    Raises:
        DataError: there is no such folder, or no readable picture in it.
    """
    if not folder.is_dir():
        raise DataError(f"there is no folder '{folder}'; give one with pictures")
    readable = _readable_in(folder)
    # in parts: a folder may hold more pictures than memory
    parts = (readable[start : start + _CHUNK] for start in range(0, len(readable), _CHUNK))
    vectors = np.concatenate([model.encode(images=part) for part in parts])
    names = [path.relative_to(folder).as_posix() for path in readable]
    return SearchedPictures(str(folder), names, lambda number: readable[number].read_bytes(), vectors)


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


def search_server(model: LoadedModel, pictures: SearchedPictures, port: int = 0, k: int = 24) -> ThreadingHTTPServer:
    """A server on the loopback address, ready for ``serve_forever``; whoever calls closes it.

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
        server = ThreadingHTTPServer((HOST, port), handler)
    except (OSError, OverflowError) as error:
        raise ConfigError(f"port {port} cannot be used ({error}); choose another --port, or 0 for any") from error
    server.daemon_threads = True
    return server


def _readable_in(folder: Path) -> list[Path]:
    paths = sorted(path for path in folder.rglob("*") if path.suffix.lower() in _ENDINGS and path.is_file())
    readable = list(filter(_opens, paths))
    if not readable:
        raise DataError(f"'{folder}' has no readable picture ({', '.join(sorted(_ENDINGS))}); give another folder")
    if len(readable) < len(paths):
        _log.warning("%d of %d pictures in '%s' cannot be read", len(paths) - len(readable), len(paths), folder)
    return readable


def _opens(path: Path) -> bool:
    try:
        with opened_picture(path.read_bytes()) as image:
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
    server_version, sys_version, timeout = "polyfed", "", 30

    def do_GET(self) -> None:
        """Answer, if the request names this machine: another name is a page's that was led here (DNS rebinding)."""
        port = self.connection.getsockname()[1]
        if self.headers.get("Host") not in (f"{HOST}:{port}", f"localhost:{port}"):
            self._answer(HTTPStatus.FORBIDDEN, b"this page is for its own machine", "text/plain")
            return
        address = urlsplit(self.path)
        kind, _, number = address.path.removeprefix("/").partition("/")
        if address.path == "/":
            query = parse_qs(address.query, max_num_fields=4).get("q", [""])[0] if len(address.query) < 9000 else ""
            self._answer(HTTPStatus.OK, self._page(query[:_LONGEST]).encode(), "text/html; charset=utf-8")
        elif kind == "picture" and number.isascii() and number.isdigit() and int(number[:9]) < len(self.pictures):
            self._answer(HTTPStatus.OK, _shown(self.pictures.read(int(number[:9]))), "image/jpeg")
        else:
            self._answer(HTTPStatus.NOT_FOUND, b"there is no such page", "text/plain")

    def do_HEAD(self) -> None:
        """As GET, without the content."""
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

    def _answer(self, status: HTTPStatus, content: bytes, kind: str) -> None:
        self.send_response(status)
        headers = {
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
