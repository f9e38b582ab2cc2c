"""Encoded pictures as rows of a data set hold them: which files they may name, how large they may be, their pixels.

A row is written by whoever made the data set. A path in it is believed only as far as the data set's own folder, and
what a picture would take once it is decoded is known from its header before anything of it is decoded.
"""

from __future__ import annotations

import io
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from jaxtyping import UInt8
from PIL import Image, ImageOps

from polyfed.data.text_files import regular_bytes

ImageFit = Literal["squash", "crop"]
Resampling = Literal["bilinear", "bicubic", "lanczos"]
MaskResampling = Literal["nearest", "numbers"]
"""How masks are resized, of which other filters would mix values; numbers: those of a palette or of grey."""

PIXELS = 50_000_000
"""Most pixels of a picture unless a setting says otherwise."""

MOST_PIXELS = 178_956_970
"""Most that a setting may allow: Pillow itself opens no larger ones."""

_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "JPEG2000", "AVIF")
_LARGE = 1 << 24  # pixels above which pictures are decoded one after the other, so that few of them are in memory
_BYTES_A_PIXEL = 16  # of a file: four channels of 32 bits, not compressed
_SPARE = 1 << 20  # bytes for a header
_one_large = threading.Lock()


def picture_bytes(value: Any, folder: Path | None = None, pixels: int = PIXELS) -> bytes:
    """The encoded picture of an image struct {bytes, path}, or of bytes.

    Args:
        value: of a row.
        folder: of the data set; what a path is relative to, and must lie in; None: rows name no files.
        pixels: most pixels of the picture, which bound its file too.

    Raises:
        ValueError: there is neither, or the path is not one of a regular file in the folder, of a bearable size.
        OSError: the file cannot be read.
    """
    if isinstance(value, bytes):
        return value
    if isinstance(value, dict) and value.get("bytes") is not None:
        return bytes(value["bytes"])
    if not isinstance(value, dict) or not value.get("path"):
        raise ValueError(f"neither bytes nor a path but {type(value).__name__}")
    most = _BYTES_A_PIXEL * pixels + _SPARE
    if folder is None:
        raise ValueError("the row names a file, and this data set has no folder of files")
    return regular_bytes(folder / str(value["path"]), folder, most, "data.max_pixels")


@contextmanager
def opened_picture(data: bytes, pixels: int = PIXELS) -> Iterator[Image.Image]:
    """A picture whose header has been read and whose pixels have not; large ones are opened one after the other.

    Raises:
        ValueError: it has more pixels.
        Exception: of many kinds, as Pillow's decoders do, if the bytes are not a picture of a known format.
    """
    with Image.open(io.BytesIO(data), formats=_formats()) as image:
        count = image.width * image.height
        if count > pixels:
            raise ValueError(
                f"{image.width} x {image.height} pixels are {count:,}, the limit is {pixels:,} (data.max_pixels)"
            )
        with _one_large if count > _LARGE else nullcontext():
            yield image


@cache
def _formats() -> tuple[str, ...]:
    """The formats that this build of Pillow reads; none that runs a program to read them (EPS)."""
    Image.init()
    return tuple(name for name in _FORMATS if name in Image.OPEN)


@cache
def picture_endings() -> frozenset[str]:
    """Endings, in small letters and without a dot, of the files that are opened as pictures."""
    known = _formats()
    return frozenset(ending[1:] for ending, name in Image.registered_extensions().items() if name in known)


def decode(
    data: bytes, size: int, fit: ImageFit, resampling: Resampling | MaskResampling, pixels: int = PIXELS
) -> UInt8[np.ndarray, "3 size size"]:
    """One encoded picture as RGB, upright, on white where it is transparent.

    Args:
        data: the encoded picture.
        size: height and width of the result.
        fit: ``squash`` resizes both sides to the size; ``crop`` resizes the short side and cuts the middle.
        resampling: filter of the resize, antialiased but for masks.
        pixels: most pixels of the encoded picture.

    Raises:
        Exception: of many kinds, as Pillow's decoders do, if the bytes are not a picture, or one of more pixels.
    """
    is_numbered, side = resampling == "numbers", (size, size)
    method = Image.Resampling.NEAREST if is_numbered else Image.Resampling[resampling.upper()]
    with opened_picture(data, pixels) as image:
        # JPEG: decode at a half, quarter or eighth if that is at least twice the size, and looks the same
        image.draft(None, (2 * size, 2 * size))
        upright = (_numbers if is_numbered else _rgb)(ImageOps.exif_transpose(image))
        resized = ImageOps.fit(upright, side, method) if fit == "crop" else upright.resize(side, method)
    return np.asarray(resized).transpose(2, 0, 1)


def reason_of(error: Exception) -> str:
    reason = re.sub(r"\s*<[\w. ]+ object at 0x[0-9a-f]+>", "", " ".join(str(error).split()))
    return reason or type(error).__name__


class PixelScale(NamedTuple):
    """How a picture's own range becomes 0 to 255."""

    low: float
    high: float
    words: str


def scaling_of(image: Image.Image) -> PixelScale | None:
    """The scale of a picture whose values are not of 8 bits; None for all others.

    Files do not say how many of their bits are in use. Whole numbers from 0 are of the fewest bits (8, 10, 12, 14 or
    16) that hold the largest; fractions are of 0 to 1, or of 0 to 255, if they lie there; all else is of the
    picture's own smallest and largest value.
    """
    if not image.mode.startswith(("I", "F")):
        return None
    values = np.asarray(image)
    finite = values[np.isfinite(values)]
    low, high = (float(finite.min()), float(finite.max())) if finite.size else (0.0, 0.0)
    if low < 0 or high > (65535 if image.mode.startswith("I") else 255):
        return PixelScale(low, high, "its own range")
    if image.mode.startswith("I"):
        bits = next(bits for bits in (8, 10, 12, 14, 16) if high < 1 << bits)
        return PixelScale(0, (1 << bits) - 1, f"{bits} bits")
    return PixelScale(0, 1, "0 to 1") if high <= 1 else PixelScale(0, 255, "0 to 255")


def _rgb(image: Image.Image) -> Image.Image:
    if (scaling := scaling_of(image)) is not None:
        return Image.fromarray(_eight_bits(np.asarray(image), scaling)).convert("RGB")
    if image.has_transparency_data:
        layers = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", layers.size, "white"), layers).convert("RGB")
    return image.convert("RGB")


def _numbers(image: Image.Image) -> Image.Image:
    """Numbers of a palette, or grey values, in every channel."""
    values = np.asarray(image)
    if values.ndim != 2 or values.dtype.kind not in "iu" or values.min() < 0 or values.max() > 255:
        raise ValueError(f"mode {image.mode}; masks of several classes have a palette, or grey values of 0 to 255")
    return Image.fromarray(values.astype(np.uint8)).convert("RGB")


def _eight_bits(values: np.ndarray, scaling: PixelScale) -> UInt8[np.ndarray, "h w"]:
    """Values of a scale from 0 to 255; what is no number is dark."""
    low, high, words = scaling
    if words.endswith("bits"):
        coarse: UInt8[np.ndarray, "h w"] = (values.astype(np.int64) >> (int(high).bit_length() - 8)).astype(np.uint8)
        return coarse
    if low == high:
        return np.full(values.shape, 128, np.uint8)
    # halves first: the span of the largest floats is beyond them
    shares = (np.nan_to_num(values.astype(np.float64), nan=low, posinf=high, neginf=low) / 2 - low / 2) / (
        high / 2 - low / 2
    )
    return np.rint(255 * shares).astype(np.uint8)
