"""Align modules: layers by plain computation, what padding does, heads, errors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from encoder_cases import CONTEXT, DIM, PICTURES, TEXTS
from pydantic import ValidationError
from torch import Tensor, nn

from polyfed.core.errors import ConfigError
from polyfed.data.view import InputSpec
from polyfed.models.aligner import Aligner, AlignerSettings, aligned, sequence
from polyfed.models.binding import Parts
from polyfed.models.blocks import PostBlock, TransformerBlock
from polyfed.models.encoders.blocks import Blocks
from polyfed.models.encoders.from_config import Bert, ViT
from polyfed.models.encoders.words import Bag
from polyfed.models.heads import LinearHead
from polyfed.models.model import Model, ModelSettings
from polyfed.models.slots import model_slots
from polyfed.models.towers import LocalFeatures


def lively(module: nn.Module) -> nn.Module:
    """The module with weights large enough, and statistics odd enough, that every term of a formula shows."""
    for name, value in module.named_parameters():
        value.data = torch.randn_like(value) * (0.3 if "norm" not in name else 0.5) + ("norm" in name)
    for value in module.buffers():
        if value.is_floating_point():
            value.copy_(torch.rand_like(value) + 0.5)
    return module


def some_features(batch: int = 3, length: int = 5, width: int = 8) -> LocalFeatures:
    mask = torch.arange(length) < torch.tensor([length, 1, 3])[:batch, None]
    return LocalFeatures(torch.randn(batch, width), torch.randn(batch, length, width), mask)


def made(width: int = 8, heads: int = 2, norm: Any = "pre", **settings: Any) -> Aligner:
    actual = Aligner(width, DIM, heads, norm, AlignerSettings(**{"hidden": 7, **settings}))
    lively(actual)
    return actual.eval()


# ---- embeddings


def head_by_hand(x: Tensor, head: nn.Module) -> Tensor:
    """Linear, batch norm with running statistics, ReLU, linear, batch norm without affine."""
    first, norm, _, second, last = head
    x = first.weight @ x + first.bias
    x = (x - norm.running_mean) / torch.sqrt(norm.running_var + norm.eps) * norm.weight + norm.bias
    x = second.weight @ x.clamp(min=0) + second.bias
    return (x - last.running_mean) / torch.sqrt(last.running_var + last.eps)


@pytest.mark.parametrize("norm", ["pre", "post"])
@torch.no_grad()
def test_the_embedding_is_the_head_of_what_layers_make_of_the_summary(norm: str) -> None:
    aligner, features = made(norm=norm, layers=2), some_features()
    tokens, mask = sequence(features)
    assert torch.equal(tokens, torch.cat([features.pooled[:, None], features.local], dim=1))
    for layer in aligner.layers:
        tokens = layer(tokens, mask)
    for token, embedding in zip(tokens[:, 0], aligner(features), strict=True):
        torch.testing.assert_close(embedding, head_by_hand(token, aligner.head), rtol=1e-4, atol=1e-5)


# ---- details and padding


@pytest.mark.parametrize("norm", ["pre", "post"])
def test_detail_has_the_same_embedding(norm: str) -> None:
    aligner, features = made(norm=norm, local=True, layers=2), some_features()
    detail = aligner.detail(features)
    torch.testing.assert_close(detail.embedding, aligner(features), rtol=0, atol=0)
    assert detail.positions.shape == (3, 5, DIM)
    assert features.mask is not None
    assert torch.equal(detail.mask, features.mask)


@torch.no_grad()
def test_attention_is_that_of_the_last_layer_without_the_summary() -> None:
    aligner, features = made(local=True, layers=2), some_features()
    tokens, mask = sequence(features)
    first, last = aligner.layers
    shares = last.leading(first(tokens, mask), mask)[:, 1:]
    torch.testing.assert_close(aligner.detail(features).attention, shares / shares.sum(1, keepdim=True))


@pytest.mark.parametrize("norm", ["pre", "post"])
def test_padding_changes_nothing(norm: str) -> None:
    aligner, features = made(norm=norm, local=True, layers=2), some_features()
    padded = LocalFeatures(
        features.pooled,
        torch.cat([torch.where(features.mask[..., None], features.local, 7.0), torch.randn(3, 2, 8)], dim=1),
        nn.functional.pad(features.mask, (0, 2)),
    )
    torch.testing.assert_close(aligner(padded), aligner(features))
    longer, shorter = aligner.detail(padded), aligner.detail(features)
    torch.testing.assert_close(longer.attention[:, :5], shorter.attention)
    torch.testing.assert_close(longer.positions[:, :5][features.mask], shorter.positions[features.mask])
    assert not torch.allclose(aligner(padded._replace(mask=None)), aligner(features), atol=1e-2)


def test_the_summary_and_positions_need_one_width() -> None:
    with pytest.raises(ValueError, match="summary has width 8 and positions 6"):
        sequence(LocalFeatures(torch.zeros(2, 8), torch.zeros(2, 4, 6)))


def test_without_a_head_for_positions_there_are_none() -> None:
    with pytest.raises(ConfigError, match=r"set model\.aligner\.local"):
        made().detail(some_features())


# ---- heads


@pytest.mark.parametrize(("head_norm", "affine"), [("batch", [True, False]), ("layer", [True, False]), ("none", [])])
def test_head_norms(head_norm: str, affine: list[bool]) -> None:
    norms = [part for part in made(head_norm=head_norm).head if isinstance(part, nn.BatchNorm1d | nn.LayerNorm)]
    assert [norm.weight is not None for norm in norms] == affine
    assert all(isinstance(norm, nn.BatchNorm1d if head_norm == "batch" else nn.LayerNorm) for norm in norms)


def test_heads_divide_every_width() -> None:
    for width, heads in {8: 1, 64: 1, 96: 1, 192: 3, 300: 4, 320: 5, 512: 8, 768: 12, 2048: 32, 131: 1}.items():
        with torch.device("meta"):
            actual = AlignerSettings().around(Bag(width=width).build(DIM, TEXTS, CONTEXT), "text", DIM)
        assert actual.aligner.layers[0].attention.heads == heads, width


# ---- settings


def model_settings(**more: Any) -> ModelSettings:
    bag = {"name": "bag", "view": {"name": "tokens", "length": 4}}
    return ModelSettings.model_validate({"dim": 8, "encoders": {"notes": bag, "report": bag}} | more)


def test_settings_that_cannot_be() -> None:
    with pytest.raises(ValidationError, match="final_norm and aligner both end the encoders"):
        model_settings(aligner={}, final_norm=True)
    with pytest.raises(ValidationError, match=r"aligner\.norm names 'scan', the encoders are notes, report"):
        model_settings(aligner={"norm": {"scan": "post"}})
    for key, value in (("hidden", 7), ("head_norm", "layer")):
        with pytest.raises(ValidationError, match=f"{key} has no effect with head: linear"):
            AlignerSettings.model_validate({"head": "linear", key: value})
    encoder = Bag(width=10).build(DIM, TEXTS, CONTEXT)
    with pytest.raises(ConfigError, match=r"aligner\.heads 4 does not divide the width 10 of 'report'"):
        AlignerSettings(heads=4).around(encoder, "report", DIM)


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [("gru", "pie", True), ("gru", "project", True), ("bag", "hidden", 7), ("resnet", "dropout", 0.1)],
)
def test_settings_of_a_projection_are_refused_with_an_aligner(name: str, key: str, value: object) -> None:
    with pytest.raises(ValidationError, match=rf"encoders\.notes\.{key} has no effect with aligner; remove it"):
        model_settings(aligner={}, encoders={"notes": {"name": name, key: value}})
    model_settings(aligner={}, encoders={"notes": {"name": name}})


def test_norms_by_modality() -> None:
    settings = AlignerSettings(norm={"report": "post"})
    made = [settings.around(Bag(width=8).build(DIM, TEXTS, CONTEXT), name, DIM) for name in ("notes", "report")]
    assert [type(encoder.aligner.layers[0]) for encoder in made] == [TransformerBlock, PostBlock]


def test_the_name_of_an_architecture_depends_on_its_aligner() -> None:
    names = [model_settings(**more).architecture for more in ({}, {"aligner": {}}, {"aligner": {"layers": 2}})]
    assert len(set(names)) == 3


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
    assert 4 * sum(count(encoder.aligner) for encoder in (image, text)) / 2**20 == pytest.approx(68.12, abs=0.01)


# ---- roles


def test_every_tensor_is_of_one_part() -> None:
    settings = AlignerSettings(hidden=7, local=True)
    encoders = {
        "image": settings.around(Blocks(size="nano", depth=2, patch=8).build(DIM, PICTURES, CONTEXT), "image", DIM),
        "text": settings.around(Bag(width=8).build(DIM, TEXTS, CONTEXT), "text", DIM),
    }
    model = Model(encoders, {"task": LinearHead(DIM, 3)}, DIM)
    model.extras["more"] = nn.Linear(2, 2)
    actual, names = model_slots(model), list(model.state_dict())
    parts = Parts(actual)
    assert sorted([*parts.encoder, *parts.aligner, *parts.others]) == sorted(names)
    assert set(parts.aligner) == {name for name in names if ".aligner." in name and ".aligner.local." not in name}
    assert {name for name in names if ".aligner.local." in name} <= set(parts.others)
    assert set(parts.encoder) == {name for name in names if ".trunk." in name}
    assert {name.split(".")[0] for name in parts.others} == {"heads", "extras", "encoders"}
    assert set(parts.without_encoder) == {*parts.aligner, *parts.others}
    buffers = [name for name, _ in model.named_buffers()]
    assert [name for name in buffers if ".aligner." in name]  # statistics of batch norms go with the aligner
    assert {actual[name].slot for name in parts.aligner} == {("image", "aligner"), ("text", "aligner")}
    assert {actual[name].slot.role for name in parts.encoder} >= {"attention", "mlp", "norm", "trunk"}
    assert list(aligned(model.encoders)) == ["image", "text"]
