"""Features of one encoder under the align modules of another: what is encoded, what learns, what is remembered."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from encoder_cases import TEXTS
from torch import Tensor, nn

from polyfed.data.view import DataContext
from polyfed.models.aligner import AlignerSettings
from polyfed.models.binding import Bound, EncoderFeatures, Parts, aligners_of, frozen_aligners, frozen_copy
from polyfed.models.encoders.words import Bag
from polyfed.models.heads import LinearHead
from polyfed.models.model import Model
from polyfed.models.slots import model_slots

BATCH = {
    "notes": torch.tensor([[5, 3, 7, 9], [2, 0, 0, 0], [1, 2, 3, 4]]),
    "report": torch.tensor([[4, 4, 7, 0], [2, 8, 1, 0], [6, 0, 0, 0]]),
}
DIM = 6


@pytest.fixture
def model() -> Model:
    return made(0)


def made(seed: int, **aligner: Any) -> Model:
    """Two texts; the third encoder has no align module and is passed over."""
    torch.manual_seed(seed)
    context, settings = DataContext(Path("unused")), AlignerSettings(**{"hidden": 7, "local": True, **aligner})
    encoders: dict[str, nn.Module] = {name: Bag(width=8).build(DIM, TEXTS, context) for name in (*BATCH, "other")}
    encoders |= {name: settings.around(encoders[name], name, DIM) for name in BATCH}
    return Model(encoders, {"task": LinearHead(DIM, 3)}, DIM)


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
    other = aligners_of(made(1).eval())
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
    weights = made(1).state_dict()
    before = copy.deepcopy(weights)
    anchors = frozen_aligners(model.train(), weights)
    assert list(anchors) == list(BATCH)
    for name, anchor in anchors.items():
        assert not [value for value in anchor.parameters() if value.requires_grad]
        expected = {key: value for key, value in before.items() if key.startswith(f"encoders.{name}.aligner.")}
        assert {f"encoders.{name}.aligner.{key}" for key in anchor.state_dict()} == set(expected)
        for key, value in anchor.state_dict().items():
            assert torch.equal(value, expected[f"encoders.{name}.aligner.{key}"])
    (Bound(EncoderFeatures(model), anchors).embed("notes", BATCH["notes"]) * torch.arange(DIM)).sum().backward()
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
    encoders = {"aligner": settings.around(Bag(width=8).build(DIM, TEXTS, context), "aligner", DIM)}
    parts = Parts(model_slots(Model(encoders, {"trunk": LinearHead(DIM, 3)}, DIM)))
    assert parts.encoder == ("encoders.aligner.trunk.embedding.weight",)
    assert all(name.startswith("encoders.aligner.aligner.") for name in parts.aligner)
    assert {name.split(".")[:2] == ["heads", "trunk"] for name in parts.others} == {True}


def test_frozen_align_modules_of_modalities_called_alike() -> None:
    """``encoders.a.aligner`` is not the beginning of another modality's name."""
    torch.manual_seed(0)
    context, settings = DataContext(Path("unused")), AlignerSettings(hidden=7)
    encoders = {name: settings.around(Bag(width=8).build(DIM, TEXTS, context), name, DIM) for name in ("aligner", "a")}
    model = Model(encoders, {}, DIM)
    for name, anchor in frozen_aligners(model, model.state_dict()).items():
        own: dict[str, Tensor] = model.encoders[name].aligner.state_dict()
        assert all(torch.equal(value, own[key]) for key, value in anchor.state_dict().items())


def test_equal_weights_give_equal_representations_whatever_the_batch_norms_remember() -> None:
    model = made(1).train()
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
