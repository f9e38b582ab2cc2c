import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from polyfed.aggregation.ensemble import Ensemble
from polyfed.core.errors import PayloadError


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
        st.lists(st.one_of(st.floats(-500, 500), st.just(-math.inf)), min_size=3, max_size=3),
        min_size=1,
        max_size=5,
    )
)
def test_equals_loops_for_any_log_weights(logs):
    values = [torch.randn(3, 2, generator=torch.Generator().manual_seed(c)) for c in range(len(logs))]
    ensemble = Ensemble(3, 2)
    for value, log in zip(values, logs, strict=True):
        ensemble.add(value, torch.tensor(log))
    found = ensemble.result()
    torch.testing.assert_close(found.values.double(), by_loops(values, logs), rtol=0, atol=1e-4)
    assert found.valid.tolist() == [any(log[k] > -math.inf for log in logs) for k in range(3)]


def test_a_row_that_nobody_sent_is_zero_and_marked():
    ensemble = Ensemble(2, 2)
    ensemble.add(torch.tensor([[1.0, 2.0], [math.nan, math.inf]]), 0.0, torch.tensor([True, False]))
    found = ensemble.result()
    assert found.values.tolist() == [[1.0, 2.0], [0.0, 0.0]]
    assert found.valid.tolist() == [True, False]


def test_an_empty_ensemble_has_no_valid_row():
    found = Ensemble(3, 2).result()
    assert not found.valid.any()
    assert torch.equal(found.values, torch.zeros(3, 2))


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


def test_weights_of_nobody_are_an_error():
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
