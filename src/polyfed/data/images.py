"""Images: read from rows of a data set, decoded, normalised and augmented.

Rows are not trusted: a path must lie in the data set's own folder, and the header of an image shows how much memory it
would take before any of it is decoded.

Each image of a batch is augmented on its own, and every draw comes from the given generator. Augmentations keep pixels
within 0 to 255, as uint8 or float; only erasing works on normalised pixels, where 0 is the mean.
"""

from __future__ import annotations

import io
import math
import re
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Int, Int64, Num, UInt8
from PIL import Image, ImageOps
from pydantic import AfterValidator, Field, field_validator, model_validator
from torch import Tensor
from torch.nn import functional as F

from polyfed.core.settings import Settings
from polyfed.data.files import regular_bytes

ImageFit = Literal["squash", "crop"]
Resampling = Literal["bilinear", "bicubic", "lanczos"]
MaskResampling = Literal["nearest", "numbers"]
"""Filters for masks, which mix no values; ``numbers``: keeps the numbers of a palette, or grey values."""

PIXELS = 50_000_000
"""Default of the limit of an image's pixels."""

MOST_PIXELS = 178_956_970
"""Largest limit that can be set: Pillow itself opens no larger images."""

_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "JPEG2000", "AVIF")
_LARGE = 1 << 24  # pixels above which images are decoded one after the other, so that few of them are in memory
_BYTES_A_PIXEL = 16  # of a file: four channels of 32 bits, not compressed
_SPARE = 1 << 20  # bytes for a header
_one_large = threading.Lock()


def image_bytes(value: Any, folder: Path | None = None, pixels: int = PIXELS) -> bytes:
    """The encoded image of an image struct {bytes, path}, or of bytes.

    Args:
        value: Value of a row.
        folder: Folder of the data set, which a path is relative to and must lie in; None: rows name no files.
        pixels: Limit of the image's pixels, which bounds its file too.

    Raises:
        ValueError: the value has neither, or the path is not that of a regular file in the folder, or it is too large.
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
def opened_image(data: bytes, pixels: int = PIXELS) -> Iterator[Image.Image]:
    """An image whose header has been read and whose pixels have not; large ones are opened one after the other.

    Raises:
        ValueError: the image has more pixels.
        Exception: any that Pillow's decoders raise for bytes that are not an image of a known format.
    """
    with Image.open(io.BytesIO(data), formats=_formats()) as image:
        count = image.width * image.height
        if count > pixels:
            size = f"{image.width} x {image.height} pixels are {count:,}"
            raise ValueError(f"{size}, the limit is {pixels:,} (data.max_pixels)")
        with _one_large if count > _LARGE else nullcontext():
            yield image


@cache
def _formats() -> tuple[str, ...]:
    """Formats that this build of Pillow reads without running another program, as EPS would."""
    Image.init()
    return tuple(name for name in _FORMATS if name in Image.OPEN)


@cache
def image_endings() -> frozenset[str]:
    """Endings, in small letters and without a dot, of the files that are opened as images."""
    known = _formats()
    return frozenset(ending[1:] for ending, name in Image.registered_extensions().items() if name in known)


_REMEDIES = {
    r"\.(hei[cf]|avif|jxl|tiff?|webp|psd|svg|cr[23]|nef|arw|dng)": "`magick mogrify -format png *{}` (ImageMagick)",
    r"\.dcm": "`dcmj2pnm --write-png --min-max-window 1.dcm 1.png` (DCMTK)",
    r"\.nii(\.gz)?": "`med2image -i 1{} -d slices -o slice.png` (pip install med2image)",
    r"\.(mp3|flac|ogg|m4a|aac|opus)": "`ffmpeg -i 1{} 1.wav`",
    r"\.(mp4|avi|mov|mkv)": "`ffmpeg -i 1{} -r 1 1-%04d.jpg`, one image per second",
    r"\.(xlsx?|ods)": "`libreoffice --headless --convert-to csv *{}`",
    r"\.(docx|odt|rtf)": "`pandoc -t plain -o 1.txt 1{}`",
    r"\.pdf": "`pdftotext 1.pdf 1.txt`",
    r"\.(zip|tar|tgz|gz|bz2|xz|7z|rar)": "unpack it",
}


def has_remedy(name: str) -> bool:
    """True if a command is known that converts a file of this name to a format that is read."""
    return remedy_of(name) != _CONVERT


def remedy_of(name: str) -> str:
    """Command that converts a file of this name or ending to a format that is read; general advice if none is known."""
    lower = f".{name.lower().lstrip('.')}"
    matches = ((re.search(rf"{ending}$", lower), remedy) for ending, remedy in _REMEDIES.items())
    remedies = (remedy.replace("{}", match[0]) for match, remedy in matches if match)
    return next(remedies, _CONVERT)


_CONVERT = "convert it to .png, .jpg, .wav, .csv or .txt"


def decode(
    data: bytes, size: int, fit: ImageFit, resampling: Resampling | MaskResampling, pixels: int = PIXELS
) -> UInt8[np.ndarray, "3 size size"]:
    """One encoded image as RGB, upright, on white where it is transparent.

    Args:
        data: the encoded image.
        size: height and width of the result.
        fit: ``squash`` resizes both sides to the size; ``crop`` resizes the short side and cuts the middle.
        resampling: filter of the resize, antialiased except for masks.
        pixels: Limit of the encoded image's pixels.

    Raises:
        Exception: any that Pillow's decoders raise for bytes that are not an image; ValueError for too many pixels.
    """
    is_numbered, side = resampling == "numbers", (size, size)
    method = Image.Resampling.NEAREST if is_numbered else Image.Resampling[resampling.upper()]
    with opened_image(data, pixels) as image:
        # JPEG: decode at a half, quarter or eighth if that is at least twice the size, and looks the same
        image.draft(None, (2 * size, 2 * size))
        upright = (_numbers if is_numbered else as_rgb)(ImageOps.exif_transpose(image))
        resized = ImageOps.fit(upright, side, method) if fit == "crop" else upright.resize(side, method)
    return np.asarray(resized).transpose(2, 0, 1)


def mask_levels(data: bytes, resampling: MaskResampling) -> Int[np.ndarray, " 256"]:
    """Number of pixels with each value in an encoded mask, read with this filter; errors of ``decode``."""
    with opened_image(data) as image:
        values = np.asarray((_numbers if resampling == "numbers" else as_rgb)(image))[..., 0]
    return np.bincount(values.ravel(), minlength=256)


def reason_of(error: Exception) -> str:
    reason = re.sub(r"\s*<[\w. ]+ object at 0x[0-9a-f]+>", "", " ".join(str(error).split()))
    return reason or type(error).__name__


class PixelScale(NamedTuple):
    """Range of an image's values that is mapped to 0 to 255."""

    low: float
    high: float
    words: str


def scaling_of(image: Image.Image) -> PixelScale | None:
    """Scale of an image whose values do not have 8 bits; None for all others.

    Files do not state how many of their bits are in use. Integers from 0 get the fewest bits (8, 10, 12, 14 or 16) that
    hold the largest; fractions in 0 to 1, or in 0 to 255, get that range; other images are scaled from their own
    smallest value to their largest.
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


def as_rgb(image: Image.Image) -> Image.Image:
    """The image in 8 bits a channel, on white where it is transparent."""
    if (scaling := scaling_of(image)) is not None:
        return Image.fromarray(eight_bits(np.asarray(image), scaling)).convert("RGB")
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


def eight_bits(values: np.ndarray, scaling: PixelScale) -> UInt8[np.ndarray, "h w"]:
    """Values of a scale as 0 to 255; NaN becomes dark."""
    low, high, words = scaling
    if words.endswith("bits"):
        coarse: UInt8[np.ndarray, "h w"] = (values.astype(np.int64) >> (int(high).bit_length() - 8)).astype(np.uint8)
        return coarse
    if low == high:
        return np.full(values.shape, 128, np.uint8)
    known = np.nan_to_num(values.astype(np.float64), nan=low, posinf=high, neginf=low)
    # halves first: the span of the largest floats is beyond them
    return np.rint(255 * ((known / 2 - low / 2) / (high / 2 - low / 2))).astype(np.uint8)


Normalisation = Literal["half", "imagenet", "cifar100"]
Positive = Annotated[float, Field(gt=0)]

MEAN_STD: dict[str, tuple[tuple[float, float, float], tuple[float, float, float]]] = {
    "half": ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5)),
    "imagenet": ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
    "cifar100": ((0.5071, 0.4867, 0.4408), (0.2675, 0.2565, 0.2761)),
}


class MeanStd(Settings):
    """Custom constants for normalisation."""

    mean: tuple[float, float, float] = Field(description="mean of each channel, of pixels from 0 to 1")
    std: tuple[Positive, Positive, Positive] = Field(description="standard deviation of each channel")


def _ordered(bounds: tuple[float, float]) -> tuple[float, float]:
    if not 0 < bounds[0] <= bounds[1]:
        raise ValueError(f"needs 0 < least <= greatest, not {bounds[0]} and {bounds[1]}")
    return bounds


_Bounds = Annotated[tuple[float, float], AfterValidator(_ordered)]


def mean_std(by: Normalisation | MeanStd) -> tuple[tuple[float, float, float], tuple[float, float, float]]:
    return (by.mean, by.std) if isinstance(by, MeanStd) else MEAN_STD[by]


def normalised(x: Num[Tensor, "b 3 h w"], by: Normalisation | MeanStd) -> Float[Tensor, "b 3 h w"]:
    """Pixels of 0 to 255 as (x / 255 - mean) / std, in float32."""
    factor, shift = _factor_and_shift(by, x.device)
    # two passes in place over a batch of floats, where the formula as written takes four
    return x.float().mul_(factor).sub_(shift)


@cache
def _factor_and_shift(by: Normalisation | MeanStd, device: torch.device) -> tuple[Tensor, Tensor]:
    mean, std = (torch.tensor(values, device=device).view(3, 1, 1) for values in mean_std(by))
    return 1 / (255 * std), mean / std


class Augmentation(Settings, ABC):
    """A random change of images; ``true`` stands for its defaults, a number for its first field."""

    @model_validator(mode="before")
    @classmethod
    def _short_form(cls, data: Any) -> Any:
        if data is True:
            return {}
        if isinstance(data, int | float) and data is not False:
            return {next(iter(cls.model_fields)): data}
        return data

    def __call__(self, x: Num[Tensor, "b c h w"], generator: torch.Generator) -> Num[Tensor, "b c h w"]:
        """Changed images of the same shape and type."""
        return self.applied(x, self.draws(x.shape, generator).to(x.device))

    @abstractmethod
    def draws(self, shape: Sequence[int], generator: torch.Generator) -> Tensor:
        """Random numbers for images of a shape [b, c, h, w], on the CPU."""

    @abstractmethod
    def applied(self, x: Num[Tensor, "b c h w"], drawn: Tensor) -> Num[Tensor, "b c h w"]:
        """Images changed by numbers that ``draws`` gave, on the device of both."""


class Rotation(Augmentation):
    """Rotate each image about its middle, nearest pixel; areas from outside the image are black."""

    degrees: float = Field(default=10.0, ge=0, le=180, description="angle is drawn from [-degrees, degrees]")

    def draws(self, shape: Sequence[int], generator: torch.Generator) -> Float[Tensor, " b"]:
        """Angles in radians."""
        return _uniform(shape[0], -math.radians(self.degrees), math.radians(self.degrees), generator)

    def applied(self, x: Num[Tensor, "b c h w"], drawn: Float[Tensor, " b"]) -> Num[Tensor, "b c h w"]:
        return _sampled(x, turned_grid(drawn, x.shape[2], x.shape[3]), "nearest")


class RandomCrop(Augmentation):
    """Random resized crop: a box of random area and shape, enlarged to the whole size (bilinear)."""

    scale: _Bounds = Field(default=(0.5, 1.0), description="least and greatest share of the area")
    ratio: _Bounds = Field(default=(0.75, 4 / 3), description="least and greatest width / height")

    @model_validator(mode="before")
    @classmethod
    def _least_area(cls, data: Any) -> Any:
        number = isinstance(data, int | float) and not isinstance(data, bool)
        return {"scale": (data, 1.0)} if number else data

    def draws(self, shape: Sequence[int], generator: torch.Generator) -> Int64[Tensor, "b 4"]:
        """Boxes; the complete image if none of ten fits."""
        size = shape[2], shape[3]
        boxes = crop_boxes(shape[0], size, self.scale, self.ratio, generator)
        return torch.where(boxes[:, 2:3] > 0, boxes, torch.tensor((0, 0, *size)))

    def applied(self, x: Num[Tensor, "b c h w"], drawn: Int64[Tensor, "b 4"]) -> Num[Tensor, "b c h w"]:
        """Crops of the images' own size."""
        if x.device.type != "cpu":
            return enlarged(x, drawn)
        # one kernel call per image: as fast as grid_sample on the batch at 64 pixels, twice as fast at 224
        crops = [
            F.interpolate(image[None, :, top : top + h, left : left + w], x.shape[2:], mode="bilinear")
            for image, (top, left, h, w) in zip(x, drawn.tolist(), strict=True)
        ]
        return torch.cat(crops) if crops else x


class Shift(Augmentation):
    """Pad-and-crop: move each image by a whole number of pixels either way; black comes in."""

    pixels: int = Field(default=4, ge=0, description="greatest shift in each direction")

    def draws(self, shape: Sequence[int], generator: torch.Generator) -> Int64[Tensor, "2 b"]:
        """Rows and columns by which a window of the padded image begins."""
        return torch.randint(2 * self.pixels + 1, (2, shape[0]), generator=generator)

    def applied(self, x: Num[Tensor, "b c h w"], drawn: Int64[Tensor, "2 b"]) -> Num[Tensor, "b c h w"]:
        b, _, h, w = x.shape
        padded, (down, right) = F.pad(x, (self.pixels,) * 4), drawn
        # views of the padded batch; only the chosen windows are copied
        windows = padded.unfold(2, h, 1).unfold(3, w, 1)
        return windows[torch.arange(b, device=x.device), :, down, right]


class Flip(Augmentation):
    """Mirror each image left to right with probability ``p``."""

    p: float = Field(default=0.5, ge=0, le=1, description="probability")

    def draws(self, shape: Sequence[int], generator: torch.Generator) -> Bool[Tensor, " b"]:
        """True for each image that is mirrored."""
        return torch.rand(shape[0], generator=generator) < self.p

    def applied(self, x: Num[Tensor, "b c h w"], drawn: Bool[Tensor, " b"]) -> Num[Tensor, "b c h w"]:
        b = len(x)
        # index_select copies memory, where torch.where would compare every pixel
        return torch.cat([x, x.flip(-1)]).index_select(0, torch.arange(b, device=x.device) + b * drawn)


class Erase(Augmentation):
    """Random erasing (Zhong et al. 2020): with probability ``p`` set a random box of an image to 0."""

    p: float = Field(default=0.2, ge=0, le=1, description="probability")
    scale: _Bounds = Field(default=(0.02, 0.33), description="least and greatest share of the area")
    ratio: _Bounds = Field(default=(0.3, 3.3), description="least and greatest width / height")

    def draws(self, shape: Sequence[int], generator: torch.Generator) -> Int64[Tensor, "b 4"]:
        """Boxes; a height of 0 where nothing is erased, as where none of ten fits."""
        chosen = torch.rand(shape[0], generator=generator) < self.p
        return crop_boxes(shape[0], (shape[2], shape[3]), self.scale, self.ratio, generator).mul_(chosen[:, None])

    def applied(self, x: Num[Tensor, "b c h w"], drawn: Int64[Tensor, "b 4"]) -> Num[Tensor, "b c h w"]:
        return x * self.kept(x, drawn)

    def kept(self, x: Num[Tensor, "b 3 h w"], drawn: Int64[Tensor, "b 4"]) -> Num[Tensor, "b 1 h w"]:
        """1 where a pixel stays, 0 where it is erased."""
        b, _, h, w = x.shape
        top, left, height, width = drawn.view(b, 4, 1).unbind(1)
        rows, columns = torch.arange(h, device=x.device), torch.arange(w, device=x.device)
        tall = ((rows >= top) & (rows < top + height)).view(b, 1, h, 1).to(x.dtype)
        wide = ((columns >= left) & (columns < left + width)).view(b, 1, 1, w).to(x.dtype)
        return 1 - tall * wide


class Augment(Settings):
    """Augmentations of the training view, applied in the order of the fields; all are off by default."""

    rotate: Rotation | None = Field(default=None, description="rotate about the middle, e.g. 10 (degrees)")
    crop: RandomCrop | None = Field(default=None, description="random resized crop, e.g. 0.5 (least area)")
    shift: Shift | None = Field(default=None, description="pad-and-crop, e.g. 4 (pixels)")
    flip: Flip | None = Field(default=None, description="mirror left to right, e.g. true")
    erase: Erase | None = Field(default=None, description="random erasing after normalisation, e.g. 0.2")

    @field_validator("*", mode="before")
    @classmethod
    def _off(cls, value: Any) -> Any:
        return None if value is False else value

    @property
    def changes(self) -> list[Augmentation]:
        """The augmentations that are on, in the order in which they draw."""
        return [change for _, change in self if change is not None]

    def moved(self, x: UInt8[Tensor, "b c h w"], generator: torch.Generator) -> UInt8[Tensor, "b c h w"]:
        """Images with their pixels moved; these changes draw first, so that a mask moves as its image does."""
        for change in self.changes:
            x = x if change is self.erase else change(x, generator)
        return x


def _uniform(n: int, low: float, high: float, generator: torch.Generator) -> Float[Tensor, " n"]:
    return torch.rand(n, generator=generator) * (high - low) + low


def crop_boxes(
    b: int, size: tuple[int, int], scale: tuple[float, float], ratio: tuple[float, float], generator: torch.Generator
) -> Int64[Tensor, "b 4"]:
    """Top, left, height and width of the first of ten random boxes that fits; a height of 0 if none does."""
    # all tries at once: how many numbers are drawn must not depend on what was drawn
    tries = 10
    height, width = size
    area = _uniform(tries * b, *scale, generator) * height * width
    aspect = _uniform(tries * b, math.log(ratio[0]), math.log(ratio[1]), generator).exp()
    boxes = torch.stack([(area / aspect).sqrt(), (area * aspect).sqrt()]).round().long().view(2, tries, b)
    fits = ((boxes > 0) & (boxes <= torch.tensor(size).view(2, 1, 1))).all(0)
    first = fits.int().argmax(0)
    h, w = boxes[:, first, torch.arange(b)] * fits.any(0)
    place = torch.rand(2, b, generator=generator)
    top, left = (place[0] * (height - h + 1)).long(), (place[1] * (width - w + 1)).long()
    return torch.stack([top, left, h, w], 1)


def enlarged(x: Num[Tensor, "b c h w"], boxes: Int64[Tensor, "b 4"]) -> Num[Tensor, "b c h w"]:
    """A box of each image in the images' size, as ``interpolate`` with mode bilinear, without a wait for the device."""

    def positions(size: int, first: Tensor, length: Tensor) -> Tensor:
        """Source of each output pixel along an axis, within the box, in the coordinates of grid_sample."""
        at = first + ((torch.arange(size, device=x.device) + 0.5) * (length / size) - 0.5)
        return (2 * at.clamp(first, first + length - 1) + 1) / size - 1

    top, left, height, width = boxes[..., None].unbind(1)
    rows, columns = positions(x.shape[2], top, height), positions(x.shape[3], left, width)
    shape = len(x), *x.shape[2:]
    return _sampled(x, torch.stack([columns[:, None].expand(shape), rows[..., None].expand(shape)], -1), "bilinear")


def _sampled(x: Num[Tensor, "b c h w"], grid: Float[Tensor, "b h w 2"], mode: str) -> Num[Tensor, "b c h w"]:
    pixels = x if x.is_floating_point() else x.float()
    y = F.grid_sample(pixels, grid.to(pixels.dtype), mode, align_corners=False)
    return y if x.is_floating_point() else y.round().to(x.dtype)


def turned_grid(angle: Float[Tensor, " b"], h: int, w: int) -> Float[Tensor, "b h w 2"]:
    """Source of each output pixel, in the coordinates of grid_sample: -1 to 1 across the image."""
    y = (torch.arange(h, device=angle.device) - (h - 1) / 2).view(1, h, 1)
    x = (torch.arange(w, device=angle.device) - (w - 1) / 2).view(1, 1, w)
    cos, sin = angle.cos().view(-1, 1, 1), angle.sin().view(-1, 1, 1)
    # two planes, seen as pairs: writing pairs takes ten times as long
    planes = torch.stack([(cos * x) * (2 / w) - (sin * y) * (2 / w), (sin * x) * (2 / h) + (cos * y) * (2 / h)])
    return planes.permute(1, 2, 3, 0)
