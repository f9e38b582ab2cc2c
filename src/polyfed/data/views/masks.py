"""Masks of pictures as 0 and 1."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Self, cast

import numpy as np
import torch
from jaxtyping import Int64, UInt8
from pydantic import Field
from torch import Tensor

from polyfed.core.errors import ConfigError
from polyfed.data.cache import decoded
from polyfed.data.images import Augment
from polyfed.data.pictures import ImageFit, Resampling
from polyfed.data.samples import Inputs
from polyfed.data.source import Column
from polyfed.data.view import DataContext, InputSpec, View
from polyfed.data.views.pixels import Pixels

# what pictures are not offered: of a mask it keeps the two values, which every other filter would mix
_NEAREST = cast(Resampling, "nearest")


class Masks(View):
    """Square masks, decoded once into the cache; uint8 [b, size, size], 1 where a pixel is above the threshold."""

    size: int = Field(default=64, ge=8, le=2048, description="height and width in pixels")
    fit: ImageFit = Field(default="squash", description="squash or crop: as the pictures that the masks belong to")
    of: str | None = Field(default=None, description="modality whose size, fit and augment the masks share")
    threshold: int = Field(default=127, ge=0, le=254, description="grey value (red, in colour) above which a mask is 1")
    augment: Augment = Field(
        default=Augment(), description="of the pictures; masks move likewise (rotate, crop, shift, flip)"
    )

    def open(self, column: Column, modality: str, context: DataContext) -> Inputs:
        pictures = decoded(column, self.size, context.cache, self.fit, _NEAREST, context.pixels)
        return MaskRows(pictures, self.threshold, self.of, self.augment)

    def beside(self, views: Mapping[str, View]) -> Self:
        if self.of is None:
            return self
        picture = views.get(self.of)
        if not isinstance(picture, Pixels):
            raise ConfigError(f"masks of '{self.of}' need its view pixels; the views here are {dict(views)}")
        return self.model_copy(update={key: getattr(picture, key) for key in ("size", "fit", "augment")})

    def spec(self, modality: str, context: DataContext) -> InputSpec:
        return InputSpec((self.size, self.size))


@dataclass(frozen=True)
class MaskRows:
    """Opened masks.

    Attributes:
        pictures: all masks as pictures, usually a memory map.
        threshold: value above which a pixel is 1.
        of: modality of the pictures that they belong to.
        augment: changes of those in the training view.
    """

    pictures: UInt8[np.ndarray, "n 3 size size"]
    threshold: int
    of: str | None = None
    augment: Augment = field(default_factory=Augment)

    def __len__(self) -> int:
        return len(self.pictures)

    def __call__(
        self, rows: Int64[Tensor, " b"], generator: torch.Generator | None = None
    ) -> UInt8[Tensor, "b size size"]:
        """Masks of ``rows``; with a generator moved as their pictures are."""
        grey = torch.from_numpy(self.pictures[rows.numpy(), :1])
        moved = grey if generator is None else self.augment.moved(grey, generator)
        return (moved[:, 0] > self.threshold).to(torch.uint8)
