"""Ensembles and maps between spaces against loops and scipy; every weighting against its formula in plain Python."""

from __future__ import annotations

import math
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.linalg import orthogonal_procrustes
from torch import Tensor
from torch.nn import functional as F

from naive import Largest, cosine, dot, softmax
from polyfed.aggregation.ensemble import (
    Alignment,
    Ensemble,
    Ensembled,
    Rows,
    procrustes,
    relational_losses,
    relations,
    ridge,
)
from polyfed.aggregation.weighting import GCA, Evidence, Weighting
from polyfed.core.errors import ConfigError, PayloadError
from polyfed.losses.distillation import relational_kl


def by_loops(values, logs):
    """Softmax over clients of each sample's log weights, in Python floats."""
    samples, dim = values[0].shape
    out = torch.zeros(samples, dim, dtype=torch.float64)
    for k in range(samples):
        top = max(float(log[k]) for log in logs)
        weights = [0.0 if top == -math.inf else math.exp(float(log[k]) - top) for log in logs]
        for c, weight in enumerate(weights):
            if weight:
                out[k] += weight / sum(weights) * values[c][k].double()
    return out


@given(
    st.lists(
        st.lists(st.one_of(st.floats(-500, 500), st.just(-math.inf)), min_size=3, max_size=3), min_size=1, max_size=5
    )
)
def test_equals_loops_for_any_log_weights(logs):
    values = [torch.randn(3, 2, generator=torch.Generator().manual_seed(c)) for c in range(len(logs))]
    ensemble = Ensemble(3, 2)
    for value, log in zip(values, logs, strict=True):
        ensemble.add(value, torch.tensor(log))
    result = ensemble.result()
    torch.testing.assert_close(result.values.double(), by_loops(values, logs), rtol=0, atol=1e-4)
    assert result.valid.tolist() == [any(log[k] > -math.inf for log in logs) for k in range(3)]


def test_a_row_that_no_client_sent_is_zero_and_marked():
    ensemble = Ensemble(2, 2)
    ensemble.add(torch.tensor([[1.0, 2.0], [math.nan, math.inf]]), 0.0, torch.tensor([True, False]))
    result = ensemble.result()
    assert result.values.tolist() == [[1.0, 2.0], [0.0, 0.0]]
    assert result.valid.tolist() == [True, False]


def test_an_empty_ensemble_has_no_valid_row():
    result = Ensemble(3, 2).result()
    assert not result.valid.any()
    assert torch.equal(result.values, torch.zeros(3, 2))


def test_a_row_may_come_late():
    ensemble, mask = Ensemble(1, 1), torch.tensor([False])
    ensemble.add(torch.tensor([[9.0]]), 700.0, mask)
    ensemble.add(torch.tensor([[2.0]]), -700.0)
    ensemble.add(torch.tensor([[9.0]]), 700.0, mask)
    assert ensemble.result().values.item() == 2.0


def test_inputs_are_left_alone_and_memory_does_not_grow_with_clients():
    value, log = torch.ones(4, 3), torch.zeros(4)
    ensemble = Ensemble(4, 3, record=torch.tensor([], dtype=torch.long))
    total = ensemble.total.data_ptr()
    for _ in range(5):
        ensemble.add(value, log)
    assert ensemble.total.data_ptr() == total
    assert torch.equal(value, torch.ones(4, 3))
    assert torch.equal(log, torch.zeros(4))


def test_half_precision_values_accumulate_in_fp32():
    ensemble = Ensemble(1, 1)
    for _ in range(3000):
        ensemble.add(torch.ones(1, 1, dtype=torch.bfloat16), 0.0)
    assert ensemble.result().values.item() == pytest.approx(1.0, abs=1e-5)


def test_weights_of_recorded_samples():
    ensemble = Ensemble(4, 1, record=torch.tensor([3, 1]))
    ensemble.add(torch.zeros(4, 1), torch.tensor([0.0, math.log(3), 0.0, -math.inf]))
    ensemble.add(torch.zeros(4, 1), torch.tensor([0.0, 0.0, 0.0, -math.inf]))
    torch.testing.assert_close(ensemble.weights(), torch.tensor([[0.0, 0.75], [0.0, 0.25]]))
    assert ensemble.recorded.tolist() == [3, 1]


@pytest.mark.parametrize(("samples", "kept"), [(1, 1), (1024, 1024), (1025, 513), (50_000, 1021)])
def test_by_default_at_most_1024_samples_are_recorded(samples, kept):
    ensemble = Ensemble(samples, 1)
    ensemble.add(torch.zeros(samples, 1), 0.0)
    assert tuple(ensemble.weights().shape) == (1, kept)


def test_weights_of_no_client_are_an_error():
    with pytest.raises(PayloadError, match="no client"):
        Ensemble(2, 2).weights()


@pytest.mark.parametrize(
    ("values", "logs", "match"),
    [
        (torch.zeros(3, 2), 0.0, r"\(3, 2\), not \(2, 2\)"),
        (torch.zeros(2, 2), torch.zeros(3), "log weights have shape"),
        (torch.zeros(2, 2), math.nan, "NaN"),
        (torch.zeros(2, 2), torch.tensor([0.0, math.inf]), "inf"),
    ],
)
@pytest.mark.usefixtures("unchecked_shapes")
def test_bad_uploads_are_refused_and_leave_the_ensemble_as_it_was(values, logs, match):
    ensemble = Ensemble(2, 2)
    ensemble.add(torch.ones(2, 2), 0.0)
    with pytest.raises(PayloadError, match=match):
        ensemble.add(values, logs)
    assert torch.equal(ensemble.result().values, torch.ones(2, 2))
    assert len(ensemble.weights()) == 1


# ---- what clients see alike, weighed pair by pair


N, WIDTH = 9, 5
INDEX = torch.tensor([7, 0, 4, 2])


def rows(seed: int) -> Rows:
    stream = torch.Generator().manual_seed(seed)
    return Rows(F.normalize(torch.randn(N, WIDTH, generator=stream), dim=1), torch.randn(N, generator=stream))


@pytest.fixture
def sent() -> dict[str, dict[str, Rows]]:
    """``a`` and ``c`` send both, ``b`` images alone."""
    return {"image": {"a": rows(1), "b": rows(2), "c": rows(3)}, "text": {"c": rows(4), "a": rows(5)}}


@pytest.mark.parametrize(("one", "other"), [("image", "image"), ("image", "text"), ("text", "image"), ("text", "text")])
def test_equals_loops(sent: dict[str, dict[str, Rows]], one: str, other: str) -> None:
    sent["image"]["a"].log_weights[0] = -math.inf  # does not count there
    result = relations(sent[one], sent[other], INDEX)
    for s, place in enumerate(INDEX.tolist()):
        for t, partner in enumerate(INDEX.tolist()):
            total = norm = 0.0
            for client in sent[one].keys() & sent[other].keys():
                own, compared = sent[one][client], sent[other][client]
                weight = math.exp(float(own.log_weights[place] + compared.log_weights[partner]) / 2)
                total, norm = total + weight * float(own.values[place] @ compared.values[partner]), norm + weight
            assert float(result.cosines[s, t]) == pytest.approx(total / norm, abs=1e-6)
            assert result.known[s, t]


def test_a_client_that_turns_its_space_changes_nothing(sent: dict[str, dict[str, Rows]]) -> None:
    before = [relations(sent[one], sent[other], INDEX).cosines for one in sent for other in sent]
    turn = torch.linalg.qr(torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(6)))[0]
    for clients in sent.values():
        clients["a"] = clients["a"]._replace(values=2 * clients["a"].values @ turn)
    after = [relations(sent[one], sent[other], INDEX).cosines for one in sent for other in sent]
    torch.testing.assert_close(after, before)


def test_no_client_sent_both(sent: dict[str, dict[str, Rows]]) -> None:
    result = relations({"b": sent["image"]["b"]}, sent["text"], INDEX)
    assert not result.known.any()
    assert not result.cosines.any()


def test_losses_by_output_compare_other_items_within_and_all_across(sent: dict[str, dict[str, Rows]]) -> None:
    student = {name: torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(k)) for k, name in enumerate(sent)}
    items = torch.tensor([3, 3, 1, 0])  # the first two are siblings
    nothing = torch.zeros(N, WIDTH), torch.ones(N, dtype=torch.bool)
    targets = {name: Ensembled(*nothing, clients) for name, clients in sent.items()}
    losses = relational_losses(student, targets, INDEX, items, 0.1)
    strangers = torch.tensor([[k != j for k in (3, 3, 1, 0)] for j in (3, 3, 1, 0)])
    for name in sent:
        parts: list[Tensor] = []
        for other in sent:
            known = strangers if other == name else torch.ones(4, 4, dtype=torch.bool)
            taught = relations(sent[name], sent[other], INDEX).cosines
            parts.append(relational_kl(student[name], student[other], taught, known, 0.1))
        assert float(losses[name]) == pytest.approx(float(sum(parts)) / 2, rel=1e-6)


# ---- maps between spaces of representations


def unit(*shape: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return F.normalize(torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype), dim=-1)


@pytest.fixture
def both() -> tuple[Tensor, Tensor]:
    return unit(40, 6, seed=1), unit(40, 6, seed=2)


def test_procrustes_is_that_of_scipy(both: tuple[Tensor, Tensor]) -> None:
    values, reference = both
    expected = values.numpy() @ orthogonal_procrustes(values.numpy(), reference.numpy())[0]
    np.testing.assert_allclose(procrustes(values, reference).numpy(), expected, atol=1e-12)


@pytest.mark.parametrize("mirror", [False, True])
def test_a_rotated_or_reflected_copy_comes_back(mirror: bool) -> None:
    reference, turn = unit(40, 6, seed=1), torch.linalg.qr(unit(6, 6, seed=9))[0]
    if mirror != bool(torch.linalg.det(turn) < 0):
        turn = turn * torch.tensor([-1.0, 1, 1, 1, 1, 1])
    torch.testing.assert_close(procrustes(reference @ turn, reference), reference)
    torch.testing.assert_close(ridge(reference @ turn, reference, 1e-6), reference, atol=1e-3, rtol=0)


def test_by_hand_a_quarter_turn() -> None:
    values, reference = torch.eye(2), torch.tensor([[0.0, 1.0], [-1.0, 0.0]])
    torch.testing.assert_close(procrustes(values, reference), reference)


@pytest.mark.parametrize("penalty", [1e-6, 0.01, 3.0])
def test_ridge_solves_the_normal_equations(both: tuple[Tensor, Tensor], penalty: float) -> None:
    values, reference = (side.numpy() for side in both)
    # least squares with the penalty as further rows
    rows = np.vstack([values, np.sqrt(penalty * len(values)) * np.eye(6)])
    weights = np.linalg.lstsq(rows, np.vstack([reference, np.zeros((6, 6))]), rcond=None)[0]
    expected = values @ weights
    expected /= np.linalg.norm(expected, axis=1, keepdims=True)
    np.testing.assert_allclose(ridge(*both, penalty).numpy(), expected, atol=1e-10)


def test_ridge_by_hand() -> None:
    """One dimension counts: w = (1 + 1) / (2 + 2 x 0.5) = 2 / 3, which unit length takes away again."""
    values, reference = torch.tensor([[1.0, 0], [1.0, 0]]), torch.tensor([[0.0, 1], [0.0, 1]])
    torch.testing.assert_close(ridge(values, reference, 0.5), reference)


def test_without_a_penalty_as_many_dimensions_as_samples_fit_anything() -> None:
    values, reference = unit(6, 6, seed=1), unit(6, 6, seed=2)
    torch.testing.assert_close(ridge(values, reference, 1e-9), reference, atol=1e-4, rtol=0)
    assert (ridge(values, reference, 0.1) - reference).norm() > 0.5


@pytest.mark.parametrize("type_name", ["procrustes", "ridge"])
def test_rows_that_are_zero_on_either_side_do_not_count(both: tuple[Tensor, Tensor], type_name: str) -> None:
    values, reference = (side.clone() for side in both)
    values[3], reference[5] = 0, 0
    move = Alignment(kind=type_name).move
    result = move(values, reference)
    others = [k for k in range(40) if k not in (3, 5)]
    torch.testing.assert_close(result[others], move(values[others], reference[others]))
    assert not result[3].any()
    assert result[5].norm() == pytest.approx(1)  # it is mapped, by the others


@pytest.mark.parametrize("type_name", ["procrustes", "ridge"])
def test_edges(type_name: str) -> None:
    nothing, few = torch.zeros(4, 3), unit(2, 5, seed=1, dtype=torch.float32)
    move = Alignment(kind=type_name).move
    assert not move(nothing, unit(4, 3, seed=1, dtype=torch.float32)).any()
    assert torch.isfinite(move(few, unit(2, 5, seed=2))).all()
    half = move(few.bfloat16(), few)
    assert half.dtype == torch.float32
    torch.testing.assert_close(half, few, atol=0.02, rtol=0)


# ---- weightings


# ---- clients that are like the server or unlike it, and what a weighting makes of them


SIZE, DIM = 12, 6


def units(*shape, seed=0):
    stream = torch.Generator().manual_seed(seed)
    return F.normalize(torch.randn(*shape, generator=stream, dtype=torch.float64), dim=-1)


def known(size=SIZE):
    return {"a": units(size, DIM, seed=100), "b": units(size, DIM, seed=101), "c": units(size, DIM, seed=102)}


def client(seed, modalities=1, size=SIZE):
    """One whose representations are near the server's in modality a, the nearer the lower ``seed``, not normalised."""
    values = known(size)["a"] + (0.2 + 0.1 * seed) * units(size, DIM, seed=seed)
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
    text = SimpleNamespace(values=known()["b"] + 0.1 * units(SIZE, DIM, seed=7), examples=5, modalities=2)
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
    empty = SimpleNamespace(values=units(SIZE, DIM), examples=0, modalities=2)
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
    sent.values, of = units(4096, 96).float(), {name: units(4096, 96, seed=1).float() for name in "ab"}
    with Largest() as seen:
        GCA().log_weights(evidence(sent, of=of))
    assert seen.elements == 256 * 1024
