"""Pictures as float pixels."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Int64, UInt8
from pydantic import Field
from torch import Tensor

from polyfed.data.cache import Decoding, Undecoded, decoded
from polyfed.data.images import Augment, MeanStd, Normalisation, normalised
from polyfed.data.pictures import ImageFit, MaskResampling, Resampling
from polyfed.data.samples import Inputs
from polyfed.data.source import Column
from polyfed.data.view import DataContext, InputSpec, View

Pictures = UInt8[np.ndarray, "n 3 size size"] | Undecoded


class Pixels(View):
    """Square RGB pictures, decoded once into the cache; encoder input is float32 [b, 3, size, size]."""

    size: int = Field(default=64, ge=8, le=2048, description="height and width in pixels")
    fit: ImageFit = Field(default="squash", description="squash: change the shape; crop: cut out the middle square")
    resampling: Resampling = Field(default="bicubic", description="filter of the resize")
    normalise: Normalisation | MeanStd = Field(default="half", description="mean and standard deviation of the pixels")
    augment: Augment = Field(default=Augment(), description="random changes in the training view")

    def open(self, column: Column, modality: str, context: DataContext) -> Inputs:
        pictures = pictures_of(column, self.size, self.fit, self.resampling, context)
        return PixelRows(pictures, self.normalise, self.augment)

    def spec(self, modality: str, context: DataContext) -> InputSpec:
        """Shape (3, size, size)."""
        return InputSpec((3, self.size, self.size))


def pictures_of(
    column: Column, size: int, fit: ImageFit, resampling: Resampling | MaskResampling, context: DataContext
) -> Pictures:
    """Pictures of a column, all of them decoded unless the context has it otherwise."""
    if not context.ahead:
        return Undecoded(column, Decoding(size, fit, resampling, context.pixels))
    return decoded(column, size, context.cache, fit, resampling, context.pixels)


@dataclass(frozen=True)
class PixelRows:
    """Opened pictures.

    Attributes:
        pictures: all pictures, usually a memory map.
        normalise: the constants, or their name.
        augment: changes of the training view.
    """

    pictures: Pictures
    normalise: Normalisation | MeanStd
    augment: Augment

    def __len__(self) -> int:
        return len(self.pictures)

    def __call__(
        self, rows: Int64[Tensor, " b"], generator: torch.Generator | None = None
    ) -> Float[Tensor, "b 3 size size"]:
        """Normalised pictures of ``rows``, augmented if there is a generator."""
        x = torch.from_numpy(self.pictures[rows.numpy()])
        if generator is None:
            return normalised(x, self.normalise)
        return self.augment.normalised(normalised(self.augment.pixels(x, generator), self.normalise), generator)
