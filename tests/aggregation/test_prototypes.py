"""Class prototypes against plain loops; who lacks a class, who lies about its samples."""

import pytest
import torch

from polyfed.aggregation.prototypes import (
    ClassAverage,
    ClassMeans,
    GlobalPrototypes,
    by_space,
    mean_prototypes,
    prototype_tensors,
    table,
)
from polyfed.core.errors import PayloadError

CLASSES, D = 5, 3


def sent(counts, seed, scale=1.0):
    """What a client with so many samples of each class sends."""
    stream = torch.Generator().manual_seed(seed)
    counts = torch.tensor(counts, dtype=torch.int32)
    present = counts > 0
    means = scale * torch.randn(int(present.sum()), D, generator=stream)
    return ClassMeans(means, counts[present], present)


@pytest.fixture
def clients():
    """Class 1 is one client's only, class 4 nobody's."""
    return [sent([2, 0, 7, 1, 0], 1), sent([1, 3, 0, 0, 0], 2), sent([9, 0, 1, 0, 0], 3)]


def mean_by_loops(clients):
    found = {}
    for label in range(CLASSES):
        rows = [
            one.means[one.present.nonzero().flatten().tolist().index(label)].double().tolist()
            for one in clients
            if one.present[label]
        ]
        if rows:
            found[label] = [sum(column) / len(rows) for column in zip(*rows, strict=True)]
    return found


def as_dict(found):
    return dict(zip(found.present.nonzero().flatten().tolist(), found.means.tolist(), strict=True))


# ---- means of a client


def test_class_means_equal_loops_whatever_the_batches():
    stream = torch.Generator().manual_seed(0)
    features, labels = torch.randn(23, D, generator=stream), torch.randint(0, 4, (23,), generator=stream)
    average = ClassAverage(CLASSES, D)
    for part in torch.arange(23).split(6):
        average.add(features[part], labels[part])
    found = average.result()
    for label, mean in as_dict(found).items():
        rows = [row for row, own in zip(features.double().tolist(), labels.tolist(), strict=True) if own == label]
        assert mean == pytest.approx([sum(column) / len(rows) for column in zip(*rows, strict=True)], abs=1e-6)
    assert found.counts.tolist() == torch.bincount(labels).tolist()
    assert found.counts.dtype == torch.int32
    assert found.present.tolist() == [True] * 4 + [False]


def test_half_precision_features_are_summed_in_full():
    average = ClassAverage(1, 1)
    average.add(torch.full((3000, 1), 1.0, dtype=torch.bfloat16), torch.zeros(3000, dtype=torch.long))
    assert average.result().means.tolist() == [[1.0]]
    assert average.result().means.dtype == torch.float32


# ---- means over clients


def test_the_mean_over_clients_equals_loops(clients):
    found, expected = as_dict(mean_prototypes(clients)), mean_by_loops(clients)
    assert found.keys() == expected.keys() == {0, 1, 2, 3}
    for label, mean in expected.items():
        assert found[label] == pytest.approx(mean, abs=1e-6)


def test_it_scales_with_the_rows_and_one_client_is_its_own_mean(clients):
    tripled = [one._replace(means=3 * one.means) for one in clients]
    assert torch.allclose(mean_prototypes(tripled).means, 3 * mean_prototypes(clients).means)
    alone = mean_prototypes(clients[:1])
    assert torch.allclose(alone.means, clients[0].means)
    assert torch.equal(alone.present, clients[0].present)


def test_there_is_no_mean_of_nothing_nor_of_different_widths(clients):
    with pytest.raises(PayloadError, match="mean of nothing"):
        mean_prototypes([])
    with pytest.raises(PayloadError, match=r"\(5, 2\) and \(5, 3\)"):
        mean_prototypes([clients[0], clients[1]._replace(means=clients[1].means[:, :2])])


def test_absent_classes_have_rows_of_zeros(clients):
    rows = table(clients[1].means, clients[1].present)
    assert torch.equal(rows[:2], clients[1].means)
    assert not rows[2:].any()


# ---- what is refused


def test_what_a_client_can_have_is_accepted_and_nothing_at_all_is_not(clients):
    clients[0].require(10)
    none = ClassMeans(torch.zeros(0, 3), torch.zeros(0, dtype=torch.int32), torch.zeros(4, dtype=torch.bool))
    with pytest.raises(PayloadError, match="no class is flagged"):
        none.require(10)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"counts": torch.tensor([2, 7, 0], dtype=torch.int32)}, "counts are 0 or more"),
        ({"counts": torch.tensor([2, -7, 1], dtype=torch.int32)}, "counts are -7 or more"),
        ({"counts": torch.tensor([2, 8, 1], dtype=torch.int32)}, "11 in sum, expected at least 1 and at most 10"),
        ({"counts": torch.full((3,), 2**31 - 1, dtype=torch.int32)}, "6442450941 in sum"),
        ({"counts": torch.tensor([2.0, 7.0, 1.0])}, r"counts are float32 \[3\]"),
        ({"counts": torch.tensor([2, 7], dtype=torch.int32)}, r"counts are int32 \[2\], expected int32 \[3\]"),
        ({"means": torch.zeros(2, D)}, r"means are float32 \[2, 3\], expected float32 \[3, d\]"),
        ({"means": torch.zeros(3)}, r"means are float32 \[3\]"),
        ({"means": torch.zeros(3, D, dtype=torch.int64)}, r"means are int64 \[3, 3\]"),
        ({"present": torch.tensor([1, 0, 1, 1, 0])}, r"flags of classes are int64 \[5\]"),
        ({"present": torch.tensor([[True, False, True, True, False]])}, r"flags of classes are bool \[1, 5\]"),
        ({"present": torch.tensor([True, True, True, True, False])}, r"expected float32 \[4, d\]"),
    ],
)
def test_what_it_cannot_have_is_refused(clients, change, message):
    with pytest.raises(PayloadError, match=message):
        clients[0]._replace(**change).require(10)


def test_names_of_tensors_lead_back_to_spaces(clients):
    tensors = prototype_tensors("a.b:c", clients[0]) | prototype_tensors("d", clients[1])
    found = by_space(tensors, ClassMeans)
    assert list(found) == ["a.b:c", "d"]
    assert all(x is y for x, y in zip(found["d"], clients[1], strict=True))
    known = by_space(prototype_tensors("d", GlobalPrototypes(clients[1].means, clients[1].present)), GlobalPrototypes)
    assert known["d"].shape == (CLASSES, D)
    for wrong in ({"d.means": clients[1].means}, tensors | {"d.more": clients[1].means}, {"means": clients[1].means}):
        with pytest.raises(PayloadError, match="expected"):
            by_space(wrong, ClassMeans)
