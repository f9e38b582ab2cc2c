import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from polyfed.aggregation.mean import WeightedMean
from polyfed.core.errors import PayloadError


def fold(*clients):
    mean = WeightedMean()
    for tensors, weight in clients:
        mean.add(tensors, weight)
    return mean.result()


@given(st.lists(st.tuples(st.integers(1, 10_000), st.booleans()), min_size=1, max_size=6), st.randoms())
def test_equals_the_formula_name_by_name_in_any_order(spec, shuffler):
    clients = []
    for c, (count, both) in enumerate(spec):
        draw = torch.Generator().manual_seed(c)
        tensors = {"a": torch.randn(3, generator=draw)} | ({"b": torch.randn(2, 2, generator=draw)} if both else {})
        clients.append((tensors, count))
    expected = {}
    for name in ("a", "b"):
        having = [(tensors[name].double(), n) for tensors, n in clients if name in tensors]
        if having:
            expected[name] = sum(n * x for x, n in having) / sum(n for _, n in having)
    shuffler.shuffle(clients)
    torch.testing.assert_close(fold(*clients), expected, rtol=0, atol=1e-5, check_dtype=False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_equal_clients_come_out_bit_for_bit(dtype):
    tensor = torch.randn(50).to(dtype)
    result = fold(*(({"w": tensor}, n) for n in (3, 1, 4, 1, 5)))["w"]
    assert result.dtype == dtype
    assert torch.equal(result, tensor)


def test_integers_are_averaged_and_rounded_in_their_type():
    result = fold(({"n": torch.tensor(10)}, 1), ({"n": torch.tensor(13)}, 2))["n"]
    assert result.dtype == torch.int64
    assert result.item() == 12
    large = torch.tensor(2**40 + 1)
    assert fold(({"n": large}, 3), ({"n": large}, 5))["n"].item() == 2**40 + 1


def test_half_precision_accumulates_in_fp32():
    step = torch.tensor([1 / 256])
    clients = [({"w": (1 + c * step).bfloat16()}, 1) for c in range(256)]
    exact = sum(float(tensors["w"]) for tensors, _ in clients) / 256
    assert fold(*clients)["w"].item() == pytest.approx(exact, abs=2**-8)


def test_inputs_are_neither_changed_nor_kept():
    first, second = torch.zeros(2), torch.ones(2)
    mean = WeightedMean()
    mean.add({"w": first}, 1)
    mean.add({"w": second}, 1)
    result = mean.result()["w"]
    assert torch.equal(first, torch.zeros(2))
    mean.add({"w": torch.full((2,), 5.0)}, 1)
    assert torch.equal(result, torch.full((2,), 0.5))
    torch.testing.assert_close(mean.result()["w"], torch.full((2,), 2.0))


def test_parameters_that_require_gradients_are_taken_by_value():
    result = fold(({"w": torch.ones(1, requires_grad=True)}, 1), ({"w": torch.zeros(1, requires_grad=True)}, 1))["w"]
    assert not result.requires_grad
    assert result.item() == 0.5


def test_a_client_of_weight_zero_does_not_count():
    result = fold(({"w": torch.tensor([math.nan]), "only": torch.ones(1)}, 0), ({"w": torch.ones(1)}, 2))
    assert result == {"w": torch.ones(1)}


def test_a_mean_of_no_client_is_an_error():
    with pytest.raises(PayloadError, match="positive weight"):
        WeightedMean().result()
    with pytest.raises(PayloadError, match="positive weight"):
        fold(({"w": torch.ones(1)}, 0))


def test_clients_without_tensors_have_an_empty_mean():
    mean = WeightedMean()
    mean.add({}, 2)
    assert mean.result() == mean.take() == {}
    with pytest.raises(PayloadError, match="positive weight"):  # it has been emptied
        mean.take()


@pytest.mark.parametrize("weight", [-1, math.nan, math.inf])
def test_impossible_weights_are_refused(weight):
    with pytest.raises(PayloadError, match="weight of a client"):
        WeightedMean().add({"w": torch.ones(1)}, weight)


def test_a_shape_mismatch_names_the_tensor_and_adds_nothing():
    mean = WeightedMean()
    mean.add({"a": torch.ones(2), "head.weight": torch.ones(3, 2)}, 1)
    with pytest.raises(PayloadError, match=r"'head.weight' has shape \(4, 2\), not \(3, 2\)"):
        mean.add({"a": torch.zeros(2), "head.weight": torch.ones(4, 2)}, 1)
    assert torch.equal(mean.result()["a"], torch.ones(2))


def test_a_client_is_folded_in_like_each_of_its_tensors_alone_bit_for_bit():
    def drawn(seed):
        draw = torch.Generator().manual_seed(seed)
        shapes = {"a": (5, 3), "b": (7,), "c": (), "d": (2, 2)}
        floating = {name: torch.randn(shape, generator=draw) for name, shape in shapes.items()}
        return floating | {"half": floating["a"].bfloat16(), "steps": torch.tensor(seed**9), "t": floating["a"].T}

    clients = [(drawn(seed), 3 * seed + 1) for seed in range(5)]
    clients[2][0].pop("b")  # and counts for the others alone
    for name, value in fold(*clients).items():
        alone = fold(*(({name: tensors[name]}, weight) for tensors, weight in clients if name in tensors))
        mean, total = None, 0
        for tensors, weight in clients:
            if name in tensors:
                own, total = tensors[name].to(torch.float64 if name == "steps" else torch.float32), total + weight
                mean = own.clone() if mean is None else mean.lerp_(own, weight / total)
        assert torch.equal(value, (mean.round() if name == "steps" else mean).to(value.dtype))
        assert torch.equal(value, alone[name])
