"""Layers of pretrained transformers: what each is, and the last of them on states of the others."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from polyfed.core.errors import ConfigError
from polyfed.data.backbones import frozen_backbone
from polyfed.data.view import DataContext, InputSpec
from polyfed.models.encoders.hf import HF
from polyfed.models.trunks import before, linear_roles
from tiny_networks import LAYERS, ROOM, WORDS, save

FAMILIES = [
    *(("vit", "whole"), ("deit", "whole"), ("dinov2", "whole"), ("clip", "vision"), ("siglip", "vision")),
    *(("bert", "whole"), ("roberta", "whole"), ("modernbert", "whole"), ("distilbert", "whole")),
]
WITHOUT = [("mpnet", "whole"), ("clip", "text"), ("siglip", "text")]
PICTURES, TEXTS = InputSpec((3, 32, 32)), InputSpec((ROOM,), tuple(WORDS), pad=0)


@pytest.fixture(scope="module")
def context(tmp_path_factory: pytest.TempPathFactory) -> DataContext:
    folder = tmp_path_factory.mktemp("weights")
    for name in {*dict(FAMILIES), *dict(WITHOUT)}:
        save(name, folder)
    return DataContext(folder / "cache", folder)


def sample(name: str, tower: str) -> tuple[InputSpec, torch.Tensor]:
    if tower == "vision" or name in ("vit", "deit", "dinov2"):
        return PICTURES, torch.randn(2, 3, 32, 32)
    return TEXTS, torch.tensor([[2, 7, 8, 9, 10, 29], [2, 11, 29, 0, 0, 0]])


def encoder(weights: str, tower: str, view: dict[str, Any] | str | None = None) -> HF:
    given: Any = {"weights": weights, "tower": tower, "trainable": 2, "view": view}
    return HF.model_validate(given)


@pytest.mark.parametrize(("name", "tower"), FAMILIES)
def test_the_last_layers_give_of_states_what_the_whole_network_gives(
    name: str, tower: Any, context: DataContext
) -> None:
    spec, x = sample(name, tower)
    mask = x != spec.pad if spec.vocabulary else None
    states = frozen_backbone(context.weights / name, "tokens", tower, 2)(x, mask)
    length = {} if spec is PICTURES else {"length": ROOM}
    resumed, full = encoder(name, tower, length), encoder(name, tower, "native")
    assert resumed.view.component_name() == "states"
    built = resumed.build(5, resumed.view.spec("", context), context).eval()
    alike = full.build(5, spec, context).eval()
    alike.load_state_dict(built.state_dict())  # names are equal
    first, second = built.trunk(states), alike.trunk(x)
    torch.testing.assert_close(first.pooled, second.pooled)
    valid = slice(None) if mask is None else mask
    torch.testing.assert_close(first.local[valid], second.local[valid])
    assert mask is None or torch.equal(first.mask, mask)


@pytest.mark.parametrize(("name", "tower"), WITHOUT)
def test_networks_that_cannot_go_on_from_states_are_refused_and_train_on_their_inputs(
    name: str, tower: Any, context: DataContext
) -> None:
    cached = encoder(name, tower, {"name": "states", "before_last": 2, "length": ROOM})
    with pytest.raises(ConfigError, match=r"does not go on from states of its layers.*`view: native`"):
        cached.build(5, cached.view.spec("", context), context)
    spec, x = sample(name, tower)
    made = encoder(name, tower, "native").build(5, spec, context)
    made(x).sum().backward()
    names = {key for key, value in made.named_parameters() if value.grad is not None}
    assert {key for key in made.state_dict() if ".position_ids" not in key} == names
    assert not [key for key in names if ".0." in key or "embeddings" in key or "relative" in key]
    assert [key for key in names if ".1." in key]


@pytest.mark.parametrize(("name", "tower"), FAMILIES)
def test_every_linear_layer_of_the_last_blocks_has_a_role(name: str, tower: Any, context: DataContext) -> None:
    body = frozen_backbone(context.weights / name, "auto", tower).body
    roles = linear_roles(body, 2)
    fused = {"fused", "output", "mlp"}
    assert set(roles.values()) == (fused if name == "modernbert" else {"query", "key", "value", "output", "mlp"})
    assert len(linear_roles(body)) == len(roles) / 2 * LAYERS
    actual = {key for key, part in body.named_modules() if isinstance(part, torch.nn.Linear)}
    assert {key for key in actual if ".1." in key or ".2." in key} == set(roles)
    ends = [role for key, role in roles.items() if key.endswith(("out_proj", "o_proj", "Wo")) and "mlp" not in key]
    assert ends == ["output"] * 2 * (name not in ("bert", "roberta", "distilbert"))


def test_more_layers_than_there_are_and_networks_without(context: DataContext) -> None:
    body = frozen_backbone(context.weights / "vit", "auto").body
    with pytest.raises(ConfigError, match="the network has 3 layers, not 4; train at most all of them"):
        before(body, 4)
    with pytest.raises(ConfigError, match="'Linear' is not a transformer with one list of layers"):
        before(torch.nn.Linear(2, 2), 1)
