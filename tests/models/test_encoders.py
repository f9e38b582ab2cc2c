"""Every encoder trains, is drawn from the seed, gives positions, splits, and refuses other input."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from encoder_cases import CONTEXT, DIM, ENCODERS, OF_TEXTS, PICTURES, TEXTS, TOKENS, built
from pydantic import ValidationError
from torch import Tensor, nn

from polyfed.core.errors import ConfigError
from polyfed.data.view import InputSpec
from polyfed.models.aligner import Aligned, AlignerSettings
from polyfed.models.encoder import Encoder
from polyfed.models.encoders.from_config import FeatureProjection
from polyfed.models.encoders.words import GRU
from polyfed.models.fusion import GranularityFusion
from polyfed.models.towers import EncoderTower, LocalFeatures, last_valid, masked_mean, positioned

every_encoder = pytest.mark.parametrize("name", ENCODERS)
every_text_encoder = pytest.mark.parametrize("name", OF_TEXTS)


@every_encoder
def test_inputs_become_embeddings_that_can_be_trained(name: str) -> None:
    model, x = built(name)
    embedding = model(x)
    assert embedding.shape == (3, DIM)
    embedding.square().sum().backward()
    assert all(value.grad is not None and value.grad.isfinite().all() for value in model.parameters())
    assert not torch.allclose(embedding[0], embedding[2])


@every_encoder
def test_weights_come_from_the_global_generator(name: str) -> None:
    states = []
    for seed in (5, 5, 6):
        torch.manual_seed(seed)
        states.append(built(name)[0].state_dict())
    first, second, third = states
    assert all(torch.equal(first[key], second[key]) for key in first)
    assert any(not torch.equal(first[key], third[key]) for key in first)


# ---- texts


@every_text_encoder
def test_amount_of_padding_does_not_matter(name: str) -> None:
    model = built(name)[0].eval()
    alone = torch.cat([model(row[: int((row != 0).sum())].unsqueeze(0)) for row in TOKENS])
    for tokens in (TOKENS, nn.functional.pad(TOKENS, (0, 5))):
        torch.testing.assert_close(model(tokens), alone, atol=1e-5, rtol=1e-4)


@every_text_encoder
def test_empty_texts_work(name: str) -> None:
    model, _ = built(name)
    embedding = model(torch.tensor([[0, 0, 0], [4, 5, 0]]))
    embedding.sum().backward()
    assert embedding.isfinite().all()
    assert all(value.grad is None or value.grad.isfinite().all() for value in model.parameters())


@every_text_encoder
def test_no_value_is_fetched_from_the_device(name: str) -> None:
    # on the meta device values are absent: whatever would sync on a GPU raises here
    with torch.device("meta"):
        assert built(name)[0](TOKENS.to("meta")).shape == (3, DIM)


# ---- positions


@every_encoder
def test_positions_can_be_trained_and_fused(name: str) -> None:
    encoder, x = built(name)
    assert positioned(encoder)
    local, mask = encoder.positions(x)
    assert local.shape[::2] == (3, DIM)
    assert mask is None or mask.shape == local.shape[:2]
    GranularityFusion(DIM).embedding(local, torch.randn_like(local), mask).square().sum().backward()
    assert all(value.grad is not None and value.grad.isfinite().all() for value in encoder.project.parameters())


POOLED = ["bert-mean", "bag", "resnet", "vit-mean", "blocks-mean", "blocks-text-mean", "blocks-sequences"]


@pytest.mark.parametrize("name", POOLED)
def test_their_mean_is_the_embedding_of_encoders_that_pool_by_mean(name: str) -> None:
    encoder, x = built(name)
    encoder.eval()
    local, mask = encoder.positions(x)
    mean = local.mean(1) if mask is None else masked_mean(local, mask)
    torch.testing.assert_close(mean, encoder(x), atol=1e-5, rtol=1e-4)


def test_positions_of_blocks_leave_their_own_cls_token_out() -> None:
    encoder, x = built("blocks")
    local, mask = encoder.eval().positions(x)
    assert local.shape[1] == 16
    assert mask is None
    tokens, valid = encoder.tokens(x)
    torch.testing.assert_close(local, encoder.project(encoder.encode(tokens, valid))[:, 1:])


def test_positions_of_sequences_have_a_padding_mask() -> None:
    encoder, x = built("blocks-sequences")
    assert torch.equal(encoder.positions(x)[1], torch.tensor([[1] * 6, [1] * 4 + [0] * 2, [1] * 6]).bool())


def test_a_gru_has_read_the_whole_text_at_its_ends() -> None:
    encoder = GRU(width=8).build(DIM, TEXTS, CONTEXT)
    local, mask = encoder.positions(nn.functional.pad(TOKENS, (0, 3)))
    assert mask.shape == local.shape[:2] == (3, 9)
    torch.testing.assert_close(encoder.positions(TOKENS)[0], local[:, :6])
    embedding = encoder(TOKENS)
    torch.testing.assert_close(last_valid(local, mask.sum(1))[:, :5], embedding[:, :5])
    torch.testing.assert_close(local[:, 0, 5:], embedding[:, 5:])


# ---- splits into trunk and align module


def aligned_encoder(name: str) -> tuple[Aligned, Tensor]:
    encoder, x = built(name)
    return AlignerSettings(hidden=7, local=True).around(encoder, "some", DIM), x


@every_encoder
def test_every_encoder_can_be_split(name: str) -> None:
    encoder, x = aligned_encoder(name)
    features = encoder.eval().trunk(x)
    assert features.pooled.shape == (3, encoder.aligner.width)
    assert features.local.shape[-1] == encoder.aligner.width
    torch.testing.assert_close(encoder(x), encoder.aligner(features))
    detail = encoder.detail(x)
    torch.testing.assert_close(detail.embedding, encoder(x))
    count = features.local.shape[1] - features.led  # CLS comes once
    assert detail.positions.shape == (3, count, DIM)
    positions, mask = encoder.positions(x)
    torch.testing.assert_close(positions, detail.positions)
    assert (mask is None) == (detail.mask is None)
    assert encoder.split() == (encoder.trunk, encoder.aligner.width)


@every_encoder
def test_nothing_is_left_that_learns_nothing(name: str) -> None:
    """Replaced parts are gone: every parameter has a gradient from the embedding and the positions."""
    encoder, x = aligned_encoder(name)
    detail = encoder.train().detail(x)
    ((detail.embedding * torch.randn(DIM)).sum() + detail.positions.square().sum()).backward()
    assert [key for key, value in encoder.named_parameters() if value.grad is None] == []


# ---- refusals

WORDS, FLAT = InputSpec((7,), ("a", "b")), InputSpec((9,))
OTHERS = InputSpec((5,)), InputSpec((3, 5), ("a", "b")), InputSpec((2, 3, 8, 8))
NEEDS_TOKENS = r"encoder '{}' needs token ids .* gives shape \[3, 32, 32\]"
NEEDS_IMAGES = r"encoder '{}' needs images .*gives shape \[7\] and a vocabulary"


@pytest.mark.parametrize(
    ("settings", "spec", "message"),
    [
        *((name, PICTURES, NEEDS_TOKENS.format(name)) for name in ("gru", "bag", "bert")),
        *((name, WORDS, NEEDS_IMAGES.format(name)) for name in ("resnet", "vit")),
        ("projection", WORDS, "encoder 'projection' needs features"),
        ({"name": "projection", "pie": True}, FLAT, "pool: tokens"),
        ({"name": "vit", "patch": 7}, PICTURES, "patch 7 does not divide images of 32x32"),
        *(("blocks", spec, "encoder 'blocks' needs images .* its view gives shape") for spec in OTHERS),
        ("blocks", InputSpec((3, 24, 32)), "patch 16 does not divide images of 24x32"),
        ({"name": "bert", "positions": 8}, TEXTS, "room for 8 tokens a text, its view gives 12"),
    ],
)
def test_other_input_is_refused(settings: Any, spec: InputSpec, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Encoder.model_validate(settings).build(8, spec, CONTEXT)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"name": "resnet", "widths": (8, 16)}, r"widths \[8, 16\] and depths \[1, 1, 1, 1\] differ"),
        ({"name": "resnet", "widths": (6, 12), "depths": (1, 1), "block": "bottleneck"}, "multiples of 4"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        Encoder.model_validate(settings)


def test_an_encoder_without_positions_is_refused() -> None:
    class Other(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.positions = nn.Embedding(3, 2)

    projection = FeatureProjection().build(DIM, FLAT, CONTEXT)
    assert not positioned(Other())
    assert not positioned(projection)
    with pytest.raises(ConfigError, match=r"encoder of 'image' .* has no features by position .* choose resnet"):
        AlignerSettings().around(projection, "image", DIM)


def test_local_features_of_another_width_are_refused() -> None:
    class Trunk(nn.Module):
        def forward(self, x: Tensor) -> LocalFeatures:
            return LocalFeatures(x.mean(1), x[..., :2])

    with pytest.raises(ValueError, match="width 2 do not fit the projection from 6"):
        EncoderTower(Trunk(), 6, 4).positions(torch.zeros(2, 3, 6))
