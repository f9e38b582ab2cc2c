"""Partitions of groups of items that stay together, such as the pictures of a patient."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from polyfed.core.errors import ConfigError
from polyfed.partitions.partition import Partition, Units, grouped
from polyfed.partitions.rules import Dirichlet, Natural, Quantity

WITH_MINIMUM = {"quantity", "dirichlet"}
COMPLETE = ["iid", "quantity", "shards", "dirichlet", "natural"]


def make(name: str) -> Partition:
    return Partition.model_validate({"name": name, **({"min_size": 1} if name in WITH_MINIMUM else {})})


def gen(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def patients(n: int, most: int, seed: int) -> torch.Tensor:
    """Group of each of n items: groups of 1 to ``most`` items, in mixed order, with numbers that have gaps."""
    rng = np.random.default_rng(seed)
    sizes = rng.integers(1, most + 1, size=n)
    groups = np.repeat(7 * np.arange(n) - 50, sizes)[:n]
    return torch.from_numpy(rng.permutation(groups))


def majority(labels: list[int]) -> int:
    """By counting: most frequent, the smallest of several."""
    counts = Counter(labels)
    return min(label for label in counts if counts[label] == max(counts.values()))


@pytest.mark.parametrize("name", [*COMPLETE, "drop"])
@settings(max_examples=15, deadline=None)
@given(n=st.integers(60, 300), clients=st.integers(2, 4), seed=st.integers(0, 1000))
def test_groups_are_never_split(name: str, n: int, clients: int, seed: int) -> None:
    groups = patients(n, 4, seed)
    labels = groups % 4  # so that every class has groups for all its holders
    parts = make(name).split(n, labels, clients, gen(seed), groups)
    owners = [{client for client, part in enumerate(parts) if (groups[part] == group).any()} for group in groups]
    assert all(len(owner) <= 1 for owner in owners)
    joined = torch.cat(parts)
    assert len(joined.unique()) == len(joined)
    if name != "drop":
        assert torch.equal(joined.sort().values, torch.arange(n))


@pytest.mark.parametrize("name", [*COMPLETE, "drop"])
def test_groups_of_one_are_dealt_like_items(name: str) -> None:
    labels = torch.randint(4, (200,), generator=gen(5))
    alone = make(name).split(200, labels, 4, gen(1))
    grouped_ = make(name).split(200, labels, 4, gen(1), torch.arange(200))
    assert all(torch.equal(a.sort().values, b.sort().values) for a, b in zip(alone, grouped_, strict=True))


@given(pairs=st.lists(st.tuples(st.integers(-3, 3), st.integers(0, 3)), min_size=1, max_size=40))
def test_a_group_has_the_class_of_most_of_its_items(pairs: list[tuple[int, int]]) -> None:
    groups, labels = (np.array(values) for values in zip(*pairs, strict=True))
    units, members = grouped(groups, labels)
    for unit, items in enumerate(members):
        assert len({groups[item] for item in items}) == 1
        assert units.sizes[unit] == len(items) == (groups == groups[items[0]]).sum()
        assert units.labels is not None
        assert units.labels[unit] == majority([labels[item] for item in items])
    assert sorted(np.concatenate(members)) == list(range(len(pairs)))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("alpha", [0.1, 1.0, 10.0])
def test_dirichlet_counts_items_against_the_cap(alpha: float, seed: int) -> None:
    bits = torch.randint(2, (5, 2000), generator=gen(seed))
    labels = (bits * (2 ** torch.arange(5))[:, None]).sum(0)  # 32 composite classes
    groups = patients(2000, 5, seed)
    parts = Dirichlet(alpha=alpha, min_size=1).split(2000, labels, 5, gen(seed), groups)
    of_group = {int(g): majority(labels[groups == g].tolist()) for g in groups.unique()}
    classes = torch.tensor([of_group[int(group)] for group in groups])
    cap = 2000 / 5
    for part in parts:
        counts = classes[part].bincount(minlength=32)
        last = int(counts.nonzero().max())
        assert counts.sum() - counts[last] < cap  # one class share above the cap at most
    assert torch.equal(torch.cat(parts).sort().values, torch.arange(2000))


def test_a_minimum_counts_items_not_groups() -> None:
    groups = torch.arange(30) // 10  # three groups of ten
    labels = torch.zeros(30, dtype=torch.int64)
    parts = Dirichlet(alpha=100, min_size=10).split(30, labels, 3, gen(), groups)
    assert [len(part) for part in parts] == [10, 10, 10]
    with pytest.raises(ConfigError, match=r"4 clients but only 3 groups of items; use at most 3 clients"):
        Dirichlet(min_size=1).split(30, labels, 4, gen(), groups)


def test_quantity_keeps_its_minimum_with_groups() -> None:
    for seed in range(20):
        parts = Quantity(alpha=0.3, min_size=12).split(200, None, 8, gen(seed), patients(200, 6, seed))
        assert min(len(part) for part in parts) >= 12


@pytest.mark.parametrize("large", [40, 60])
def test_quantity_keeps_its_minimum_beside_a_large_group(large: int) -> None:
    groups = torch.cat([torch.zeros(large, dtype=torch.int64), torch.arange(1, 61)])
    for seed in range(40):
        parts = Quantity(alpha=0.3, min_size=10).split(large + 60, None, 4, gen(seed), groups)
        assert min(len(part) for part in parts) >= 10
        assert torch.equal(torch.cat(parts).sort().values, torch.arange(large + 60))


def test_a_client_that_whole_groups_leave_empty_is_an_error_that_names_the_largest() -> None:
    groups = torch.tensor([0] * 50 + [1, 2])
    partition = Partition.model_validate({"name": "iid", "together": "patient"})
    with pytest.raises(ConfigError, match=r"would have 0 items, and 1 are promised; .*\('patient'\) has 50"):
        partition.split(52, None, 3, gen(0), groups)


def test_units_are_cut_where_their_middle_lies() -> None:
    units = Units(np.array([3, 1, 4, 2]))
    order = np.array([2, 0, 3, 1])  # items 0-3, 4-6, 7-8, 9; middles at 1, 5, 7, 9
    assert [piece.tolist() for piece in units.cut(order, np.array([1, 2, 5, 6, 9]))] == [[], [2], [], [0], [3], [1]]


def test_even_pieces_differ_by_less_than_a_unit() -> None:
    units, _ = grouped(patients(1000, 5, 3).numpy(), None)
    pieces = units.cut_evenly(np.random.default_rng(0).permutation(len(units)), 7)
    sizes = [int(units.sizes[piece].sum()) for piece in pieces]
    assert sum(sizes) == 1000
    assert all(abs(size - 1000 / 7) < 5 for size in sizes)


# ---- natural clients


def test_natural_clients_are_the_largest_classes_and_rare_ones_join_the_smallest() -> None:
    country = torch.tensor([9] * 8 + [4] * 5 + [7] * 3 + [1] * 2 + [2] * 2 + [3])
    parts = Natural().split(21, country, 3, gen())
    found = [sorted(country[part].unique().tolist()) for part in parts]
    # 3 + 2 (class 1) = 5; of two clients with 5 the last takes class 2, then client 1 with 5 takes class 3
    assert found == [[9], [3, 4], [1, 2, 7]]


def test_natural_is_the_same_for_every_seed_but_for_the_order() -> None:
    labels = torch.randint(9, (300,), generator=gen(1))
    first, second = (Natural().split(300, labels, 4, gen(seed)) for seed in (0, 1))
    assert all(torch.equal(a.sort().values, b.sort().values) for a, b in zip(first, second, strict=True))
    assert not torch.equal(first[0], second[0])


def test_natural_needs_as_many_classes_as_clients_and_its_minimum() -> None:
    with pytest.raises(ConfigError, match=r"3 clients, but the items are of 2 classes; use at most 2 clients"):
        Natural().split(10, torch.arange(10) % 2, 3, gen())
    with pytest.raises(ConfigError, match=r"min_size=4, but 2 clients would hold \[7, 3\] items"):
        Natural(min_size=4).split(10, torch.tensor([0] * 7 + [1] * 3), 2, gen())
