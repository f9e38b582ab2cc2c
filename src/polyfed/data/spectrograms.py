"""Log-mel spectrograms as Kaldi's: what most networks of sounds start from."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from polyfed.data.sounds import waveform

_EMPHASIS = 0.97
_LOWEST = 20.0  # hertz
_FLOOR = torch.finfo(torch.float32).eps  # silence has no logarithm


def recorded_mel(
    value: Any, rate: int, bands: int, frames: int, folder: Path | None = None
) -> Float[Tensor, "frames bands"]:
    """``log_mel`` of a recording, cut or filled up to ``frames``; what comes later is neither read nor resampled.

    Args:
        value: as for ``waveform``, whose errors it has.
        rate: samples a second, to which it is resampled.
        bands: number of triangles.
        frames: of the result.
        folder: of the data set.
    """
    samples = waveform(value, rate, folder, most=0.01 * (frames + 3))
    return fitted(log_mel(torch.from_numpy(samples), rate, bands), frames)


def log_mel(
    samples: Float[Tensor, " n"], rate: int, bands: int, window: float = 0.025, step: float = 0.01
) -> Float[Tensor, "frames bands"]:
    """Natural logarithms of the energies in mel bands from 20 Hz to half of the rate.

    Each frame loses its mean, is pre-emphasised (0.97) and weighted by a Hann window; its power spectrum is summed by
    triangles that overlap by half on the scale 1127 ln(1 + f / 700).

    Args:
        samples: the recording; one shorter than a frame is filled up with zeros.
        rate: samples a second.
        bands: number of triangles.
        window: length of a frame in seconds.
        step: from one frame to the next, in seconds.
    """
    length, hop = round(window * rate), round(step * rate)
    padded = torch.nn.functional.pad(samples, (0, max(0, length - len(samples))))
    frames = padded.unfold(0, length, hop)
    frames = frames - frames.mean(1, keepdim=True)
    # the first sample has none before it, and is taken for its own
    before = torch.cat([frames[:, :1], frames[:, :-1]], 1)
    weighted = (frames - _EMPHASIS * before) * torch.hann_window(length, periodic=False)
    size = 1 << (length - 1).bit_length()
    power = torch.fft.rfft(weighted, size).abs() ** 2
    energies: Tensor = power @ triangles(rate, size, bands)
    return energies.clamp_min(_FLOOR).log()


def fitted(spectrogram: Float[Tensor, "t bands"], frames: int) -> Float[Tensor, "frames bands"]:
    """The first frames of a spectrogram; zeros, as transformers has them, where the recording has ended."""
    cut = spectrogram[:frames]
    return torch.nn.functional.pad(cut, (0, 0, 0, frames - len(cut)))


@functools.lru_cache(maxsize=8)
def triangles(rate: int, size: int, bands: int) -> Float[Tensor, "bins bands"]:
    """Weight of each bin of a spectrum of ``size`` samples in each band."""
    mels = _mel(torch.arange(size // 2 + 1, dtype=torch.float64) * rate / size)[:, None]
    low, high = _mel(torch.tensor([_LOWEST, rate / 2], dtype=torch.float64))
    corners = torch.linspace(float(low), float(high), bands + 2, dtype=torch.float64)
    left, middle, right = corners[:-2], corners[1:-1], corners[2:]
    rising, falling = (mels - left) / (middle - left), (right - mels) / (right - middle)
    return torch.minimum(rising, falling).clamp_min(0).float()


def _mel(hertz: Tensor) -> Tensor:
    return 1127 * torch.log1p(hertz / 700)
