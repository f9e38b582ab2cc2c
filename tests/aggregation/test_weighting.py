"""Every weighting, through the ensemble, against its formula in plain Python; properties, edges, needs."""

from __future__ import annotations

import math
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional as F

from naive import Largest, cosine, dot, softmax
from polyfed.aggregation.ensemble import Ensemble
from polyfed.aggregation.weighting import GCA, Evidence, Weighting
from polyfed.core.errors import ConfigError, PayloadError

# ---- clients that are like the server or unlike it, and what a weighting makes of them


SIZE, DIM = 12, 6


def unit(*shape, seed=0):
    stream = torch.Generator().manual_seed(seed)
    return F.normalize(torch.randn(*shape, generator=stream, dtype=torch.float64), dim=-1)


def known(size=SIZE):
    return {"a": unit(size, DIM, seed=100), "b": unit(size, DIM, seed=101), "c": unit(size, DIM, seed=102)}


def client(seed, modalities=1, size=SIZE):
    """One whose representations are near the server's in modality a, the nearer the lower ``seed``, not normalised."""
    values = known(size)["a"] + (0.2 + 0.1 * seed) * unit(size, DIM, seed=seed)
    return SimpleNamespace(values=(2 + seed) * values, examples=10 * (seed + 1), modalities=modalities)


def evidence(sent, output="a", of=None, **changes):
    server = known(len(sent.values)) if of is None else of
    return Evidence(sent.values, output, server, sent.examples, sent.modalities, **changes)


def choose(name, **fields):
    return Weighting.model_validate({"name": name, **fields})


def ensemble(weighting, sent, **changes):
    result = Ensemble(*sent[0].values.shape, dtype=torch.float64)
    for one in sent:
        result.add(one.values, weighting.log_weights(evidence(one, **changes)))
    return result


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


def by_cosines(formula, tau=1.0):
    def weigh(sent, k):
        return formula([cosine(sent.values[k].tolist(), g) / tau for g in known()["a"].tolist()], k)

    return weigh


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


def naive_ensemble(formula, sent):
    """Weighted mean of each sample's rows; 0 where no client counts."""
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
    actual = ensemble(choose(name, **fields), sent).result().values
    torch.testing.assert_close(actual, naive_ensemble(formula, sent), rtol=1e-6, atol=1e-6)


def test_the_cases_above_distinguish_clients_and_leave_some_out():
    # else the formulas of entropy would be compared on rows where all count, or none
    weights = ensemble(choose("entropy"), [client(seed) for seed in range(1, 5)]).weights()
    assert 0 < int((weights == 0).sum()) < weights.numel() / 2
    assert float(weights.std(0).max()) > 0.01


@pytest.mark.parametrize("case", REPRESENTATIONS[5:], ids=label)
def test_single_precision_is_enough(case):
    sent = [client(seed) for seed in range(1, 4)]
    exact = ensemble(choose(case[0], **case[1]), sent).weights()
    for one in sent:
        one.values = one.values.float()
    single = ensemble(choose(case[0], **case[1]), sent, of={name: g.float() for name, g in known().items()})
    torch.testing.assert_close(single.weights(), exact, rtol=0, atol=1e-3)


# ---- captions of one image


def test_masked_siblings_leave_the_sums_of_the_formula():
    items, sent = torch.arange(SIZE) // 3, client(1)
    actual = {
        name: choose(name, mask_siblings=True).log_weights(evidence(sent, items=items, of=known()))
        for name in ("gca", "sed", "margin")
    }
    for k in range(SIZE):
        u, others = sent.values[k].tolist(), [j for j in range(SIZE) if j // 3 != k // 3]
        rows = [[dot(u, g) for g in known()[name].tolist()] for name in "bc"]
        expected = mean_of([row[k] - math.log(sum(math.exp(row[j]) for j in others)) for row in rows])
        assert float(actual["gca"][k]) == pytest.approx(expected, rel=1e-6)
        row = [cosine(u, g) for g in known()["a"].tolist()]
        total = math.log(sum(math.exp(row[j]) for j in [k, *others]))
        assert float(actual["sed"][k]) == pytest.approx(row[k] - total, rel=1e-6)
        assert float(actual["margin"][k]) == pytest.approx(row[k] - max(row[j] for j in others), rel=1e-6)


def test_masked_gca_with_self_adds_the_own_term():
    items, sent = torch.arange(SIZE) // 3, client(1)
    two = {name: known()[name] for name in "ab"}
    with_self, without = (
        choose("gca", mask_siblings=True, include_self=kept).log_weights(evidence(sent, of=two, items=items))
        for kept in (True, False)
    )
    torch.testing.assert_close(with_self, F.logsigmoid(without))


@pytest.mark.parametrize("name", ["gca", "margin", "sed"])
def test_all_captions_of_one_image_leave_nothing_to_weigh_by(name):
    one = client(1)
    ours = choose(name, mask_siblings=True).log_weights(evidence(one, items=torch.zeros(SIZE, dtype=torch.int64)))
    assert ours.tolist() == [0.0] * SIZE


def test_excluding_self_keeps_precision_where_the_positive_dominates():
    # log(sum - own term) would lose all digits here: the positive is e^50 times the rest
    z = torch.eye(6)
    ours = GCA(tau=1 / 50).log_weights(Evidence(z, "own", {"other": z}, 1, 1))
    assert ours.tolist() == pytest.approx([50 - math.log(5)] * 6, rel=1e-6)


NAMES = ("count", "entropy", "gca", "iot", "margin", "mean", "paired_only", "sed", "variance")
COMPARING = ("entropy", "gca", "margin", "sed", "variance")
"""Weightings that use the client's own rows."""


# ---- properties


@pytest.mark.parametrize("name", NAMES)
def test_a_client_without_a_modality_does_not_count_in_it(name):
    both, only = client(0, modalities=2), client(1, modalities=2)
    text = SimpleNamespace(values=known()["b"] + 0.1 * unit(SIZE, DIM, seed=7), examples=5, modalities=2)
    actual = {}
    for output, sent in (("a", [both, only]), ("b", [text])):
        actual[output] = ensemble(choose(name), sent, output=output)
    assert actual["a"].weights().shape == (2, SIZE)
    valid = actual["b"].result().valid
    torch.testing.assert_close(actual["b"].result().values[valid], text.values[valid])
    assert bool(valid.any())


PICTURES = torch.arange(SIZE) // 3


@pytest.mark.parametrize("fields", [{}, {"mask_siblings": True}, {"include_self": True}])
@pytest.mark.parametrize("name", COMPARING)
@pytest.mark.parametrize("repeated", ["a", "b", "ab"])
def test_comparing_distinct_rows_is_comparing_all(name, fields, repeated):
    if fields.keys() - type(choose(name)).model_fields.keys():
        pytest.skip("no such setting")
    weighting, sent = choose(name, **fields), client(1)
    server = {other: g[PICTURES] if other in repeated else g for other, g in known().items()}
    if "a" in repeated:
        sent.values = sent.values[PICTURES]
    positions = dict.fromkeys(repeated, PICTURES)
    ours, plain = (
        weighting.log_weights(evidence(sent, of=server, items=PICTURES, inverse_index=how)) for how in (positions, {})
    )
    torch.testing.assert_close(ours, plain)


# ---- edges


@pytest.mark.parametrize("name", sorted(set(NAMES) - {"gca", "variance"}))
def test_a_single_public_sample_is_the_mean_of_the_right(name):
    sent = [client(seed, modalities=2, size=1) for seed in (0, 0)]
    torch.testing.assert_close(ensemble(choose(name), sent).result().values, sent[0].values)


def test_a_single_public_sample_has_no_contrast_and_no_variance():
    assert choose("gca").log_weights(evidence(client(0, size=1))).tolist() == [0.0]
    assert choose("variance").log_weights(evidence(client(0, size=1))).tolist() == [-math.inf]


def test_entropies_below_the_floor_weigh_alike():
    sure, surer = (SimpleNamespace(values=scale * known()["a"], examples=1, modalities=1) for scale in (1.0, 7.0))
    actual = ensemble(choose("entropy", tau=1e-3), [sure, surer]).weights()
    torch.testing.assert_close(actual, torch.full((2, SIZE), 0.5, dtype=torch.float64))
    assert choose("entropy", tau=1e-3).log_weights(evidence(sure)).tolist() == pytest.approx([1000.0] * SIZE)
    assert choose("entropy", tau=1e-3, floor=0.5).log_weights(evidence(sure)).tolist() == [2.0] * SIZE


def test_rows_that_no_client_gets_right_have_no_target():
    wrong = SimpleNamespace(values=known()["a"].roll(1, 0), examples=1, modalities=1)
    half = SimpleNamespace(values=torch.cat([known()["a"][:6], wrong.values[6:]]), examples=1, modalities=1)
    actual = ensemble(choose("entropy"), [wrong, half]).result()
    assert actual.valid.tolist() == [True] * 6 + [False] * 6
    torch.testing.assert_close(actual.values[:6], half.values[:6])
    assert actual.values[6:].abs().sum() == 0


@pytest.mark.parametrize("name", ["count", "iot"])
def test_a_client_without_samples_does_not_count(name):
    empty = SimpleNamespace(values=unit(SIZE, DIM), examples=0, modalities=2)
    assert choose(name).log_weights(evidence(empty)) == -math.inf


@pytest.mark.parametrize("name", COMPARING)
def test_nan_stays_in_its_row_and_is_refused_by_the_ensemble(name):
    spoiled = client(1)
    spoiled.values = spoiled.values.clone()
    spoiled.values[3, 0] = math.nan
    logs, keep = choose(name).log_weights(evidence(spoiled)), torch.arange(SIZE) != 3
    torch.testing.assert_close(logs[keep], choose(name).log_weights(evidence(client(1)))[keep])
    with pytest.raises(PayloadError, match="NaN"):
        Ensemble(SIZE, DIM).add(spoiled.values, logs)
    without = Ensemble(SIZE, DIM)
    without.add(spoiled.values, logs.masked_fill(~keep, -math.inf))
    assert without.result().valid.tolist() == (keep & (logs > -math.inf)).tolist()


# ---- what each needs


@pytest.mark.parametrize("name", NAMES)
def test_needs_are_declared_and_are_the_only_needs(name):
    weighting, alone = choose(name), evidence(client(1), of={"a": known()["a"]})
    assert weighting.needs_partner == (name == "gca")
    with pytest.raises(ConfigError, match="another modality") if weighting.needs_partner else nullcontext():
        weighting.log_weights(alone)


@pytest.mark.parametrize("name", ["gca", "sed", "entropy", "margin"])
def test_masking_siblings_needs_items(name):
    with pytest.raises(ConfigError, match="needs the items"):
        choose(name, mask_siblings=True).log_weights(evidence(client(1)))


@pytest.mark.parametrize("name", ["sed", "entropy", "margin", "variance"])
def test_a_modality_that_the_server_lacks_is_refused(name):
    with pytest.raises(ConfigError, match=r"no representations of 'z'.*\['a', 'b', 'c'\]"):
        choose(name).log_weights(evidence(client(1), output="z"))


def test_rows_that_are_all_distinct_are_not_copied():
    """The largest tensor of the pass is a tile."""
    sent = client(0, size=4096)
    sent.values, of = unit(4096, 96).float(), {name: unit(4096, 96, seed=1).float() for name in "ab"}
    with Largest() as seen:
        GCA().log_weights(evidence(sent, of=of))
    assert seen.elements == 256 * 1024
