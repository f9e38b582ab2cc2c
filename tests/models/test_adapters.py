"""Adapters: those within layers are peft's own, those behind the network are their formulas."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from polyfed.core.errors import ConfigError
from polyfed.data.backbones import quiet
from polyfed.data.view import DataContext, InputSpec
from polyfed.models.adapters import adapter as adapters
from polyfed.models.adapters.adapter import FeatureAttention
from polyfed.models.encoders.hf import HF
from tiny_networks import ROOM, WIDTH, WORDS, network, save

peft = pytest.importorskip("peft")
INPUTS = {
    "vit": (InputSpec((3, 32, 32)), torch.linspace(-1, 1, 2 * 3 * 32 * 32).view(2, 3, 32, 32)),
    "bert": (InputSpec((ROOM,), tuple(WORDS), pad=0), torch.tensor([[2, 7, 8, 29], [2, 9, 29, 0]])),
}
QUERY_VALUE = {"vit": ["q_proj", "v_proj"], "bert": ["query", "value"]}
LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "fc1", "fc2"]
CASES: list[tuple[str, dict[str, Any], Any]] = [
    *(
        (name, {"name": "lora", "rank": 2}, {"r": 2, "lora_alpha": 4, "target_modules": QUERY_VALUE[name]})
        for name in INPUTS
    ),
    ("vit", {"name": "lora", "rank": 4, "scaling": 8.0}, {"r": 4, "lora_alpha": 16, "use_rslora": True}),
    ("vit", {"name": "lora", "targets": "linear"}, {"target_modules": LINEAR}),
    ("vit", {"name": "lora", "targets": ["fc1"], "last": 1}, {"target_modules": ["layers.2.mlp.fc1"]}),
]


@pytest.fixture(scope="module")
def context(tmp_path_factory: pytest.TempPathFactory) -> DataContext:
    folder = tmp_path_factory.mktemp("weights")
    for name in (*INPUTS, "mobilenet"):
        save(name, folder)
    return DataContext(folder / "cache", folder)


def trunk(name: str, adapter: dict[str, Any] | str, context: DataContext) -> Any:
    given: Any = {"weights": name, "adapter": adapter, "view": "native"}
    made: Any = HF.model_validate(given).build(5, INPUTS[name][0], context)
    return made.trunk


def plain(name: str, options: dict[str, Any], context: DataContext) -> Any:
    """The network adapted by peft alone."""
    config = peft.LoraConfig(**{"r": 8, "lora_alpha": 16, "target_modules": QUERY_VALUE[name]} | options)
    with quiet():
        body = type(network(name)).from_pretrained(context.weights / name)
    return peft.get_peft_model(body, config)


def outputs(model: Any, **inputs: torch.Tensor) -> torch.Tensor:
    torch.manual_seed(3)  # dropout
    actual: torch.Tensor = model(**inputs).last_hidden_state
    return actual


@pytest.mark.parametrize(("name", "adapter", "options"), CASES)
def test_layers_compute_what_peft_computes(
    name: str, adapter: dict[str, Any], options: dict[str, Any], context: DataContext
) -> None:
    ours = trunk(name, adapter, context).module.backbone.body
    theirs = plain(name, options, context)
    own = {key: value for key, value in ours.named_parameters() if value.requires_grad}
    actual = {key: value for key, value in theirs.named_parameters() if value.requires_grad}
    assert {f"base_model.model.{key}" for key in own} == set(actual)
    with torch.no_grad():
        for key, value in own.items():  # B is zero at first, where all are alike
            actual[f"base_model.model.{key}"].copy_(value.normal_(0, 0.3))
    x = INPUTS[name][1]
    inputs = {"pixel_values": x} if name == "vit" else {"input_ids": x, "attention_mask": (x != 0).long()}
    with quiet():
        untouched = outputs(type(network(name)).from_pretrained(context.weights / name).eval(), **inputs)
    for mode in (False, True):
        expected = outputs(theirs.train(mode), **inputs)
        torch.testing.assert_close(outputs(ours.train(mode), **inputs), expected, atol=1e-6, rtol=1e-6)
        assert not torch.allclose(expected, untouched, atol=1e-3)


def test_adapters_change_nothing_before_they_are_trained(context: DataContext) -> None:
    x = INPUTS["vit"][1]
    before = trunk("vit", "attention", context)(x).pooled  # which acts behind the network
    torch.testing.assert_close(trunk("vit", "lora", context).eval()(x).pooled, before)


def linear(layer: Any, row: Any) -> list[float]:
    rows = zip(layer.weight, layer.bias, strict=True)
    return [float(sum(w * x for w, x in zip(weights, row, strict=True)) + bias) for weights, bias in rows]


def test_attention_is_its_formula() -> None:
    module: Any = FeatureAttention().behind(WIDTH).requires_grad_(False)
    for row in torch.randn(3, WIDTH):
        inner = [math.tanh(value) for value in linear(module.first, row)]
        scores = [math.exp(value) for value in linear(module.second, inner)]
        expected = [score / sum(scores) * float(x) for score, x in zip(scores, row, strict=True)]
        torch.testing.assert_close(module(row[None])[0], torch.tensor(expected))


@pytest.mark.parametrize(
    ("name", "adapter", "message"),
    [
        ("mobilenet", "lora", "is not a transformer with one list of layers"),
        ("vit", {"name": "lora", "targets": ["dense"]}, "no linear layers for 'dense'; .* end in: fc1, fc2, k_proj, o"),
        ("vit", {"name": "lora", "last": 4}, "the network has 3 layers, not 4"),
    ],
)
def test_what_a_network_does_not_have_cannot_be_adapted(
    name: str, adapter: Any, message: str, context: DataContext
) -> None:
    given: Any = {"weights": name, "adapter": adapter, "view": "native"}
    with pytest.raises(ConfigError, match=message):
        HF.model_validate(given).build(5, INPUTS["vit"][0], context)


def test_without_peft_a_configuration_names_the_package_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapters, "find_spec", lambda name: None)
    given: Any = {"weights": "vit", "adapter": "lora"}
    with pytest.raises(ConfigError, match=r'needs the package peft, .*pip install "polyfed\[adapters\]"'):
        HF(**given)
    HF(**given | {"adapter": "attention"})
