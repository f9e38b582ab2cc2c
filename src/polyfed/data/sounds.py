"""Recordings: from WAV files and arrays of samples to one channel at one rate."""

from __future__ import annotations

import io
import math
import wave
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float
from numpy.typing import NDArray

from polyfed.data.pictures import picture_bytes

MOST_RATE = 1_000_000
"""Most samples a second that a recording may have; bats are recorded at half of it."""

MOST_SAMPLES = 1 << 28
"""Most samples at the rate that is asked for, some hours."""

Waveform = Float[np.ndarray, " n"]


def waveform(value: Any, rate: int, folder: Path | None = None, most: float | None = None) -> Waveform:
    """One recording as samples of about -1 to 1, channels averaged, at ``rate`` samples a second.

    Args:
        value: WAV (whole numbers of any width, or fractions) in a struct {bytes, path} or as bytes, or a struct
            {array, sampling_rate}, as ``datasets`` has it decoded: [n], or [channels, n].
        rate: of the result.
        folder: of the data set, which a path must lie in.
        most: seconds that are read at most; None: all.

    Raises:
        ValueError, OSError: it cannot be read, or has no samples.
    """
    from scipy import signal  # takes a second
    from scipy.io import wavfile

    if isinstance(value, dict) and value.get("array") is not None:
        own, samples = int(value["sampling_rate"]), _by_sample(np.asarray(value["array"], dtype=np.float32))
    else:
        own, samples = wavfile.read(io.BytesIO(picture_bytes(value, folder)))
        samples = _as_fractions(samples)
    if not 1 <= own <= MOST_RATE or not samples.size:
        raise ValueError(f"{samples.size:,} samples at {own:,} a second, which may be 1 to {MOST_RATE:,}")
    samples = samples if most is None else samples[: math.ceil(most * own)]
    if (length := len(samples) * rate // own) > MOST_SAMPLES:
        raise ValueError(f"{length:,} samples at {rate:,} a second, the limit is {MOST_SAMPLES:,}")
    mono = samples if samples.ndim == 1 else samples.mean(1)
    if not np.isfinite(mono).all():
        raise ValueError("samples that are no numbers")
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
