"""Recordings from WAV and from arrays, and their spectrograms against transformers' and against loops."""

from __future__ import annotations

import io
import math
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch
from scipy.io import wavfile

from polyfed.core.errors import DataError
from polyfed.data.backbones import SoundPreparation
from polyfed.data.preparation import prepare_folder
from polyfed.data.sounds import log_mel, triangles, wav, waveform
from polyfed.data.source import Column
from polyfed.data.sources.folder import Folder
from polyfed.data.sources.scenes import Scenes
from polyfed.data.view import DataContext
from polyfed.data.views.mel import Mel, SpecAugment

TONE = np.sin(np.arange(4000) * 2 * math.pi * 1000 / 16000).astype(np.float32) / 2


def written(samples: np.ndarray, rate: int = 16000) -> bytes:
    file = io.BytesIO()
    wavfile.write(file, rate, samples)
    return file.getvalue()


@pytest.mark.parametrize(
    ("samples", "tolerance"),
    [
        ((TONE * 127 + 128).astype(np.uint8), 0.02),
        ((TONE * 2**15).astype(np.int16), 1e-4),
        ((TONE * 2.0**31).astype(np.int32), 1e-6),
        (TONE, 1e-7),
        (np.stack([TONE, TONE], 1), 1e-7),
    ],
)
def test_every_width_and_several_channels_give_the_same_samples(samples: np.ndarray, tolerance: float) -> None:
    np.testing.assert_allclose(waveform(written(samples), 16000), TONE, atol=tolerance)


def test_arrays_files_and_our_own_wav(tmp_path: Path) -> None:
    (tmp_path / "tone.wav").write_bytes(wav(TONE, 16000))
    for value in ({"bytes": wav(TONE, 16000), "path": None}, {"bytes": None, "path": "tone.wav"}):
        np.testing.assert_allclose(waveform(value, 16000, tmp_path), TONE, atol=1e-4)
    decoded = {"array": TONE.tolist(), "sampling_rate": 16000, "path": "tone.wav"}
    np.testing.assert_array_equal(waveform(decoded, 16000), TONE)
    stereo = {"array": np.stack([TONE, 0 * TONE]), "sampling_rate": 16000}
    np.testing.assert_allclose(waveform(stereo, 16000), TONE / 2)


def test_another_rate_keeps_length_and_pitch_and_what_is_late_is_not_read() -> None:
    slow = waveform(written(TONE), 8000)
    assert len(slow) == 2000
    assert np.abs(np.fft.rfft(slow)).argmax() * 8000 / 2000 == 1000
    assert len(waveform(written(TONE), 16000, most=0.1)) == 1600


@pytest.mark.parametrize(
    "value",
    [
        b"no sound",
        {"bytes": None, "path": None},
        written(np.full(9, np.nan, np.float32)),
        {"array": np.zeros((400, 2)), "sampling_rate": 16000},
        {"array": np.zeros((1, 2, 400)), "sampling_rate": 16000},
    ],
)
def test_unreadable_recordings_are_refused(value: object) -> None:
    with pytest.raises((ValueError, OSError)):
        waveform(value, 16000)


# ---- spectrograms


def test_log_mel_is_that_of_transformers() -> None:
    from transformers import ASTFeatureExtractor

    noisy = (TONE + np.random.default_rng(0).normal(size=4000) / 10).astype(np.float32)
    theirs = ASTFeatureExtractor(num_mel_bins=32, do_normalize=False)(noisy, sampling_rate=16000, return_tensors="pt")
    ours = log_mel(torch.from_numpy(noisy), 16000, 32)
    assert ours.shape == (1 + (4000 - 400) // 160, 32)
    torch.testing.assert_close(ours, theirs["input_values"][0, : len(ours)], atol=2e-3, rtol=1e-3)


def test_one_frame_equals_loops() -> None:
    frame = torch.randn(200, generator=torch.Generator().manual_seed(0), dtype=torch.float32)
    values = [float(value) - float(frame.mean()) for value in frame]
    values = [value - 0.97 * values[max(0, k - 1)] for k, value in enumerate(values)]
    values = [value * (0.5 - 0.5 * math.cos(2 * math.pi * k / 199)) for k, value in enumerate(values)]
    power = []
    for j in range(129):
        angles = [2 * math.pi * j * k / 256 for k in range(200)]
        real = sum(value * math.cos(angle) for value, angle in zip(values, angles, strict=True))
        power.append(real**2 + sum(value * math.sin(angle) for value, angle in zip(values, angles, strict=True)) ** 2)
    weights = triangles(8000, 256, 10).tolist()
    expected = [math.log(sum(p * row[band] for p, row in zip(power, weights, strict=True))) for band in range(10)]
    assert log_mel(frame, 8000, 10)[0].tolist() == pytest.approx(expected, abs=1e-3)


def test_silence_and_a_short_recording_are_finite() -> None:
    assert log_mel(torch.zeros(10), 16000, 8).tolist() == [[pytest.approx(math.log(2**-23))] * 8]


def test_a_backbone_reads_no_more_of_a_recording_than_it_takes() -> None:
    late = np.concatenate([TONE, np.full(4000, np.nan, np.float32)])
    result = SoundPreparation(16000, 8, 20, mean=-4.0, std=2.0)([written(late)], None, 1).x
    torch.testing.assert_close(result, (log_mel(torch.from_numpy(TONE), 16000, 8)[None, :20] + 4) / 2)


# ---- the view


def context(tmp_path: Path) -> DataContext:
    return DataContext(tmp_path / "cache")


def sounds(*values: object) -> Column:
    return Column(pa.chunked_array([pa.array(values)]), "made", "sounds", nested=False)


def test_scenes_become_maps_or_positions(tmp_path: Path) -> None:
    split = Scenes(columns={"audio": "audio"}, train=3).open("train", name="scenes", data_dir=None)
    for layout, shape in (("map", (1, 16, 40)), ("positions", (40, 16))):
        view = Mel.model_validate({"rate": 8000, "bands": 16, "frames": 40, "layout": layout})
        inputs = view.open(split.modality("audio"), "audio", context(tmp_path))
        assert view.spec("audio", context(tmp_path)).shape == shape
        x = inputs(torch.tensor([2, 0]))
        assert x.shape == (2, *shape)
        assert len({float(one.sum()) for one in inputs(torch.arange(3))}) == 3
        assert torch.equal(x, inputs(torch.tensor([2, 0]), torch.Generator().manual_seed(0)))
    assert len(list((tmp_path / "cache").glob("mel-*.npy"))) == 1


def test_a_short_recording_is_filled_up_with_what_silence_is_in_ast(tmp_path: Path) -> None:
    view = Mel(frames=30, bands=8, mean=-4.0, std=2.0, layout="positions")
    x = view.open(sounds(wav(TONE, 16000)), "audio", context(tmp_path))(torch.tensor([0]))[0]
    assert torch.equal(x[23:], torch.full((7, 8), 2.0))


def test_a_broken_recording_is_named(tmp_path: Path) -> None:
    inputs = Mel().open(sounds(wav(TONE, 16000), b"no sound"), "audio", context(tmp_path))
    with pytest.raises(DataError, match="sounds, row 1: not a readable recording"):
        inputs(torch.tensor([1]))


def test_augmentation_hides_one_run_of_each_axis() -> None:
    hidden = SpecAugment(frames=5, bands=3)(torch.ones(64, 20, 10), torch.Generator().manual_seed(0)) == 0
    frames, bands = hidden.all(2), hidden.all(1)
    assert torch.equal(hidden, frames[:, :, None] | bands[:, None, :])
    assert {*frames.sum(1).tolist()} == {*range(6)}
    assert {*bands.sum(1).tolist()} == {*range(4)}
    assert all(run.nonzero()[:, 0].diff().eq(1).all() for run in [*frames, *bands])


# ---- folders


def test_a_folder_of_recordings_is_read_like_images_and_not_prepared(tmp_path: Path) -> None:
    for split in ("train", "test"):
        for label in ("cat", "dog"):
            (tmp_path / "sounds" / split / label).mkdir(parents=True)
            (tmp_path / "sounds" / split / label / "1.wav").write_bytes(wav(TONE, 16000))
    source = Folder(path="sounds", columns={"audio": "audio"}, targets={"label": "label"})
    split = source.open("test", name="sounds", data_dir=tmp_path)
    assert split.ids == ("test/cat/1.wav", "test/dog/1.wav")
    assert split.classes == {"label": ("cat", "dog")}
    inputs = Mel(bands=8, frames=8).open(split.modality("audio"), "audio", context(tmp_path))
    assert inputs(torch.arange(2)).shape == (2, 1, 8, 8)
    with pytest.raises(DataError, match="holds recordings, which need no preparation"):
        prepare_folder(Folder(path=str(tmp_path / "sounds")), tmp_path / "out")
