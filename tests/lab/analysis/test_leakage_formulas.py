"""Figures and attacks against loops written from the formulas, and cases worked by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import norm
from torch import nn

from polyfed.aggregation.prototypes import ClassMeans, prototype_tensors
from polyfed.lab.analysis.leakage.canaries import exposures
from polyfed.lab.analysis.leakage.candidates import one_an_item
from polyfed.lab.analysis.leakage.classes import class_shares, evidence, told_apart
from polyfed.lab.analysis.leakage.figures import Discrimination, Interval, area, leak_verdict, threshold
from polyfed.lab.analysis.leakage.membership import confidence, pair_margin
from polyfed.lab.analysis.leakage.pictures import Protection, cosine_distance, inverted, psnr, total_variation
from polyfed.lab.analysis.leakage.shadows import likelihood_ratio, outlyingness, pull
from polyfed.lab.analysis.leakage.words import moves, touched_rows, word_recovery
from polyfed.wire.payload import Logits, Prototypes, Representations, Weights

_SCORES = st.lists(st.integers(-3, 3).map(float), min_size=1, max_size=12).map(np.array)


@given(_SCORES, _SCORES)
def test_the_area_counts_pairs_that_are_in_order(members: np.ndarray, others: np.ndarray) -> None:
    wins = sum(1.0 if a > b else 0.5 if a == b else 0.0 for a in members for b in others)
    assert area(members, others) == pytest.approx(wins / (len(members) * len(others)))


def test_one_in_a_hundred_others_may_be_above_the_threshold() -> None:
    others = np.arange(200.0)
    assert threshold(others) == 197.0  # two of 200 are above
    assert threshold(np.arange(50.0)) == 49.0  # no other may be
    told = Discrimination.of(np.array([196.5, 197.5, 300.0, 0.0]), others, seed=0)
    assert told.rate.value == 0.5
    assert told.rate.low < 0.0676 < 0.9324 < told.rate.high  # those of Clopper and Pearson, at a known threshold
    assert told.auc.low <= told.auc.value <= told.auc.high
    assert Discrimination.of(np.array([1.0, 2.0]), others, 0) == Discrimination.of(np.array([1.0, 2.0]), others, 0)


def _covered(shift: float, items: int, studies: int, monkeypatch: pytest.MonkeyPatch) -> float:
    """Share of simulated attacks whose interval holds the true rate."""
    monkeypatch.setattr("polyfed.lab.analysis.leakage.figures.bootstrapped", lambda *_: (0.0, 1.0))
    draw, true = np.random.default_rng(items), float(norm.sf(norm.isf(0.01) - shift))
    told = [
        Discrimination.of(draw.normal(shift, 1, items), draw.normal(0, 1, items), seed).rate for seed in range(studies)
    ]
    return sum(rate.low <= true <= rate.high for rate in told) / studies


@pytest.mark.parametrize(("shift", "items"), [(0.0, 100), (2.0, 100), (1.0, 250)])
def test_intervals_of_the_rate_hold_the_true_rate(shift: float, items: int, monkeypatch: pytest.MonkeyPatch) -> None:
    assert _covered(shift, items, 60, monkeypatch) >= 0.9


@pytest.mark.slow
@pytest.mark.parametrize("shift", [0.0, 1.0, 2.0, 3.0])
@pytest.mark.parametrize("items", [10, 20, 100, 250, 1000])
def test_coverage_of_the_rate(shift: float, items: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """0.97 to 1.00."""
    assert _covered(shift, items, 600, monkeypatch) >= 0.95 - 2 * math.sqrt(0.05 * 0.95 / 600)


def test_candidates_and_canaries_are_of_an_item_each() -> None:
    """Captions of one picture are members together: five of them are no five trials."""
    items = torch.tensor([3, 3, 1, 3, 0, 1])
    assert one_an_item(items).tolist() == [0, 2, 4]
    assert one_an_item(torch.arange(4)).tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("interval", "is_protected", "says"),
    [
        (Interval(0.9, 0.8, 1.0), True, "much"),
        (Interval(0.65, 0.55, 0.7), True, "some"),
        (Interval(0.55, 0.51, 0.6), True, "little"),
        (Interval(0.55, 0.49, 0.6), True, "nothing found"),
        (Interval(0.55, 0.49, 0.6), False, "attack too weak"),
    ],
)
def test_verdicts(interval: Interval, is_protected: bool, says: str) -> None:
    assert leak_verdict(interval, is_protected=is_protected) == says


def test_scores_of_a_sample() -> None:
    logits, labels = torch.tensor([[2.0, 0.0, 1.0], [0.0, 3.0, 0.0]]).double(), torch.tensor([0, 2])
    for value, row, label in zip(confidence(logits, labels), logits, labels, strict=True):
        p = row.softmax(0)[label]
        assert float(value) == pytest.approx(float((p / (1 - p)).log()))
    similar = torch.tensor([[0.9, 0.1, 0.2], [0.3, 0.4, 0.5], [0.0, 0.6, 0.8]])
    others = [similar[0, 1], similar[0, 2], similar[1, 0], similar[2, 0]]
    assert float(pair_margin(similar)[0]) == pytest.approx(float(similar[0, 0] - torch.stack(others).mean()))


def _density(value: float, mean: float, spread: float) -> float:
    return math.exp(-((value - mean) ** 2) / (2 * spread**2)) / (spread * math.sqrt(2 * math.pi))


def test_likelihood_ratios_against_a_loop() -> None:
    draws = torch.Generator().manual_seed(3)
    k, n = 6, 5
    shadows, target = torch.randn(k, n, generator=draws).double(), torch.randn(n, generator=draws).double()
    inside = torch.stack([torch.randperm(k, generator=draws) < k // 2 for _ in range(n)], 1)
    sides = []
    for chosen in (inside, ~inside):
        means = [float(shadows[chosen[:, i], i].mean()) for i in range(n)]
        squares = sum(float((shadows[j, i] - means[i]) ** 2) for i in range(n) for j in range(k) if chosen[j, i])
        sides.append((means, math.sqrt(squares / (n * (k // 2 - 1)))))
    (in_means, in_spread), (out_means, out_spread) = sides
    ratios, outlying = likelihood_ratio(target, shadows, inside), outlyingness(target, shadows, inside)
    for i in range(n):
        one = float(target[i])
        expected = _density(one, in_means[i], in_spread) / _density(one, out_means[i], out_spread)
        assert float(ratios[i]) == pytest.approx(math.log(expected))
        assert float(outlying[i]) == pytest.approx((one - out_means[i]) / out_spread)


def test_outputs_are_pulled_by_what_was_trained_on() -> None:
    inside = torch.tensor([[1, 1], [0, 0], [1, 0], [0, 1]], dtype=torch.bool)
    outputs = inside.double()  # each candidate moves an output of its own
    member, other = pull(torch.tensor([1.0, 0.0]).double(), outputs, inside)
    assert member > 0 > other


def test_words_of_a_hand_made_update_are_recovered_exactly() -> None:
    before = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0], [2.0, -1.0], [0.5, 0.5]])
    after = 0.99 * before  # weight decay moves all rows along themselves
    after[1] += torch.tensor([0.01, 0.0])
    after[3] += torch.tensor([0.0, 0.02])
    assert touched_rows(moves(before, after)).tolist() == [False, True, False, True, False]
    quality = word_recovery(moves(before, after), private={1, 3}, spared={0}, order=[4, 1, 2, 3])
    assert (quality.precision, quality.recall) == (1.0, 1.0)
    assert (quality.guessed_precision, quality.guessed_recall) == (0.5, 0.5)  # entries 4 and 1
    assert (quality.private, quality.vocabulary) == (2, 4)
    assert not touched_rows(moves(before, before)).any()


def test_an_inverted_gradient_of_one_picture_is_nearer_than_the_mean_picture() -> None:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Flatten(), nn.Linear(3 * 8 * 8, 16), nn.Sigmoid(), nn.Linear(16, 4)).double()
    truth, label = torch.rand(1, 3, 8, 8).double() * 2 - 1, torch.tensor([2])

    def gradient(pictures: torch.Tensor) -> list[torch.Tensor]:
        loss = nn.functional.cross_entropy(network(pictures), label)
        return list(torch.autograd.grad(loss, list(network.parameters()), create_graph=True))

    given_gradient = [part.detach() for part in gradient(truth)]
    found = inverted(given_gradient, gradient, torch.zeros_like(truth), (-1.0, 1.0), steps=300)
    mean = torch.zeros_like(truth)  # of pictures that are uniform in [-1, 1]
    assert psnr(found, truth, 2.0)[0] > psnr(mean, truth, 2.0)[0] + 10


def test_distances_of_gradients_and_pictures() -> None:
    first, second = [torch.tensor([3.0, 4.0]), torch.tensor([1.0])], [torch.tensor([4.0, 3.0]), torch.tensor([0.0])]
    assert float(cosine_distance(first, second)) == pytest.approx(1 - 24 / 25)
    picture = torch.tensor([[[[0.0, 1.0], [3.0, 1.0]]]])
    assert float(total_variation(picture)) == pytest.approx((3 + 0) / 2 + (1 + 2) / 2)
    nearest = psnr(torch.stack([torch.zeros(3, 2, 2), torch.ones(3, 2, 2)]), torch.full((1, 3, 2, 2), 0.9), 1.0)
    assert nearest == [pytest.approx(20.0, abs=1e-4)]


def test_protected_gradients() -> None:
    draws = torch.Generator().manual_seed(0)
    parts = [[torch.tensor([3.0, 4.0])], [torch.tensor([0.0, 0.5])]]
    assert Protection().crossing(parts, draws)[0].tolist() == [3.0, 4.5]
    by_sample = Protection(1.0, by_sample=True).crossing(parts, draws)[0]
    assert by_sample.tolist() == pytest.approx([0.6, 1.3])
    whole = Protection(1.0).crossing(parts, draws)[0]
    assert float(whole.norm()) == pytest.approx(1.0)
    noisy = Protection(2.0, 3.0).crossing([[torch.zeros(4000)]], draws)[0]
    assert float(noisy.std()) == pytest.approx(6.0, rel=0.05)


def test_exposure_of_labels() -> None:
    logits = torch.tensor([[3.0, 1.0, 2.0, 0.0], [3.0, 1.0, 2.0, 0.0], [1.0, 1.0, 0.0, 0.0]]).double()
    # ranks 1, 4 and, tied, 2 of four classes
    assert exposures(logits, torch.tensor([0, 3, 1])).tolist() == pytest.approx([2.0, 0.0, 1.0])


def test_evidence_of_classes() -> None:
    sent = Weights({"heads.h.weight": torch.zeros(2, 3), "heads.h.bias": torch.tensor([0.5, -0.5])})
    received = {"heads.h.weight": torch.zeros(2, 3), "heads.h.bias": torch.tensor([0.1, 0.1])}
    rose = evidence(sent, received, "h", "label")
    assert not isinstance(rose, str)
    assert rose.tolist() == pytest.approx([0.4, -0.6])
    likely = evidence(Logits({"label": torch.tensor([[0.0, 100.0], [100.0, 0.0], [0.0, 100.0]])}), {}, "h", "label")
    assert not isinstance(likely, str)
    assert likely.tolist() == pytest.approx([1 / 3, 2 / 3])
    own = ClassMeans(torch.ones(2, 4), torch.tensor([3, 1], dtype=torch.int32), torch.tensor([True, False, True]))
    counted = evidence(Prototypes(prototype_tensors("s", own)), {}, "h", "label")
    assert not isinstance(counted, str)
    assert counted.tolist() == [0.75, 0.0, 0.25]
    assert "no classes" in str(evidence(Representations({"text": torch.ones(2, 4)}), {}, "h", "label"))
    assert "no bias" in str(evidence(Weights({}), {}, "h", "label"))
    shares = torch.stack([class_shares(torch.tensor([0, 0, 1]), 2), class_shares(torch.tensor([0, 1, 1]), 2)])
    values, more = told_apart(torch.tensor([[0.9, 0.1], [0.3, 0.7]]), shares)
    assert more.tolist() == [True, False, False, True]
    assert values.tolist() == pytest.approx([0.3, -0.3, -0.3, 0.3])
