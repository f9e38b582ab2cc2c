"""Recordings as log-mel spectrograms."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from jaxtyping import Float, Int64
from pydantic import Field
from torch import Tensor

from polyfed.core.activity import prepared
from polyfed.core.settings import Settings
from polyfed.data.arrow import fingerprint_of
from polyfed.data.cache import StoredRows, cut_count, unreadable
from polyfed.data.samples import Inputs
from polyfed.data.sounds import recorded_mel, waveform
from polyfed.data.source import Column, Count
from polyfed.data.view import DataContext, InputSpec, View

_VERSION = 1  # raise when the same settings give other spectrograms


class SpecAugment(Settings):
    """One run of frames and one of bands set to the mean (Park et al. 2019, without warping)."""

    frames: int = Field(default=0, ge=0, description="longest run of frames")
    bands: int = Field(default=0, ge=0, description="longest run of bands")

    def __call__(self, x: Float[Tensor, "b t m"], generator: torch.Generator) -> Float[Tensor, "b t m"]:
        for axis, longest in ((1, self.frames), (2, self.bands)):
            size = x.shape[axis]
            lengths, starts = torch.rand(2, len(x), 1, generator=generator)
            lengths = (lengths * (min(longest, size) + 1)).long()
            starts = (starts * (size - lengths + 1)).long()
            positions = torch.arange(size)
            hidden = (positions >= starts) & (positions < starts + lengths)
            x = x.masked_fill(hidden.unsqueeze(3 - axis), 0)
        return x


class Mel(View):
    """Log-mel spectrograms of recordings (WAV, or arrays of samples), computed once into the cache; float32.

    Spectrograms follow Kaldi, as in AST (Gong et al. 2021), and are cut, or padded with zeros, to ``frames``.
    """

    rate: int = Field(default=16000, ge=1000, le=192_000, description="samples per second; recordings are resampled")
    bands: int = Field(default=64, ge=8, le=256, description="mel bands, from 20 Hz to half the rate")
    frames: int = Field(default=96, ge=8, le=8192, description="frames of 25 ms, one every 10 ms")
    mean: float = Field(default=-4.2677393, description="mean that is subtracted; by default that of AudioSet")
    std: float = Field(default=9.1379948, gt=0, description="divisor; by default twice that of AudioSet, as in AST")
    layout: Literal["map", "positions"] = Field(
        default="map", description="an image [1, bands, frames] for networks of images, or positions [frames, bands]"
    )
    augment: SpecAugment = Field(default=SpecAugment(), description="runs that are masked in the training view")

    def open(self, column: Column, modality: str, context: DataContext) -> Inputs:
        """Open recordings.

        Raises:
            DataError: a recording cannot be read (at first use), or the cache cannot be written.
        """
        values = functools.cache(column.flat_values)  # read if spectrograms are missing

        def compute(rows: Sequence[int]) -> Float[Tensor, "k frames bands"]:
            return torch.stack([self._spectrogram(column, row, values()[row].as_py()) for row in rows])

        stamp = fingerprint_of(_VERSION, self.rate, self.bands, self.frames, column.fingerprint)
        stored = StoredRows(
            path=context.cache / f"mel-{self.bands}-{self.frames}-{stamp}.npy",
            shape=lambda: (len(values()), self.frames, self.bands),
            compute=compute,
            what=f"spectrograms of {column.where}",
            ahead=context.ahead,
        )
        return MelRows(stored, self)

    def _spectrogram(self, column: Column, row: int, value: Any) -> Float[Tensor, "frames bands"]:
        try:
            return recorded_mel(value, self.rate, self.bands, self.frames, column.folder)
        except Exception as error:  # scipy raises errors of many types for other files than WAV
            raise unreadable(column, row, value, error, "not a readable recording") from error

    def cut(self, column: Column, modality: str, context: DataContext) -> Count:
        """See ``View``; counts frames of 10 ms."""

        def lengths() -> list[int]:
            values = prepared(f"lengths of {column.where}", column.flat_values(), len(column.flat_values()))
            return [len(waveform(value.as_py(), 100, column.folder)) for value in values]

        stamp = fingerprint_of(_VERSION, self.frames, column.fingerprint)
        return cut_count(f"frames ({modality})", context, stamp, lengths, self.frames)

    def spec(self, modality: str, context: DataContext) -> InputSpec:
        """Shape (1, bands, frames) or (frames, bands)."""
        return InputSpec((1, self.bands, self.frames) if self.layout == "map" else (self.frames, self.bands))


@dataclass(frozen=True)
class MelRows:
    """Opened recordings: spectrograms, and the view that standardises and augments them."""

    stored: StoredRows
    view: Mel

    def __len__(self) -> int:
        return len(self.stored)

    def __call__(self, rows: Int64[Tensor, " b"], generator: torch.Generator | None = None) -> Float[Tensor, "b ..."]:
        x = (self.stored(rows) - self.view.mean) / self.view.std
        x = x if generator is None else self.view.augment(x, generator)
        return x.mT.unsqueeze(1) if self.view.layout == "map" else x

    def prepare(self, rows: Int64[Tensor, " n"]) -> None:
        """Compute the spectrograms of ``rows`` ahead."""
        self.stored.prepare(rows)
