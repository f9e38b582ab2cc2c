"""Every weighting, through the ensemble, against its formula in Python floats."""

import math

import pytest
import torch
from torch.nn import functional as F
from weighting_clients import SIZE, choose, client, ensemble, evidence, known, labels, voter

from naive import cosine, dot, softmax
from polyfed.aggregation.weighting import GCA, Evidence

FLOOR = 1e-3


# ---- the formulas, one sample of one client at a time


def mean_of(values):
    return sum(values) / len(values)


def variance(row):
    return mean_of([(x - mean_of(row)) ** 2 for x in row])


def certainty(row, k):
    """e^(1/H) where k ranks first, else 0, H being at least FLOOR."""
    if row[k] < max(row):
        return 0.0
    return math.exp(1 / max(-sum(p * math.log(p) for p in softmax(row) if p), FLOOR))


def positive_over_rest(row, k):
    return math.exp(row[k]) / sum(math.exp(x) for j, x in enumerate(row) if j != k)


def top_two(row):
    first, second = sorted(row, reverse=True)[:2]
    return first - second


def by_cosines(formula, tau=1.0):
    def weigh(sent, k):
        return formula([cosine(sent.values[k].tolist(), g) / tau for g in known()["a"].tolist()], k)

    return weigh


def by_scores(formula, tau=1.0):
    return lambda sent, k: formula([x / tau for x in sent.values[k].tolist()], int(labels()[k]))


def gca(sent, k, tau=1.0, others="bc", ratio=positive_over_rest):
    """Eq. 4 against each other modality, and the mean of the logs."""
    u = sent.values[k].tolist()
    rows = [[dot(u, g) / tau for g in known()[other].tolist()] for other in others]
    return math.exp(mean_of([math.log(ratio(row, k)) for row in rows]))


def share(row, k):
    return softmax(row)[k]


REPRESENTATIONS = [
    ("mean", {}, lambda sent, k: 1.0),
    ("count", {}, lambda sent, k: sent.examples),
    ("iot", {}, lambda sent, k: sent.examples * (100 if sent.modalities > 1 else 1)),
    ("iot", {"factor": 3}, lambda sent, k: sent.examples * (3 if sent.modalities > 1 else 1)),
    ("paired_only", {}, lambda sent, k: float(sent.modalities > 1)),
    ("gca", {}, gca),
    ("gca", {"tau": 0.5}, lambda sent, k: gca(sent, k, tau=0.5)),
    ("gca", {"include_self": True}, lambda sent, k: gca(sent, k, ratio=share)),
    ("sed", {}, by_cosines(share)),
    ("sed", {"temperature": 0.1}, by_cosines(share, 0.1)),
    ("entropy", {}, by_cosines(certainty)),
    ("entropy", {"tau": 0.1}, by_cosines(certainty, 0.1)),
    ("variance", {}, by_cosines(lambda row, k: variance(row))),
    ("margin", {}, by_cosines(lambda row, k: math.exp(row[k] - max(x for j, x in enumerate(row) if j != k)))),
    ("margin", {"tau": 0.2}, by_cosines(lambda row, k: math.exp(row[k] - max(row[:k] + row[k + 1 :])), 0.2)),
]

SCORES = [
    *REPRESENTATIONS[:5],
    ("gca", {}, by_scores(share)),
    ("gca", {"tau": 0.5}, by_scores(share, 0.5)),
    ("sed", {}, by_scores(share)),
    ("sed", {"temperature": 2}, by_scores(share, 2)),
    ("entropy", {}, by_scores(certainty)),
    ("entropy", {"tau": 3}, by_scores(certainty, 3)),
    ("variance", {}, by_scores(lambda row, k: variance(row))),
    ("margin", {}, by_scores(lambda row, k: math.exp(top_two(row)))),
    ("margin", {"tau": 0.5}, by_scores(lambda row, k: math.exp(top_two(row)), 0.5)),
]


def naive_ensemble(formula, sent):
    """Weighted mean of each sample's rows; 0 where nobody counts."""
    out = torch.zeros_like(sent[0].values)
    for k in range(len(out)):
        weights = [formula(one, k) for one in sent]
        for one, weight in zip(sent, weights, strict=True):
            if weight:
                out[k] += weight / sum(weights) * one.values[k]
    return out


def label(case):
    return "-".join([case[0], *(f"{key}={value}" for key, value in case[1].items())])


@pytest.mark.parametrize("case", REPRESENTATIONS, ids=label)
@pytest.mark.parametrize("clients", [1, 4])
def test_representations_are_weighed_by_the_formula(case, clients):
    name, fields, formula = case
    sent = [client(seed, modalities=1 + seed % 2) for seed in range(1, 1 + clients)]
    found = ensemble(choose(name, **fields), sent).result().values
    torch.testing.assert_close(found, naive_ensemble(formula, sent), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("case", SCORES, ids=label)
@pytest.mark.parametrize("clients", [1, 4])
def test_class_scores_are_weighed_by_the_formula(case, clients):
    name, fields, formula = case
    sent = [voter(seed, modalities=1 + seed % 2) for seed in range(1, 1 + clients)]
    found = ensemble(choose(name, **fields), sent, output="class", of={}, labels=labels()).result().values
    torch.testing.assert_close(found, naive_ensemble(formula, sent), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("form", ["representations", "scores"])
def test_the_cases_above_tell_clients_apart_and_leave_some_out(form):
    # else the formulas of entropy would be compared on rows where all count, or none
    how = {"of": {}, "labels": labels()} if form == "scores" else {}
    make = voter if form == "scores" else client
    weights = ensemble(choose("entropy"), [make(seed) for seed in range(1, 5)], **how).weights()
    assert 0 < int((weights == 0).sum()) < weights.numel() / 2
    assert float(weights.std(0).max()) > 0.01


@pytest.mark.parametrize("case", [*REPRESENTATIONS[5:], *SCORES[5:]], ids=label)
def test_single_precision_is_enough(case):
    scores = case in SCORES
    how = {"of": {}, "labels": labels()} if scores else {"of": {name: g.float() for name, g in known().items()}}
    sent = [(voter if scores else client)(seed) for seed in range(1, 4)]
    exact = ensemble(choose(case[0], **case[1]), sent, **(how if scores else {})).weights()
    for one in sent:
        one.values = one.values.float()
    torch.testing.assert_close(ensemble(choose(case[0], **case[1]), sent, **how).weights(), exact, rtol=0, atol=1e-3)


# ---- captions of one picture


def test_masked_siblings_leave_the_sums_of_the_formula():
    items, sent = torch.arange(SIZE) // 3, client(1)
    found = {
        name: choose(name, mask_siblings=True).log_weights(evidence(sent, items=items, of=known()))
        for name in ("gca", "sed", "margin")
    }
    for k in range(SIZE):
        u, others = sent.values[k].tolist(), [j for j in range(SIZE) if j // 3 != k // 3]
        rows = [[dot(u, g) for g in known()[name].tolist()] for name in "bc"]
        expected = mean_of([row[k] - math.log(sum(math.exp(row[j]) for j in others)) for row in rows])
        assert float(found["gca"][k]) == pytest.approx(expected, rel=1e-6)
        row = [cosine(u, g) for g in known()["a"].tolist()]
        total = math.log(sum(math.exp(row[j]) for j in [k, *others]))
        assert float(found["sed"][k]) == pytest.approx(row[k] - total, rel=1e-6)
        assert float(found["margin"][k]) == pytest.approx(row[k] - max(row[j] for j in others), rel=1e-6)


def test_masked_gca_with_self_adds_the_own_term():
    items, sent = torch.arange(SIZE) // 3, client(1)
    two = {name: known()[name] for name in "ab"}
    with_self, without = (
        choose("gca", mask_siblings=True, include_self=kept).log_weights(evidence(sent, of=two, items=items))
        for kept in (True, False)
    )
    torch.testing.assert_close(with_self, F.logsigmoid(without))


@pytest.mark.parametrize("name", ["gca", "margin", "sed"])
def test_all_captions_of_one_picture_leave_nothing_to_weigh_by(name):
    one = client(1)
    ours = choose(name, mask_siblings=True).log_weights(evidence(one, items=torch.zeros(SIZE, dtype=torch.int64)))
    assert ours.tolist() == [0.0] * SIZE


def scores(local, other, **fields):
    return GCA(**fields).log_weights(Evidence(local, "own", {"other": other}, 1, 1))


def test_excluding_self_keeps_precision_where_the_positive_dominates():
    # log(sum - own term) would lose all digits here: the positive is e^50 times the rest
    z = torch.eye(6)
    expected = 50 - math.log(5)
    assert scores(z, z, tau=1 / 50).tolist() == pytest.approx([expected] * 6, rel=1e-6)


def test_two_orthogonal_anchors_by_hand():
    # a lower cosine to the partner can still score higher: methods.md 10.4, item 4
    anchors = torch.eye(2)
    with_self = [
        float(scores(torch.tensor([row, [0.0, 1.0]]), anchors, include_self=True)[0])
        for row in ([0.9, -0.436], [1.0, 0.0])
    ]
    assert with_self == pytest.approx([-0.233, -0.313], abs=1e-3)


def test_one_sample_with_self_scores_zero():
    one = torch.ones(1, 4) / 2
    ours = scores(one, one, include_self=True)
    assert ours.tolist() == pytest.approx([0.0], abs=1e-6)
