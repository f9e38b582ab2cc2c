"""Align modules: sizes of the paper, how every encoder splits, roles of tensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from polyfed.core.errors import ConfigError
from polyfed.data.view import DataContext, InputSpec
from polyfed.models.aligner import Aligned, AlignerSettings, aligned
from polyfed.models.binding import Parts
from polyfed.models.blocks import PostBlock, TransformerBlock
from polyfed.models.encoders.bag import Bag
from polyfed.models.encoders.bert import Bert
from polyfed.models.encoders.blocks import Blocks
from polyfed.models.encoders.gru import GRU
from polyfed.models.encoders.mobilenet import MobileNet
from polyfed.models.encoders.projection import FeatureProjection
from polyfed.models.encoders.resnet import ResNet
from polyfed.models.encoders.transformer import Transformer
from polyfed.models.encoders.vit import ViT
from polyfed.models.heads import LinearHead
from polyfed.models.model import Model
from polyfed.models.slots import places

CONTEXT = DataContext(Path("unused"))
PICTURES = InputSpec((3, 32, 32))
TEXTS = InputSpec((12,), ("<pad>", "<unk>", *(f"w{i}" for i in range(20))), pad=0)
TOKENS = torch.tensor([[5, 3, 7, 9, 0, 0], [2, 0, 0, 0, 0, 0], [1, 2, 3, 4, 5, 6]])
DIM = 10


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


# ---- sizes of the paper


def count(module: nn.Module) -> int:
    return sum(value.numel() for value in module.parameters())


def test_sizes_are_the_papers() -> None:
    words = InputSpec((112,), tuple(f"w{k}" for k in range(28_996)), pad=0)
    settings = AlignerSettings(norm={"text": "post"})
    with torch.device("meta"):
        image = settings.around(ViT(size="base").build(128, InputSpec((3, 224, 224)), CONTEXT), "image", 128)
        text = settings.around(Bert(size="base").build(128, words, CONTEXT), "text", 128)
    assert count(image.trunk) == 85_798_656
    assert count(text.trunk) == 107_719_680
    assert [type(encoder.aligner.layers[0]) for encoder in (image, text)] == [TransformerBlock, PostBlock]
    for encoder in (image, text):
        assert count(encoder.aligner.layers) == 7_087_872
        assert count(encoder.aligner.head) == 1_841_280
        assert encoder.aligner.layers[0].attention.heads == 12
    both = sum(count(encoder.aligner) for encoder in (image, text))
    assert 4 * both / 2**20 == pytest.approx(68.12, abs=0.01)


# ---- splits


ENCODERS: dict[str, Any] = {
    "resnet": ResNet(widths=(8, 12), depths=(1, 1)),
    "resnet-bottleneck": ResNet(widths=(8, 12), depths=(1, 1), block="bottleneck"),
    "vit": ViT(size="tiny", patch=8),
    "vit-mean": ViT(size="tiny", patch=8, pooling="mean"),
    "mobilenet": MobileNet(multiplier=0.1),
    "blocks": Blocks(size="nano", depth=2, patch=8),
    "blocks-mean": Blocks(size="nano", depth=2, patch=8, pooling="mean"),
    "bert": Bert(),
    "bert-pooler": Bert(pooling="pooler"),
    "transformer": Transformer(width=16),
    "transformer-cls": Transformer(width=16, pooling="cls"),
    "gru": GRU(width=8, hidden=6),
    "gru-forward": GRU(width=8, bidirectional=False, hidden=6),
    "bag": Bag(width=8),
    "bag-hidden": Bag(width=8, hidden=6),
    "blocks-text": Blocks(size="nano", depth=2),
}
OF_PICTURES = ("resnet", "vit", "mobilenet", "blocks-mean")


def given(name: str) -> tuple[Aligned, Tensor]:
    pictures = name == "blocks" or name.startswith(OF_PICTURES)
    encoder = ENCODERS[name].build(DIM, PICTURES if pictures else TEXTS, CONTEXT)
    found = AlignerSettings(hidden=7, local=True).around(encoder, "some", DIM)
    return found, torch.randn(3, 3, 32, 32) if pictures else TOKENS


@pytest.mark.parametrize("name", ENCODERS)
def test_every_encoder_can_be_split(name: str) -> None:
    encoder, x = given(name)
    features = encoder.eval().trunk(x)
    assert features.pooled.shape == (3, encoder.aligner.width)
    assert features.local.shape[-1] == encoder.aligner.width
    torch.testing.assert_close(encoder(x), encoder.aligner(features))
    detail = encoder.detail(x)
    torch.testing.assert_close(detail.embedding, encoder(x))
    assert detail.embedding.shape == (3, DIM)
    count = features.local.shape[1] - features.led  # CLS comes once
    assert detail.positions.shape == (3, count, DIM)
    positions, mask = encoder.positions(x)
    torch.testing.assert_close(positions, detail.positions)
    assert (mask is None) == (detail.mask is None)
    assert encoder.split() == (encoder.trunk, encoder.aligner.width)


@pytest.mark.parametrize("name", ENCODERS)
def test_nothing_is_left_that_learns_nothing(name: str) -> None:
    """What is replaced is gone: every parameter has a gradient from the embedding and the positions."""
    encoder, x = given(name)
    detail = encoder.train().detail(x)
    ((detail.embedding * torch.randn(DIM)).sum() + detail.positions.square().sum()).backward()
    idle = [key for key, value in encoder.named_parameters() if value.grad is None]
    assert idle == []


@pytest.mark.parametrize("name", ["bert", "transformer", "gru", "bag", "blocks-text"])
def test_tokens_of_padding_change_nothing(name: str) -> None:
    encoder, _ = given(name)
    encoder.eval()
    torch.testing.assert_close(encoder(TOKENS[:2, :4]), encoder(TOKENS[:2]), rtol=1e-4, atol=1e-5)


def test_an_encoder_without_positions_is_refused() -> None:
    encoder = FeatureProjection().build(DIM, InputSpec((9,)), CONTEXT)
    with pytest.raises(ConfigError, match=r"encoder of 'image' .* has no features by position .* choose resnet"):
        AlignerSettings().around(encoder, "image", DIM)


# ---- roles


def test_every_tensor_is_of_one_part() -> None:
    settings = AlignerSettings(hidden=7, local=True)
    encoders = {
        "image": settings.around(Blocks(size="nano", depth=2, patch=8).build(DIM, PICTURES, CONTEXT), "image", DIM),
        "text": settings.around(Bag(width=8).build(DIM, TEXTS, CONTEXT), "text", DIM),
    }
    model = Model(encoders, {"task": LinearHead(DIM, 3)}, DIM)
    model.extras["more"] = nn.Linear(2, 2)
    found, names = places(model), list(model.state_dict())
    parts = Parts(found)
    assert sorted([*parts.encoder, *parts.aligner, *parts.rest]) == sorted(names)
    assert set(parts.aligner) == {name for name in names if ".aligner." in name and ".aligner.local." not in name}
    assert {name for name in names if ".aligner.local." in name} <= set(parts.rest)
    assert set(parts.encoder) == {name for name in names if ".trunk." in name}
    assert {name.split(".")[0] for name in parts.rest} == {"heads", "extras", "encoders"}
    assert set(parts.without_encoder) == {*parts.aligner, *parts.rest}
    buffers = [name for name, _ in model.named_buffers()]
    assert [name for name in buffers if ".aligner." in name]  # statistics of batch norms go with the aligner
    assert {found[name].slot for name in parts.aligner} == {("image", "aligner"), ("text", "aligner")}
    assert {found[name].slot.role for name in parts.encoder} >= {"attention", "mlp", "norm", "trunk"}
    assert list(aligned(model.encoders)) == ["image", "text"]
