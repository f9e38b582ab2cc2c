"""Optimisers, schedules and clipping by their settings; states of optimisers as stored tensors."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from safetensors.torch import load, save

from polyfed.core.errors import ConfigError, PayloadError
from polyfed.optim.adamp import AdamP
from polyfed.optim.settings import (
    OptimizerSettings,
    Schedule,
    clip_gradients,
    load_optimizer_tensors,
    optimizer_tensors,
)

KINDS = {"adamp": AdamP, "adamw": torch.optim.AdamW, "adam": torch.optim.Adam, "sgd": torch.optim.SGD}


@pytest.mark.parametrize("rule", KINDS)
def test_builds_the_optimiser_with_its_settings(rule):
    own = {"momentum": 0.8} if rule == "sgd" else {"betas": (0.7, 0.9)}
    settings = OptimizerSettings(kind=rule, lr=0.5, weight_decay=0.25, **own)
    optimizer = settings.build(iter([torch.nn.Parameter(torch.ones(2))]))
    assert isinstance(optimizer, KINDS[rule])
    group = optimizer.param_groups[0]
    assert (group["lr"], group["weight_decay"]) == (0.5, 0.25)
    assert group.get("momentum", group.get("betas")) == (0.8 if rule == "sgd" else (0.7, 0.9))


@pytest.mark.parametrize(
    ("values", "match"),
    [
        ({"kind": "rmsprop"}, "kind"),
        ({"lr": 0}, "lr"),
        ({"lr": math.nan}, "lr"),
        ({"betas": (0.9, 1.0)}, "betas are"),
        ({"clip": 0}, "clip"),
        ({"momentum": 1.0}, "momentum"),
        ({"learning_rate": 1}, "learning_rate"),
    ],
)
def test_bad_optimiser_settings_are_refused(values, match):
    with pytest.raises(ConfigError, match=match):
        OptimizerSettings(**values)


_RELEASED = [1.0] * 15 + [0.1] * 9 + [0.01] * 6  # CreamFL's


@pytest.mark.parametrize(
    ("schedule", "rounds", "factors"),
    [
        ({}, 10, [1.0] * 10),
        ({"kind": "steps", "milestones": (15, 24), "drop": 0.1}, 30, _RELEASED),
        ({"kind": "steps", "milestones": (0.5, 0.8), "drop": 0.1}, 30, _RELEASED),
        ({"kind": "steps", "milestones": (0.7,)}, 10, [1.0] * 7 + [0.1] * 3),  # despite binary rounding
        ({"kind": "cosine"}, 8, [(1 + math.cos(math.pi * t / 8)) / 2 for t in range(9)]),  # spans the run
        ({"kind": "cosine"}, 0, [1.0]),
        ({"warmup": 3}, 9, [0.25, 0.5, 0.75, 1.0, 1.0]),
        ({"kind": "steps", "milestones": (2,), "drop": 0.5, "warmup": 3}, 9, [0.25, 0.5, 0.375]),
    ],
)
def test_factors_of_schedules_by_round(schedule, rounds, factors):
    assert [Schedule(**schedule).factor(t, rounds) for t in range(len(factors))] == pytest.approx(factors)


def test_cosine_equals_torchs():
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0)
    reference = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=30, eta_min=0.1)
    schedule = Schedule(kind="cosine", t_max=30, minimum=0.1)
    for t in range(30):
        assert schedule.factor(t, 99) == pytest.approx(reference.get_last_lr()[0])
        optimizer.step()
        reference.step()
    assert schedule.factor(31, 99) == pytest.approx(0.1)


@pytest.mark.parametrize("values", [{"milestones": (0,)}, {"drop": 0}, {"minimum": 2}, {"t_max": 0}, {"warmup": -1}])
def test_bad_schedules_are_refused(values):
    with pytest.raises(ConfigError, match=next(iter(values))):
        Schedule(**values)


def test_clipping_scales_all_gradients_together():
    first, second = torch.nn.Parameter(torch.zeros(1)), torch.nn.Parameter(torch.zeros(1))
    first.grad, second.grad = torch.tensor([3.0]), torch.tensor([4.0])
    assert clip_gradients([first, second], 1.0).item() == pytest.approx(5.0)
    assert (first.grad.item(), second.grad.item()) == pytest.approx((0.6, 0.8), rel=1e-4)
    assert clip_gradients([first, second], 2.0).item() == pytest.approx(1.0, rel=1e-4)
    assert clip_gradients([first, second], None) is None
    assert (first.grad.item(), second.grad.item()) == pytest.approx((0.6, 0.8), rel=1e-4)


# ---- states as stored tensors


SETTINGS = {
    "adamp": OptimizerSettings(kind="adamp", lr=0.01, weight_decay=0.1),
    "adamw": OptimizerSettings(kind="adamw", lr=0.01, weight_decay=0.1),
    "adam": OptimizerSettings(kind="adam", lr=0.01),
    "sgd": OptimizerSettings(kind="sgd", lr=0.01, momentum=0.9),
    "sgd-plain": OptimizerSettings(kind="sgd", lr=0.01, momentum=0.0),
}


def make(settings, weights=None):
    torch.manual_seed(7)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.LayerNorm(4), torch.nn.Linear(4, 2))
    if weights is not None:
        model.load_state_dict(weights)
    return model, settings.build(model.parameters())


def train(model, optimizer, steps, seed):
    draw = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(5, 3, generator=draw)).square().sum().backward()
        optimizer.step()


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_training_goes_on_bit_for_bit_after_storage(settings):
    model, optimizer = make(settings)
    train(model, optimizer, 4, seed=1)
    stored = load(save(optimizer_tensors(optimizer, model.named_parameters())))
    other, restored = make(settings, model.state_dict())
    load_optimizer_tensors(restored, other.named_parameters(), stored)
    fresh = make(settings, model.state_dict())
    for which in ((model, optimizer), (other, restored), fresh):
        train(*which, 3, seed=2)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))
    assert torch.equal(model[0].weight, fresh[0][0].weight) == (settings is SETTINGS["sgd-plain"])
    after, again = (optimizer_tensors(o, m.named_parameters()) for m, o in ((model, optimizer), (other, restored)))
    assert after.keys() == again.keys()
    assert all(torch.equal(after[key], again[key]) for key in after)


def test_names_are_kind_and_parameter():
    model, optimizer = make(SETTINGS["adamp"])
    assert optimizer_tensors(optimizer, model.named_parameters()) == {}
    train(model, optimizer, 1, seed=1)
    names = optimizer_tensors(optimizer, model.named_parameters())
    assert len(names) == 3 * 6
    assert {"step:0.weight", "exp_avg:0.weight", "exp_avg_sq:2.bias"} <= names.keys()


def test_order_and_subset_of_the_optimisers_parameters_do_not_matter():
    model, _ = make(SETTINGS["sgd"])
    named = dict(model.named_parameters())
    optimizer = SETTINGS["sgd"].build([named["2.bias"], named["0.weight"]])
    train(model, optimizer, 2, seed=1)
    stored = optimizer_tensors(optimizer, named.items())
    turned = SETTINGS["sgd"].build([named["0.weight"], named["2.bias"]])
    load_optimizer_tensors(turned, reversed(named.items()), stored)
    assert torch.equal(turned.state[named["2.bias"]]["momentum_buffer"], stored["momentum_buffer:2.bias"])
    assert torch.equal(turned.state[named["0.weight"]]["momentum_buffer"], stored["momentum_buffer:0.weight"])


def test_saved_and_loaded_tensors_are_copies():
    model, optimizer = make(SETTINGS["adamp"])
    train(model, optimizer, 2, seed=1)
    stored = optimizer_tensors(optimizer, model.named_parameters())
    before = {key: value.clone() for key, value in stored.items()}
    load_optimizer_tensors(optimizer, model.named_parameters(), stored)
    train(model, optimizer, 2, seed=2)
    assert all(torch.equal(stored[key], before[key]) for key in stored)
    load_optimizer_tensors(optimizer, model.named_parameters(), {})  # replaces the full state
    assert optimizer_tensors(optimizer, model.named_parameters()) == {}


@pytest.mark.parametrize(
    ("tensors", "match"),
    [
        ({"exp_avg:0.wieght": torch.zeros(4, 3)}, "did you mean '0.weight'"),
        ({"exp_avg:0.weight": torch.zeros(3, 4)}, r"shape \(3, 4\), not \(4, 3\)"),
    ],
)
def test_state_of_another_architecture_is_refused_and_nothing_changes(tensors, match):
    model, optimizer = make(SETTINGS["adamp"])
    train(model, optimizer, 1, seed=1)
    before = optimizer_tensors(optimizer, model.named_parameters())
    with pytest.raises(PayloadError, match=match):
        load_optimizer_tensors(optimizer, model.named_parameters(), before | tensors)
    after = optimizer_tensors(optimizer, model.named_parameters())
    assert all(torch.equal(after[key], before[key]) for key in before)


def test_state_that_is_not_a_tensor_is_refused():
    model, optimizer = make(SETTINGS["sgd"])
    optimizer.state[model[0].weight]["count"] = 3
    with pytest.raises(PayloadError, match="'count' of parameter"):
        optimizer_tensors(optimizer, model.named_parameters())


@pytest.mark.parametrize("rule", ["adamp", "adamw", "sgd"])
def test_weights_of_another_layout_go_on_bit_for_bit_after_storage(rule):
    # stored tensors are contiguous, and a fused kernel reads memory in order whatever the strides
    weight = torch.randn(6, 5, 3, 3).contiguous(memory_format=torch.channels_last)
    models = [torch.nn.ParameterDict({"conv": torch.nn.Parameter(weight.clone())}) for _ in range(2)]
    first, second = (SETTINGS[rule].build(model.parameters()) for model in models)

    def step(model, optimizer, seed):
        optimizer.zero_grad()
        (model["conv"] * torch.randn(weight.shape, generator=torch.Generator().manual_seed(seed))).sum().backward()
        optimizer.step()

    step(models[0], first, 1)
    named = [list(model.named_parameters()) for model in models]
    stored = load(save({k: v.contiguous() for k, v in optimizer_tensors(first, named[0]).items()}))
    load_optimizer_tensors(second, named[1], stored)
    models[1]["conv"].data.copy_(models[0]["conv"].data)
    for model, optimizer in zip(models, (first, second), strict=True):
        step(model, optimizer, 2)
    assert torch.equal(models[0]["conv"], models[1]["conv"])


@pytest.mark.parametrize("rule", ["adamw", "adam", "sgd"])
def test_the_fused_form_goes_on_from_the_state_of_the_plain_one(rule):
    of_torch = {"adamw": torch.optim.AdamW, "adam": torch.optim.Adam, "sgd": torch.optim.SGD}[rule]
    options = {"lr": 0.01, "weight_decay": SETTINGS[rule].weight_decay}
    model, _ = make(SETTINGS[rule])
    plain = of_torch(model.parameters(), **options | ({"momentum": 0.9} if rule == "sgd" else {}))
    train(model, plain, 4, seed=1)
    other, fused = make(SETTINGS[rule], model.state_dict())
    load_optimizer_tensors(fused, other.named_parameters(), optimizer_tensors(plain, model.named_parameters()))
    for which in ((model, plain), (other, fused)):
        train(*which, 3, seed=2)
    assert all(group["fused"] for group in fused.param_groups)
    torch.testing.assert_close([*model.parameters()], [*other.parameters()], rtol=0, atol=1e-6)


def test_sgd_steps_parameters_of_several_types_as_torch_does() -> None:
    ours, theirs = (
        [torch.nn.Parameter(torch.ones(2, dtype=dtype)) for dtype in (torch.float32, torch.float64)] for _ in range(2)
    )
    steps = OptimizerSettings(kind="sgd", lr=0.1, momentum=0.9).build(ours), torch.optim.SGD(theirs, 0.1, 0.9)
    for _, (optimizer, own) in itertools.product(range(3), zip(steps, (ours, theirs), strict=True)):
        for value in own:
            value.grad = value.detach() ** 2
        optimizer.step()
    torch.testing.assert_close(ours, theirs)
