"""A network of sounds (AST) through encoder ``hf``: from its features, its states and itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
import transformers
from torch.nn import functional as F

from polyfed.core.errors import ConfigError
from polyfed.data.backbones import quiet
from polyfed.data.sounds import wav, waveform
from polyfed.data.source import Column
from polyfed.data.view import DataContext
from polyfed.data.views.features import Features
from polyfed.data.views.mel import Mel
from polyfed.models.encoders.hf import HF

SOUNDS = [wav(np.random.default_rng(seed).normal(size=4000) / 4, 16000) for seed in range(3)]
COLUMN = Column(pa.chunked_array([pa.array(SOUNDS)]), "sounds", "sounds", nested=False)


@pytest.fixture(scope="module")
def context(tmp_path_factory: pytest.TempPathFactory) -> DataContext:
    folder = tmp_path_factory.mktemp("weights")
    size = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    patches = {"patch_size": 8, "frequency_stride": 8, "time_stride": 8}
    with quiet():
        config = transformers.ASTConfig(**size, **patches, max_length=40, num_mel_bins=16)
        transformers.ASTModel(config).save_pretrained(folder / "ast")
        transformers.ASTFeatureExtractor(num_mel_bins=16, max_length=40).save_pretrained(folder / "ast")
    return DataContext(tmp_path_factory.mktemp("cache"), weights=folder)


@pytest.mark.parametrize(
    ("settings", "view"),
    [
        ({}, "features"),
        ({"trainable": 1}, "states"),
        ({"trainable": "all"}, "native"),
        ({"adapter": {"name": "lora", "rank": 2}}, "native"),
    ],
)
def test_it_gives_what_transformers_gives(context: DataContext, settings: dict[str, Any], view: str) -> None:
    folder = context.weights / "ast" if context.weights else Path()
    waves = [waveform(sound, 16000) for sound in SOUNDS]
    extractor = transformers.ASTFeatureExtractor.from_pretrained(folder)
    with quiet(), torch.no_grad():
        network = transformers.ASTModel.from_pretrained(folder).eval()
        states = network(extractor(waves, sampling_rate=16000, return_tensors="pt")["input_values"]).last_hidden_state
    encoder = HF.model_validate({"weights": "ast", **settings})
    assert encoder.view.component_name() == view
    made: Any = encoder.build(5, encoder.view.spec("audio", context), context).eval()
    given = made(encoder.view.open(COLUMN, "audio", context)(torch.arange(3)))
    last = made.project[-1]
    expected = F.linear(F.layer_norm(states[:, 0], (16,)), last.weight, last.bias)
    torch.testing.assert_close(given, expected, atol=3e-3, rtol=1e-2)


def test_what_does_not_fit_is_refused(context: DataContext) -> None:
    encoder = HF.model_validate({"weights": "ast", "view": Mel(frames=20, bands=16, layout="positions")})
    with pytest.raises(ConfigError, match="does not take what its view gives"):
        encoder.build(5, encoder.view.spec("audio", context), context)
    with pytest.raises(ConfigError, match="positions is 4, but those of sounds are not averaged"):
        Features(backbone="ast", pool="tokens", positions=4).spec("audio", context)
