"""Features by position of the encoders that give them."""

from pathlib import Path

import pytest
import torch
from torch import nn

from polyfed.data.view import DataContext, InputSpec
from polyfed.models.encoders.bag import Bag
from polyfed.models.encoders.bert import Bert
from polyfed.models.encoders.blocks import Blocks
from polyfed.models.encoders.gru import GRU
from polyfed.models.encoders.mobilenet import MobileNet
from polyfed.models.encoders.projection import FeatureProjection
from polyfed.models.encoders.resnet import ResNet
from polyfed.models.encoders.transformer import Transformer
from polyfed.models.encoders.vit import ViT
from polyfed.models.fusion import GranularityFusion, positioned
from polyfed.models.pooling import last_valid, masked_mean
from polyfed.models.towers import EncoderTower, LocalFeatures

CONTEXT = DataContext(Path("unused"))
TEXTS = InputSpec((12,), ("<pad>", "<unk>", *(f"w{i}" for i in range(20))), pad=0)
TOKENS = torch.tensor([[5, 3, 7, 9, 0, 0], [2, 0, 0, 0, 0, 0], [1, 2, 3, 4, 5, 6]])
PICTURES = InputSpec((3, 32, 32))
SEQUENCES = InputSpec((6, 9))


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def words(encoder):
    return encoder.build(10, TEXTS, CONTEXT), TOKENS


def pictures(encoder):
    return encoder.build(10, PICTURES, CONTEXT), torch.randn(2, 3, 32, 32)


def sequences(encoder):
    x = torch.randn(2, 6, 9)
    x[1, 4:] = 0
    return encoder.build(10, SEQUENCES, CONTEXT), x


ENCODERS = {
    "transformer": lambda: words(Transformer(width=16)),
    "transformer-cls": lambda: words(Transformer(width=16, pooling="cls")),
    "bert": lambda: words(Bert(pooling="mean")),
    "bert-pie": lambda: words(Bert(pie=True)),
    "bag": lambda: words(Bag(width=8)),
    "bag-mlp": lambda: words(Bag(width=8, hidden=6)),
    "gru": lambda: words(GRU(width=8, pie=True, project=True)),
    "gru-forward": lambda: words(GRU(width=8, bidirectional=False, hidden=5)),
    "resnet": lambda: pictures(ResNet(widths=(8, 12), depths=(1, 1))),
    "resnet-pie": lambda: pictures(ResNet(widths=(8, 12), depths=(1, 1), pie=True, dropout=0.1)),
    "mobilenet": lambda: pictures(MobileNet(multiplier=0.1)),
    "vit": lambda: pictures(ViT(pooling="mean")),
    "blocks-pictures": lambda: pictures(Blocks(depth=1, pooling="mean")),
    "blocks-cls": lambda: pictures(Blocks(depth=1)),
    "blocks-words": lambda: words(Blocks(depth=1, pooling="mean")),
    "blocks-sequences": lambda: sequences(Blocks(depth=1, pooling="mean")),
}
BY_MEAN = [name for name in ENCODERS if not name.endswith(("-cls", "-pie", "-mlp")) and not name.startswith("gru")]


@pytest.mark.parametrize("name", ENCODERS)
def test_encoders_give_positions_that_can_be_trained_and_fused(name):
    encoder, x = ENCODERS[name]()
    assert positioned(encoder)
    local, mask = encoder.positions(x)
    assert local.shape[::2] == (len(x), 10)
    assert mask is None or mask.shape == local.shape[:2]
    fused = GranularityFusion(10).embedding(local, torch.randn_like(local), mask)
    fused.square().sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in encoder.project.parameters())


@pytest.mark.parametrize("name", BY_MEAN)
def test_their_mean_is_the_embedding_of_encoders_that_pool_by_mean(name):
    encoder, x = ENCODERS[name]()
    encoder.eval()
    local, mask = encoder.positions(x)
    mean = local.mean(1) if mask is None else masked_mean(local, mask)
    torch.testing.assert_close(mean, encoder(x), atol=1e-5, rtol=1e-4)


def test_positions_of_blocks_leave_their_own_cls_token_out():
    encoder, x = ENCODERS["blocks-cls"]()
    local, mask = encoder.eval().positions(x)
    assert local.shape[1] == 4
    assert mask is None
    tokens, valid = encoder.tokens(x)
    torch.testing.assert_close(local, encoder.project(encoder.encode(tokens, valid))[:, 1:])


def test_positions_of_sequences_tell_their_padding():
    encoder, x = ENCODERS["blocks-sequences"]()
    assert torch.equal(encoder.positions(x)[1], torch.tensor([[1] * 6, [1] * 4 + [0] * 2]).bool())


def test_blocks_of_width_d_are_positions_as_they_are():
    encoder = Blocks(depth=1, pooling="mean").build(96, PICTURES, CONTEXT).eval()
    x = torch.randn(2, 3, 32, 32)
    torch.testing.assert_close(encoder.positions(x)[0].mean(1), encoder(x))


def test_a_gru_has_read_the_whole_text_at_its_ends():
    encoder = GRU(width=8).build(10, TEXTS, CONTEXT)
    local, mask = encoder.positions(nn.functional.pad(TOKENS, (0, 3)))
    assert mask.shape == local.shape[:2] == (3, 9)
    torch.testing.assert_close(encoder.positions(TOKENS)[0], local[:, :6])
    embedding = encoder(TOKENS)
    torch.testing.assert_close(last_valid(local, mask.sum(1))[:, :5], embedding[:, :5])
    torch.testing.assert_close(local[:, 0, 5:], embedding[:, 5:])


def test_without_positions_an_encoder_says_so():
    class Other(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.positions = nn.Embedding(3, 2)

    assert not positioned(Other())
    assert not positioned(FeatureProjection().build(10, InputSpec((9,)), CONTEXT))


def test_local_features_of_another_width_are_refused():
    class Trunk(nn.Module):
        def forward(self, x: torch.Tensor) -> LocalFeatures:
            return LocalFeatures(x.mean(1), x[..., :2])

    with pytest.raises(ValueError, match="width 2 do not fit the projection from 6"):
        EncoderTower(Trunk(), 6, 4).positions(torch.zeros(2, 3, 6))
