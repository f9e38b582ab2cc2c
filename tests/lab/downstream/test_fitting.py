from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from polyfed.lab.downstream.fitting import Fit, Labelled, fit_linear, fit_module, standardised, stratified

FIT = Fit(lr=0.05, weight_decay=0.01, epochs=30, patience=4, batch_size=8)


def stream(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def blobs(n: int, seed: int = 0, classes: int = 3) -> Labelled:
    labels = torch.arange(n) % classes
    return Labelled(F.one_hot(labels, 4).float() * 2 + torch.randn(n, 4, generator=stream(seed)), labels)


@pytest.mark.parametrize("share", [0.01, 0.1, 0.37, 1.0])
def test_a_share_of_every_class_and_one_at_least(share: float) -> None:
    labels = torch.tensor([0] * 100 + [1] * 10 + [4] * 3)[torch.randperm(113, generator=stream())]
    kept = stratified(labels, share, stream(1))
    assert kept.tolist() == sorted(set(kept.tolist()))
    counts = torch.bincount(labels[kept], minlength=5).tolist()
    assert counts == [max(1, round(share * n)) if n else 0 for n in (100, 10, 0, 0, 3)]


def test_shares_differ_by_draw_and_all_is_all() -> None:
    labels = torch.arange(60) % 2
    assert stratified(labels, 0.2, stream(1)).tolist() == stratified(labels, 0.2, stream(1)).tolist()
    assert stratified(labels, 0.2, stream(1)).tolist() != stratified(labels, 0.2, stream(2)).tolist()
    assert stratified(labels, 1.0, stream(3)).tolist() == list(range(60))


def test_statistics_are_those_of_training() -> None:
    train, test = torch.randn(9, 3, generator=stream()) * 3 + 1, torch.randn(4, 3, generator=stream(1))
    train[:, 2] = 5.0  # constant: only centred
    a, b = standardised(train, test)
    mean, std = train.mean(0), train.std(0, correction=0)
    torch.testing.assert_close(a.mean(0), torch.zeros(3), atol=1e-6, rtol=0)
    torch.testing.assert_close(b[:, :2], ((test - mean) / std)[:, :2])
    torch.testing.assert_close(b[:, 2], test[:, 2] - 5)


def plain_fit(train: Labelled, validation: Labelled, classes: int, fit: Fit, generator: torch.Generator) -> nn.Linear:
    """The protocol as one would write it down."""
    layer = nn.Linear(train.x.shape[1], classes)
    layer.load_state_dict({"weight": torch.zeros(classes, train.x.shape[1]), "bias": torch.zeros(classes)})
    optimizer = torch.optim.AdamW(layer.parameters(), fit.lr, weight_decay=fit.weight_decay)
    best, lowest, bad = {k: v.clone() for k, v in layer.state_dict().items()}, math.inf, 0
    for _ in range(fit.epochs):
        order = torch.randperm(len(train.y), generator=generator)
        for start in range(0, len(order), fit.batch_size):
            rows = order[start : start + fit.batch_size]
            optimizer.zero_grad()
            F.cross_entropy(layer(train.x[rows]), train.y[rows]).backward()
            optimizer.step()
        loss = F.cross_entropy(layer(validation.x), validation.y).item()
        if loss < lowest:
            best, lowest, bad = {k: v.clone() for k, v in layer.state_dict().items()}, loss, 0
        else:
            bad += 1
        if bad == fit.patience:
            break
    layer.load_state_dict(best)
    return layer


@pytest.mark.parametrize("epochs", [2, 30])
def test_training_is_the_protocol(epochs: int) -> None:
    train, validation, fit = blobs(40), blobs(20, 1), FIT.model_copy(update={"epochs": epochs})
    found = fit_linear(train, validation, 3, fit, stream(2))
    expected = plain_fit(train, validation, 3, fit, stream(2))
    torch.testing.assert_close(found.weight, expected.weight)
    torch.testing.assert_close(found.bias, expected.bias)


def test_it_draws_nothing_from_the_global_generator() -> None:
    before = torch.get_rng_state()
    fit_linear(blobs(20), None, 3, FIT, stream())
    assert torch.equal(before, torch.get_rng_state())


def test_it_learns() -> None:
    train, test = blobs(300), blobs(90, 1)
    layer = fit_linear(train, None, 3, FIT, stream())
    assert (layer(test.x).argmax(1) == test.y).float().mean() > 0.75


@pytest.mark.parametrize(
    ("values", "epochs", "kept"), [([3.0, 1.0, math.nan, 0.5, 0.7, 0.5], 6, 4), ([2.0, 1.0], 2, 2)]
)
def test_stopping_keeps_the_lowest_and_waits_its_patience(values: list[float], epochs: int, kept: int) -> None:
    layer, seen = nn.Linear(1, 1), [0]

    def losses():
        seen[0] += 1
        nn.init.constant_(layer.weight, seen[0])
        return iter(())

    told = iter(values + [9.0] * 9)
    fit_module(
        layer,
        losses,
        lambda: next(told),
        Fit(lr=0.1, weight_decay=0.0, epochs=max(epochs, len(values)), patience=2, batch_size=1),
    )
    assert (seen[0], layer.weight.item()) == (epochs, kept)
    fit_module(layer, losses, None, Fit(lr=0.1, weight_decay=0.0, epochs=3, patience=1, batch_size=1))
    assert layer.weight.item() == epochs + 3  # without validation the last state stays
