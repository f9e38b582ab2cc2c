"""The decode-once cache: pictures of a column as one uint8 memory map, shared by all clients of a machine."""

from __future__ import annotations

import contextlib
import os
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from jaxtyping import UInt8
from PIL import Image, ImageOps

from polyfed.core.activity import prepared
from polyfed.core.errors import DataError
from polyfed.data.arrow import fingerprint_of, flat_values, place_of
from polyfed.data.pictures import PIXELS, opened_picture, picture_bytes
from polyfed.data.source import Column

ImageFit = Literal["squash", "crop"]
Resampling = Literal["bilinear", "bicubic", "lanczos"]

_CHUNK = 512  # pictures decoded at a time: bounds memory, and keeps the temporary file's time stamp fresh
_STALE = 3600.0  # seconds after which nobody can still be writing a temporary file
_VERSION = 1  # raise when decoding changes what it returns


def decoded(
    column: Column,
    size: int,
    cache: Path,
    fit: ImageFit = "squash",
    resampling: Resampling = "bicubic",
    pixels: int = PIXELS,
) -> UInt8[np.ndarray, "n 3 size size"]:
    """Pictures of a column (nested columns flattened), decoded once and then read from a memory map.

    The layout is channels first: gathering a batch and converting it to float takes half the time of channels
    last. The file is written under a temporary name and renamed, so a killed process leaves no half-written
    cache, and processes that race for the same one all succeed.

    Args:
        column: image structs {bytes, path}, or encoded bytes.
        size: height and width in pixels.
        cache: folder of the cache; made if it is not there.
        fit: ``squash`` resizes both sides to the size; ``crop`` resizes the short side and cuts the middle.
        resampling: filter of the resize, always antialiased.
        pixels: most pixels of a picture.

    Raises:
        DataError: a picture cannot be decoded, is too large or lies outside the data set (names row and path), or the
            folder cannot be written.
    """
    stamp = fingerprint_of(_VERSION, column.fingerprint, size, fit, resampling)
    path = cache / f"images-{size}-{fit}-{stamp}.npy"
    opened = _opened(path)
    if opened is None:

        def read(value: Any) -> npt.NDArray[np.uint8]:
            return decode(picture_bytes(value, column.folder, pixels), size, fit, resampling, pixels)

        _create(path, column, size, read)
        opened = _opened(path)
    if opened is None:
        raise _unusable(path.parent, "what was written there cannot be read back")
    return opened


def decode(
    data: bytes, size: int, fit: ImageFit, resampling: Resampling, pixels: int = PIXELS
) -> UInt8[np.ndarray, "3 size size"]:
    """One encoded picture as RGB, upright, on white where it is transparent.

    Raises:
        Exception: of many kinds, as Pillow's decoders do, if the bytes are not a picture, or one of more pixels.
    """
    method, side = Image.Resampling[resampling.upper()], (size, size)
    with opened_picture(data, pixels) as image:
        # JPEG: decode at a half, quarter or eighth if that is at least twice the size, and looks the same
        image.draft(None, (2 * size, 2 * size))
        upright = _rgb(ImageOps.exif_transpose(image))
        resized = ImageOps.fit(upright, side, method) if fit == "crop" else upright.resize(side, method)
    return np.asarray(resized).transpose(2, 0, 1)


def _rgb(image: Image.Image) -> Image.Image:
    if image.mode.startswith("I"):  # 16 bits; Pillow's own conversion would make all above 255 white
        grey = np.asarray(image).astype(np.int64) >> 8
        return Image.fromarray(grey.clip(0, 255).astype(np.uint8)).convert("RGB")
    if image.has_transparency_data:
        layers = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", layers.size, "white"), layers).convert("RGB")
    return image.convert("RGB")


def _opened(path: Path) -> npt.NDArray[np.uint8] | None:
    """The cached array, or None if it is not there or damaged."""
    try:
        array: npt.NDArray[np.uint8] = np.load(path, mmap_mode="r")
    except (FileNotFoundError, NotADirectoryError, ValueError, EOFError):
        return None
    except OSError as error:
        raise _unusable(path.parent, error) from error
    return array


def _create(path: Path, column: Column, size: int, read: Callable[[Any], npt.NDArray[np.uint8]]) -> None:
    """Decode a column into ``path``."""
    values = flat_values(column)
    with _replacing(path) as file:
        header = {"descr": "|u1", "fortran_order": False, "shape": (len(values), 3, size, size)}
        np.lib.format.write_array_header_1_0(file, header)
        for pictures in _decoded_chunks(values, column, read):
            file.write(pictures.tobytes())


def _decoded_chunks(
    values: pa.ChunkedArray, column: Column, read: Callable[[Any], npt.NDArray[np.uint8]]
) -> Iterator[npt.NDArray[np.uint8]]:
    def picture(row: int) -> npt.NDArray[np.uint8]:
        entry = values[row].as_py()
        try:
            return read(entry)
        except Exception as error:  # Pillow's decoders raise errors of many kinds
            raise _damaged(column, row, entry, error) from error

    # Pillow lets go of the interpreter lock while it decodes and resizes
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        starts = range(0, len(values), _CHUNK)  # mapping all at once would decode far ahead of the file
        rows = (range(start, min(start + _CHUNK, len(values))) for start in starts)
        pictures = (decoded for chunk in rows for decoded in pool.map(picture, chunk))
        counted = prepared(f"decoding pictures ({column.where})", pictures, len(values))
        while chunk := list(islice(counted, _CHUNK)):
            yield np.stack(chunk)


def _damaged(column: Column, row: int, entry: Any, error: Exception) -> DataError:
    path = entry.get("path") if isinstance(entry, dict) else None
    named = f" (path '{path}')" if path else ""
    reason = " ".join(str(error).split()) or type(error).__name__
    return DataError(f"{place_of(column, row)}{named}: not a readable picture: {reason}; mend or leave out the row")


@contextlib.contextmanager
def _replacing(path: Path) -> Iterator[BinaryIO]:
    """A temporary file next to ``path`` that takes its place at the end, or vanishes on an error."""
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _remove_stale(path)
        with temporary.open("xb") as file:
            yield file
        temporary.replace(path)
    except OSError as error:
        raise _unusable(path.parent, error) from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


def _remove_stale(path: Path) -> None:
    """Remove what killed processes left behind of ``path``."""
    for file in path.parent.glob(f".{path.name}.*.tmp"):
        with contextlib.suppress(OSError):  # another process may be as quick
            if time.time() - file.stat().st_mtime > _STALE:
                file.unlink()


def _unusable(folder: Path, reason: object) -> DataError:
    return DataError(f"cache folder '{folder}' cannot be used ({reason}); set data.cache_dir or POLYFED_CACHE")
