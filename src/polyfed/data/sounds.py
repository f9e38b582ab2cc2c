"""Recordings: from WAV files and arrays of samples to one channel at one rate, and to log-mel spectrograms."""

from __future__ import annotations

import functools
import io
import math
import wave
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor

from polyfed.core.extras import brought_by
from polyfed.data.images import image_bytes

MOST_RATE = 1_000_000
"""Highest accepted rate of a recording in samples per second; bats are recorded at half of it."""

MOST_SAMPLES = 1 << 28
"""Most samples at the requested rate, some hours."""

Waveform = Float[np.ndarray, " n"]


def waveform(value: Any, rate: int, folder: Path | None = None, most: float | None = None) -> Waveform:
    """One recording as samples of about -1 to 1, channels averaged, at ``rate`` samples per second.

    Args:
        value: WAV (whole numbers of any width, or fractions) in a struct {bytes, path} or as bytes, or a struct
            {array, sampling_rate}, as ``datasets`` has it decoded: [n], or [channels, n].
        rate: Rate of the result.
        folder: Folder of the data set, which a path must lie in.
        most: Most seconds that are read; None: all.

    Raises:
        ValueError, OSError: it cannot be read, or has no samples.
    """
    with brought_by("sounds"):
        from scipy import signal  # takes a second
        from scipy.io import wavfile

    if isinstance(value, dict) and value.get("array") is not None:
        own, samples = int(value["sampling_rate"]), _by_sample(np.asarray(value["array"], dtype=np.float32))
    else:
        own, samples = wavfile.read(io.BytesIO(image_bytes(value, folder)))
        samples = _as_fractions(samples)
    if not 1 <= own <= MOST_RATE or not samples.size:
        raise ValueError(f"{samples.size:,} samples at {own:,} per second, which may be 1 to {MOST_RATE:,}")
    samples = samples if most is None else samples[: math.ceil(most * own)]
    if (length := len(samples) * rate // own) > MOST_SAMPLES:
        raise ValueError(f"{length:,} samples at {rate:,} per second, the limit is {MOST_SAMPLES:,}")
    mono = samples if samples.ndim == 1 else samples.mean(1)
    if not np.isfinite(mono).all():
        raise ValueError("samples that are not numbers")
    shared = math.gcd(own, rate)
    resampled = mono if own == rate else signal.resample_poly(mono, rate // shared, own // shared)
    return np.asarray(resampled, dtype=np.float32)


def _by_sample(array: NDArray[np.float32]) -> NDArray[np.float32]:
    """[n] or [channels, n] as [n] or [n, channels]; [n, channels] of others would be taken for n channels."""
    if array.ndim == 1 or (array.ndim == 2 and array.shape[0] <= array.shape[1]):
        return array.T
    raise ValueError(f"an array of shape {list(array.shape)}; give [samples] or [channels, samples]")


def _as_fractions(samples: NDArray[Any]) -> Float[np.ndarray, "n ..."]:
    if samples.dtype == np.uint8:  # 8 bits have no sign in WAV
        return ((samples.astype(np.float32)) - 128) / 128
    if samples.dtype.kind == "i":
        return (samples / -float(np.iinfo(samples.dtype).min)).astype(np.float32)
    return samples.astype(np.float32)


def wav(samples: Waveform, rate: int) -> bytes:
    """Samples from -1 to 1 as WAV of 16 bits."""
    buffer = io.BytesIO()
    with wave.open(buffer, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes((samples.clip(-1, 1) * 32767).astype("<i2").tobytes())
    return buffer.getvalue()


_EMPHASIS = 0.97
_LOWEST = 20.0  # hertz
_FLOOR = torch.finfo(torch.float32).eps  # silence has no logarithm


def recorded_mel(
    value: Any, rate: int, bands: int, frames: int, folder: Path | None = None
) -> Float[Tensor, "frames bands"]:
    """``log_mel`` of a recording, cut or filled up to ``frames``; later samples are neither read nor resampled.

    Args:
        value: Recording, with the errors of ``waveform``.
        rate: Samples per second, to which it is resampled.
        bands: number of triangles.
        frames: Frames of the result.
        folder: Folder of the data set.
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
        samples: the recording; if shorter than a frame, it is padded with zeros.
        rate: Samples per second.
        bands: number of triangles.
        window: length of a frame in seconds.
        step: from one frame to the next, in seconds.
    """
    length, hop = round(window * rate), round(step * rate)
    frames = torch.nn.functional.pad(samples, (0, max(0, length - len(samples)))).unfold(0, length, hop)
    frames = frames - frames.mean(1, keepdim=True)
    # the first sample has none before it, and is taken for its own
    before = torch.cat([frames[:, :1], frames[:, :-1]], 1)
    weighted = (frames - _EMPHASIS * before) * torch.hann_window(length, periodic=False)
    size = 1 << (length - 1).bit_length()
    energies: Tensor = torch.fft.rfft(weighted, size).abs() ** 2 @ triangles(rate, size, bands)
    return energies.clamp_min(_FLOOR).log()


def fitted(spectrogram: Float[Tensor, "t bands"], frames: int) -> Float[Tensor, "frames bands"]:
    """The first frames of a spectrogram; zeros, as in transformers, after the end of the recording."""
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
