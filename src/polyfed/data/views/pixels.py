"""Images as float pixels, and masks of images: foreground and background, or a class per pixel."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import methodcaller
from typing import ClassVar, Self

import numpy as np
import torch
from jaxtyping import UInt8
from pydantic import Field, model_validator
from torch import Tensor

from polyfed.core.errors import ConfigError, DataError
from polyfed.core.settings import require_default
from polyfed.data.cache import Decoding, Undecoded, decoded
from polyfed.data.device_memory import TableInputs
from polyfed.data.images import Augment, Augmentation, ImageFit, MeanStd, Normalisation, Resampling, normalised
from polyfed.data.samples import Inputs, Rows, Stream
from polyfed.data.source import Column
from polyfed.data.view import DataContext, InputSpec, View

Images = UInt8[np.ndarray, "n 3 size size"] | Undecoded


class Pixels(View):
    """Square RGB images, decoded once into the cache; encoder input is float32 [b, 3, size, size]."""

    size: int = Field(default=64, ge=8, le=2048, description="height and width in pixels")
    fit: ImageFit = Field(default="squash", description="squash: change the shape; crop: cut out the middle square")
    resampling: Resampling = Field(default="bicubic", description="filter of the resize")
    normalise: Normalisation | MeanStd = Field(default="half", description="mean and standard deviation of the pixels")
    augment: Augment = Field(default=Augment(), description="random changes in the training view")

    def open(self, column: Column, modality: str, context: DataContext) -> Inputs:
        images = images_of(column, Decoding(self.size, self.fit, self.resampling, context.pixels), context)
        return PixelRows(images, self.normalise, self.augment)

    def spec(self, modality: str, context: DataContext) -> InputSpec:
        """Shape (3, size, size)."""
        return InputSpec((3, self.size, self.size))


def images_of(column: Column, how: Decoding, context: DataContext) -> Images:
    """Images of a column, all of them decoded if ``context.ahead``."""
    return decoded(column, how, context.cache) if context.ahead else Undecoded(column, how)


@dataclass(frozen=True)
class PixelRows(TableInputs):
    """Opened images; encoder input is float32 [b, 3, size, size], normalised.

    Attributes:
        images: all images, usually a memory map.
        normalise: constants, or their name.
        augment: changes of the training view.
    """

    images: Images
    normalise: Normalisation | MeanStd
    augment: Augment

    def __len__(self) -> int:
        return len(self.images)

    @cached_property
    def still_bytes(self) -> int | None:
        """See ``Inputs``."""
        if isinstance(self.images, Undecoded) or self.augment != Augment():
            return None
        return 4 * int(np.prod(self.images.shape[1:]))

    @property
    def table(self) -> Images:
        return self.images

    @cached_property
    def _changes(self) -> list[Augmentation]:
        return self.augment.changes

    def draws(self, shape: Sequence[int], generator: torch.Generator) -> tuple[Tensor, ...]:
        return tuple(map(methodcaller("draws", shape, generator), self._changes))

    def computed(self, x: Tensor, *draws: Tensor) -> Tensor:
        erase = self.augment.erase
        for change, drawn in zip(self._changes, draws, strict=False):
            x = x if change is erase else change.applied(x, drawn)
        x = normalised(x, self.normalise)
        # in place, which saves a second batch of floats
        return x.mul_(erase.kept(x, draws[-1])) if draws and erase is not None else x


class Masks(View):
    """Square masks, decoded once into the cache; uint8 [b, size, size]: 1 above the threshold, or class numbers."""

    short_name: ClassVar[str] = "masks"

    size: int | None = Field(default=None, ge=8, le=2048, description="height and width; None: the size of `of`")
    fit: ImageFit = Field(default="squash", description="squash or crop, like the images that the masks belong to")
    of: str | None = Field(default=None, description="modality whose size, fit and augment the masks share")
    threshold: int = Field(default=127, ge=0, le=254, description="grey value (red, in colour) above which a mask is 1")
    classes: int | None = Field(default=None, ge=2, le=256, description="number of classes; None: two, by threshold")
    ignore: int | None = Field(default=None, ge=0, le=255, description="value of unlabelled pixels, such as 255")
    augment: Augment = Field(default=Augment(), description="changes of the images, whose moves masks share")

    @model_validator(mode="after")
    def _either(self) -> Self:
        if self.classes is None:
            require_default(self, "without classes", "ignore")
        else:
            require_default(self, f"with classes: {self.classes}", "threshold")
        if self.size is None and self.of is None:
            raise ValueError("size is missing; give it, or name the images that these masks belong to in of")
        return self

    def open(self, column: Column, modality: str, context: DataContext) -> Inputs:
        assert self.size is not None
        how = Decoding(self.size, self.fit, "nearest" if self.classes is None else "numbers", context.pixels)
        return MaskRows(images_of(column, how, context), column.where, self)

    def beside(self, views: Mapping[str, View], context: DataContext) -> Self:
        """Masks with size, fit and augment of the images' view; a view of features has fit alone."""
        if self.of is None:
            return self
        if self.of not in views:
            raise ConfigError(f"masks of '{self.of}' need it; the views here are {dict(views)}")
        image = views[self.of].resolved(self.of, context)
        size = getattr(image, "size", None) if isinstance(image, Pixels) else self.size
        if size is None or self.size not in (None, size):
            view = f"its view is '{image.component_name()}', its size {size}"
            raise ConfigError(f"masks of '{self.of}' have size {self.size}, but {view}; give the size of the view")
        shared = {key: getattr(image, key) for key in ("fit", "augment") if hasattr(image, key)}
        return self.model_copy(update={**shared, "size": size})

    def spec(self, modality: str, context: DataContext) -> InputSpec:
        """Shape (size, size).

        Raises:
            ConfigError: the size depends on the images' view.
        """
        if self.size is None:
            raise ConfigError(f"masks of '{self.of}' have the size of its view, which is needed first")
        return InputSpec((self.size, self.size))


@dataclass(frozen=True)
class MaskRows:
    """Opened masks.

    Attributes:
        images: all masks as images, usually a memory map.
        where: Column of the data, for messages.
        view: Settings of the view.
    """

    images: Images
    where: str
    view: Masks

    @property
    def of(self) -> str | None:
        """Modality of the images that the masks belong to."""
        return self.view.of

    def __len__(self) -> int:
        return len(self.images)

    def __call__(self, rows: Rows, generator: Stream = None) -> UInt8[Tensor, "b size size"]:
        """Masks of ``rows``; with a generator moved as their images are.

        Raises:
            DataError: a value is not a class number.
        """
        values, view = torch.from_numpy(self.images[rows.numpy()][:, :1]), self.view
        if view.classes is None:
            moved = values if generator is None else view.augment.moved(values, generator)
            return (moved[:, 0] > view.threshold).to(torch.uint8)
        present = torch.zeros(len(values), 256, dtype=torch.bool).scatter_(1, values.flatten(1).long(), True)
        if unknown := {*present.any(0).nonzero()[:, 0].tolist()} - {*range(view.classes), view.ignore}:
            what = f"{self.where} has the value {min(unknown)}, and there are {view.classes} classes, numbered from 0"
            raise DataError(f"{what}; name all classes, or set ignore to the value of unlabelled pixels")
        if generator is None:
            return values[:, 0]
        # plane by plane: the mean of two class numbers is a third class; each image has its own planes
        most = max(present.sum(1).tolist(), default=1)
        numbers = present.int().argsort(dim=1, descending=True, stable=True)[:, :most]
        planes = 255 * (values == numbers[:, :, None, None]).to(torch.uint8)
        strongest, place = view.augment.moved(planes, generator).max(1)
        moved = numbers.gather(1, place.flatten(1)).view_as(place).to(torch.uint8)
        # areas from outside the image have no class
        return moved.where(strongest > 0, view.ignore or 0)
