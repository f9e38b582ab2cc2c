"""Align modules: layers by plain computation, padding, errors; and features of one encoder under those of another."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from encoder_cases import CONTEXT, DIM, PICTURES, TEXTS
from pydantic import ValidationError
from torch import Tensor, nn

from polyfed.core.errors import ConfigError
from polyfed.data.view import DataContext, InputSpec
from polyfed.models.aligner import Aligner, AlignerSettings, aligned, sequence
from polyfed.models.binding import Bound, EncoderFeatures, Parts, aligners_of, frozen_aligners, frozen_copy
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


# ---- features of one encoder under the align modules of another


BATCH = {
    "notes": torch.tensor([[5, 3, 7, 9], [2, 0, 0, 0], [1, 2, 3, 4]]),
    "report": torch.tensor([[4, 4, 7, 0], [2, 8, 1, 0], [6, 0, 0, 0]]),
}
D = 6


@pytest.fixture
def model() -> Model:
    return two_texts(0)


def two_texts(seed: int, **aligner: Any) -> Model:
    """Two texts; the third encoder has no align module and is passed over."""
    torch.manual_seed(seed)
    context, settings = DataContext(Path("unused")), AlignerSettings(**{"hidden": 7, "local": True, **aligner})
    encoders: dict[str, nn.Module] = {name: Bag(width=8).build(D, TEXTS, context) for name in (*BATCH, "other")}
    encoders |= {name: settings.around(encoders[name], name, D) for name in BATCH}
    return Model(encoders, {"task": LinearHead(D, 3)}, D)


def counted(model: Model) -> list[str]:
    """The modalities whose trunks are called from now on, in order."""
    calls: list[str] = []
    for name in BATCH:
        model.encoders[name].trunk.register_forward_hook(lambda *_, name=name: calls.append(name))
    return calls


def test_the_own_align_modules_give_the_models_embedding(model: Model) -> None:
    view = Bound(EncoderFeatures(model.eval()), aligners_of(model))
    assert view.device == model.device
    for name, x in BATCH.items():
        torch.testing.assert_close(view.embed(name, x), model.embed(name, x), rtol=0, atol=0)
        torch.testing.assert_close(view.represent(name, x), model.represent(name, x), rtol=0, atol=0)
        torch.testing.assert_close(view.represent(name, x).norm(dim=1), torch.ones(3))
        torch.testing.assert_close(view.detail(name, x), model.detail(name, x), rtol=0, atol=0)


def test_other_align_modules_give_another(model: Model) -> None:
    other = aligners_of(two_texts(1).eval())
    model.eval()
    features = EncoderFeatures(model)
    for name, x in BATCH.items():
        actual = Bound(features, other).embed(name, x)
        torch.testing.assert_close(actual, other[name](model.encoders[name].trunk(x)))
        assert not torch.allclose(actual, model.embed(name, x), atol=1e-3)


def test_a_batch_is_encoded_once_for_several_align_modules(model: Model) -> None:
    calls, features = counted(model), EncoderFeatures(model)
    views = [Bound(features, aligners_of(model)), Bound(features, frozen_aligners(model, model.state_dict()))]
    for view in views:
        for name, x in BATCH.items():
            view.embed(name, x), view.represent(name, x), view.detail(name, x)
    assert calls == ["notes", "report"]
    views[0].embed("notes", BATCH["notes"].clone())  # another input
    assert calls == ["notes", "report", "notes"]


def test_gradients_reach_trunks_unless_frozen(model: Model) -> None:
    for is_frozen in (False, True):
        model.zero_grad()
        view = Bound(EncoderFeatures(model, frozen=is_frozen), aligners_of(model))
        sum(view.embed(name, x).square().sum() for name, x in BATCH.items()).backward()
        reached = {name: value.grad is not None for name, value in model.named_parameters()}
        assert all(reached[name] for name in reached if ".aligner.layers" in name)
        assert all(reached[name] != is_frozen for name in reached if ".trunk." in name)
        assert not any(reached[name] for name in reached if name.startswith(("encoders.other", "heads")))


# ---- copies


def test_frozen_align_modules_pass_gradient_on(model: Model) -> None:
    weights = two_texts(1).state_dict()
    before = copy.deepcopy(weights)
    anchors = frozen_aligners(model.train(), weights)
    assert list(anchors) == list(BATCH)
    for name, anchor in anchors.items():
        assert not [value for value in anchor.parameters() if value.requires_grad]
        expected = {key: value for key, value in before.items() if key.startswith(f"encoders.{name}.aligner.")}
        assert {f"encoders.{name}.aligner.{key}" for key in anchor.state_dict()} == set(expected)
        for key, value in anchor.state_dict().items():
            assert torch.equal(value, expected[f"encoders.{name}.aligner.{key}"])
    (Bound(EncoderFeatures(model), anchors).embed("notes", BATCH["notes"]) * torch.arange(D)).sum().backward()
    reached = [name for name, value in model.named_parameters() if value.grad is not None]
    assert reached == ["encoders.notes.trunk.embedding.weight"]
    assert float(model.encoders["notes"].trunk.embedding.weight.grad.norm()) > 0
    for name, value in weights.items():
        assert torch.equal(value, before[name])  # no statistic moved either


def test_frozen_align_modules_need_all_their_tensors(model: Model) -> None:
    weights = model.state_dict()
    del weights["encoders.report.aligner.head.0.weight"]
    with pytest.raises(RuntimeError, match=r"head\.0\.weight"):
        frozen_aligners(model, weights)


def test_a_frozen_copy_stays_as_it_is(model: Model) -> None:
    model.train()
    kept = frozen_copy(model)
    before = {name: value.clone() for name, value in kept.state_dict().items()}
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model.embed("notes", BATCH["notes"]).square().sum().backward()
    optimizer.step()
    assert model.training
    assert not kept.training
    assert not any(value.requires_grad for value in kept.parameters())
    assert all(torch.equal(value, before[name]) for name, value in kept.state_dict().items())
    moved = model.state_dict()
    assert any(not torch.equal(value, moved[name]) for name, value in before.items())


# ---- parts


def test_parts_do_not_go_by_names() -> None:
    """Modalities and heads may be called as the parts are."""
    torch.manual_seed(0)
    context, settings = DataContext(Path("unused")), AlignerSettings(hidden=7)
    encoders = {"aligner": settings.around(Bag(width=8).build(D, TEXTS, context), "aligner", D)}
    parts = Parts(model_slots(Model(encoders, {"trunk": LinearHead(D, 3)}, D)))
    assert parts.encoder == ("encoders.aligner.trunk.embedding.weight",)
    assert all(name.startswith("encoders.aligner.aligner.") for name in parts.aligner)
    assert {name.split(".")[:2] == ["heads", "trunk"] for name in parts.others} == {True}


def test_frozen_align_modules_of_modalities_called_alike() -> None:
    """``encoders.a.aligner`` is not the beginning of another modality's name."""
    torch.manual_seed(0)
    context, settings = DataContext(Path("unused")), AlignerSettings(hidden=7)
    encoders = {name: settings.around(Bag(width=8).build(D, TEXTS, context), name, D) for name in ("aligner", "a")}
    model = Model(encoders, {}, D)
    for name, anchor in frozen_aligners(model, model.state_dict()).items():
        own: dict[str, Tensor] = model.encoders[name].aligner.state_dict()
        assert all(torch.equal(value, own[key]) for key, value in anchor.state_dict().items())


def test_equal_weights_give_equal_representations_whatever_the_batch_norms_remember() -> None:
    model = two_texts(1).train()
    anchors = frozen_aligners(model, model.state_dict())
    features = EncoderFeatures(model)
    local, view = Bound(features, aligners_of(model)), Bound(features, anchors)
    remembered = copy.deepcopy({name: anchor.state_dict() for name, anchor in anchors.items()})
    for name, x in BATCH.items():
        assert torch.allclose(local.represent(name, x), view.represent(name, x), atol=1e-6)
    for name, anchor in anchors.items():
        for key, value in anchor.state_dict().items():
            if "running" in key:
                assert torch.equal(value, remembered[name][key])
