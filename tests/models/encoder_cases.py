"""One of every kind of encoder, with an input for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from polyfed.data.view import DataContext, InputSpec
from polyfed.models.encoder import Encoder
from polyfed.models.encoders.blocks import Blocks
from polyfed.models.encoders.from_config import Bert, ViT
from polyfed.models.encoders.resnet import ResNet
from polyfed.models.encoders.words import GRU, Bag

CONTEXT = DataContext(Path("unused"))
PICTURES = InputSpec((3, 32, 32))
SEQUENCES = InputSpec((6, 9))
TEXTS = InputSpec((12,), ("<pad>", "<unk>", *(f"w{i}" for i in range(20))), pad=0)
TOKENS = torch.tensor([[5, 3, 7, 9, 0, 0], [2, 0, 0, 0, 0, 0], [1, 2, 3, 4, 5, 6]])
DIM = 10

OF_PICTURES: dict[str, Encoder] = {
    "resnet": ResNet(widths=(8, 12), depths=(1, 1)),
    "resnet-bottleneck": ResNet(widths=(8, 16), depths=(1, 2), block="bottleneck", dropout=0.5),
    "resnet-pie": ResNet(widths=(8, 12), depths=(1, 1), pie=True, stem="large"),
    "vit": ViT(size="nano", patch=8),
    "vit-mean": ViT(size="nano", patch=8, pooling="mean"),
    "vit-pie": ViT(size="nano", patch=8, pooling="mean", pie=True),
    "blocks": Blocks(depth=2, patch=8),
    "blocks-mean": Blocks(depth=1, pooling="mean"),
}
OF_TEXTS: dict[str, Encoder] = {
    "gru": GRU(width=8, hidden=6),
    "gru-pie": GRU(width=8, pie=True, project=True),
    "gru-last": GRU(width=8, readout="last", dropout=0.1),
    "gru-forward": GRU(width=8, bidirectional=False, hidden=5),
    "bag": Bag(width=8),
    "bag-hidden": Bag(width=8, hidden=6),
    "bert": Bert(),
    "bert-mean": Bert(pooling="mean"),
    "bert-pie": Bert(pooling="mean", pie=True),
    "bert-pooler": Bert(pooling="pooler"),
    "blocks-text": Blocks(depth=2),
    "blocks-text-mean": Blocks(depth=1, pooling="mean"),
}
ENCODERS = {**OF_PICTURES, **OF_TEXTS, "blocks-sequences": Blocks(depth=1, pooling="mean")}


def built(name: str, dim: int = DIM) -> tuple[Any, Tensor]:
    """An encoder and an input of three samples."""
    spec = TEXTS if name in OF_TEXTS else PICTURES if name in OF_PICTURES else SEQUENCES
    x = TOKENS if name in OF_TEXTS else torch.randn(3, *spec.shape)
    if spec is SEQUENCES:
        x[1, 4:] = 0
    return ENCODERS[name].build(dim, spec, CONTEXT), x
