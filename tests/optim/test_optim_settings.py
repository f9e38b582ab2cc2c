import math

import pytest
import torch

from polyfed.core.errors import ConfigError
from polyfed.optim.adamp import AdamP
from polyfed.optim.settings import OptimizerSettings, Schedule, clip_gradients

KINDS = {"adamp": AdamP, "adamw": torch.optim.AdamW, "adam": torch.optim.Adam, "sgd": torch.optim.SGD}


@pytest.mark.parametrize("kind", KINDS)
def test_builds_the_optimiser_with_its_settings(kind):
    own = {"momentum": 0.8} if kind == "sgd" else {"betas": (0.7, 0.9)}
    settings = OptimizerSettings(kind=kind, lr=0.5, weight_decay=0.25, **own)
    optimizer = settings.build(iter([torch.nn.Parameter(torch.ones(2))]))
    assert type(optimizer) is KINDS[kind]
    group = optimizer.param_groups[0]
    assert (group["lr"], group["weight_decay"]) == (0.5, 0.25)
    assert group.get("momentum", group.get("betas")) == (0.8 if kind == "sgd" else (0.7, 0.9))


def test_nesterov_reaches_those_that_have_it():
    for kind in ("adamp", "sgd"):
        built = OptimizerSettings(kind=kind, nesterov=True).build([torch.nn.Parameter(torch.ones(2))])
        assert built.param_groups[0]["nesterov"] is True


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


def test_constant_is_one():
    assert {Schedule().factor(t, 10) for t in range(10)} == {1.0}


@pytest.mark.parametrize("milestones", [(15, 24), (0.5, 0.8)])
def test_steps_of_the_released_creamfl(milestones):
    schedule = Schedule(kind="steps", milestones=milestones, drop=0.1)
    factors = [schedule.factor(t, 30) for t in range(30)]
    assert factors == pytest.approx([1.0] * 15 + [0.1] * 9 + [0.01] * 6)


def test_fractions_hit_the_round_that_they_name_despite_binary_rounding():
    schedule = Schedule(kind="steps", milestones=(0.7,))
    assert [schedule.factor(t, 10) for t in (6, 7)] == pytest.approx([1.0, 0.1])


def test_cosine_equals_torchs():
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0)
    reference = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=30, eta_min=0.1)
    schedule = Schedule(kind="cosine", t_max=30, minimum=0.1)
    for t in range(30):
        assert schedule.factor(t, 99) == pytest.approx(reference.get_last_lr()[0])
        optimizer.step()
        reference.step()
    assert schedule.factor(31, 99) == pytest.approx(0.1)


def test_cosine_spans_the_run_by_default():
    schedule = Schedule(kind="cosine")
    assert schedule.factor(0, 8) == 1.0
    assert schedule.factor(4, 8) == pytest.approx(0.5)
    assert schedule.factor(8, 8) == 0.0
    assert schedule.factor(0, 0) == 1.0


def test_warmup_rises_linearly_on_top_of_the_shape():
    assert [Schedule(warmup=3).factor(t, 9) for t in range(5)] == [0.25, 0.5, 0.75, 1.0, 1.0]
    dropped = Schedule(kind="steps", milestones=(2,), drop=0.5, warmup=3)
    assert dropped.factor(2, 9) == pytest.approx(0.375)


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
    assert (first.grad.item(), second.grad.item()) == pytest.approx((0.6, 0.8), rel=1e-4)


def test_no_limit_no_clipping():
    weight = torch.nn.Parameter(torch.zeros(1))
    weight.grad = torch.tensor([3.0])
    assert clip_gradients([weight], None) is None
    assert weight.grad.item() == 3.0
