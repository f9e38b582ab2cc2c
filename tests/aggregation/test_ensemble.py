"""Ensembles: against loops, scipy and numbers by hand; what clients see alike; maps between spaces."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.linalg import orthogonal_procrustes
from torch import Tensor
from torch.nn import functional as F

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
from polyfed.core.errors import PayloadError
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
