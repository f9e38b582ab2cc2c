"""Partitions of single items and of groups that stay together: what holds for all, and for each."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from item_tables import opened, written
from polyfed.core.errors import ConfigError
from polyfed.federation.membership import Assignment
from polyfed.lab.analysis.partition import planned_holdings
from polyfed.partitions.partition import (
    Dirichlet,
    Drop,
    Iid,
    Indices,
    Natural,
    Partition,
    Quantity,
    Shards,
    Units,
    grouped,
    largest_remainder,
    partitioned,
    with_least,
)
from polyfed.runs.experiment import Experiment

COMPLETE = ["iid", "quantity", "shards", "dirichlet"]


def make(name: str, **extra: object) -> Partition:
    least = {"min_size": 1} if name in ("quantity", "dirichlet") else {}
    return Partition.model_validate({"name": name, **least, **extra})


def gen(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def sizes(parts: list[Tensor]) -> list[int]:
    return [len(part) for part in parts]


def balanced(n: int, classes: int) -> Tensor:
    return torch.arange(n) % classes


@pytest.mark.parametrize("name", COMPLETE)
@settings(max_examples=15, deadline=None)
@given(n=st.integers(20, 300), clients=st.integers(1, 6), seed=st.integers(0, 1000))
def test_every_item_goes_to_exactly_one_client(name: str, n: int, clients: int, seed: int):
    parts = make(name).split(n, balanced(n, 2), clients, gen(seed))
    assert len(parts) == clients
    assert all(part.dtype == torch.int64 and len(part) > 0 for part in parts)
    assert torch.equal(torch.cat(parts).sort().values, torch.arange(n))


@pytest.mark.parametrize("name", [*COMPLETE, "drop"])
def test_its_generator_alone_decides_which_items_in_which_order(name: str):
    before = torch.random.get_rng_state()
    first, again, other = (make(name).split(200, balanced(200, 4), 4, gen(seed)) for seed in (3, 3, 4))
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert any(not torch.equal(a, b) for a, b in zip(first, other, strict=True))
    assert all(not torch.equal(part, part.sort().values) for part in first)
    assert torch.equal(before, torch.random.get_rng_state())


@pytest.mark.parametrize("name", ["iid", "quantity", "shards", "drop"])
def test_labels_are_not_needed_where_they_do_not_matter(name: str):
    with_labels, without = (make(name).split(100, labels, 4, gen()) for labels in (balanced(100, 5), None))
    assert all(torch.equal(a, b) for a, b in zip(with_labels, without, strict=True))


TOO_MANY = (4, balanced(4, 2), 5, "5 clients but only 4 items")
NO_CLIENT = (4, balanced(4, 2), 0, "clients=0")
NO_LABELS = (100, None, 2, "needs a label for each item")
NO_ROOM = (100, balanced(100, 2), 10, r"min_size=11 for 10 clients needs 110 items, there are 100.*lower")


@pytest.mark.parametrize(
    ("chosen", "items", "labels", "clients", "message"),
    [
        *((make(name), *wrong) for name in (*COMPLETE, "drop") for wrong in (TOO_MANY, NO_CLIENT)),
        *((make(name), *NO_LABELS) for name in ("dirichlet", "natural")),
        (Shards(order="label"), *NO_LABELS),
        (Iid(), 10, balanced(9, 3), 2, "9 labels for 10 items"),
        (Quantity(min_size=11), *NO_ROOM),
        (Dirichlet(min_size=11), *NO_ROOM),
        (Dirichlet(alpha=1e-3), 400, balanced(400, 2), 10,
         r"alpha=0.001, 10 clients and 2 classes .* 1000 draws, min_size=10; raise alpha"),
        (Shards(per_client=3, total=5), 10, None, 2, "total=5, but 2 clients with per_client=3 need 6"),
        (Shards(per_client=6), 10, None, 2, "12 shards of only 10"),
    ],
)  # fmt: skip
def test_what_cannot_be_divided_is_an_error_with_numbers(
    chosen: Partition, items: int, labels: Tensor | None, clients: int, message: str
):
    with pytest.raises(ConfigError, match=message):
        chosen.split(items, labels, clients, gen())


@pytest.mark.parametrize(
    ("chosen", "message"),
    [
        ({"name": "drop", "keep_least": 0.9, "keep_most": 0.8}, r"keep_least=0.9 is above keep_most=0.8"),
        ({"name": "dirichlet", "alpha": 0}, "alpha"),
        ({"name": "iid", "of": ["a", "b", "a"]}, "column 'a' is named 2 times"),
    ],
)
def test_settings_that_make_no_sense_are_refused(chosen: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        Partition.model_validate(chosen)


# ---- each kind


def test_iid_sizes_differ_by_at_most_one_and_order_does_not_matter():
    assert sorted(sizes(Iid().split(11, None, 4, gen()))) == [2, 3, 3, 3]
    assert Iid().split(1000, None, 2, gen())[0].double().mean() == pytest.approx(499.5, abs=40)


def test_quantity_sizes_spread_with_small_alpha_and_classes_do_not():
    assert max(sizes(Quantity(alpha=0.1).split(1000, None, 10, gen()))) > 300
    assert set(sizes(Quantity(alpha=1e6).split(1000, None, 10, gen()))) <= {99, 100, 101}
    labels = balanced(10_000, 2)
    largest = max(Quantity(alpha=0.5).split(10_000, labels, 5, gen()), key=len)
    assert labels[largest].double().mean() == pytest.approx(0.5, abs=0.04)


def test_drop_keeps_between_95_and_99_per_cent_of_equal_parts():
    parts = Drop().split(10_000, None, 8, gen())
    assert all(0.95 * 1250 - 1 <= size <= 0.99 * 1250 for size in sizes(parts))
    assert len(set(sizes(parts))) > 3
    assert len(torch.cat(parts).unique()) == sum(sizes(parts)) < 10_000
    assert sizes(Drop(keep_least=0.1, keep_most=0.2).split(3, None, 3, gen())) == [1, 1, 1]


def test_label_shards_give_few_classes_to_a_client():
    labels = torch.randint(10, (2000,), generator=gen(1))
    for part in Shards(order="label", per_client=2).split(2000, labels, 10, gen()):
        # a shard of a tenth of the set touches two or, rarely, three classes
        assert len(labels[part].unique()) <= 6
    one = Shards(order="label", per_client=1).split(2000, balanced(2000, 10), 10, gen())
    assert sorted((part % 10).unique().tolist() for part in one) == [[k] for k in range(10)]


def test_random_shards_mix_all_classes_and_those_of_flickr_are_as_in_fedafd():
    for part in Shards(per_client=3).split(1000, balanced(1000, 5), 4, gen()):
        assert (part % 5).bincount(minlength=5).min() > 25
    parts = Shards(per_client=13, total=200).split(29_000, None, 15, gen())
    assert sizes(parts) == [13 * 145] * 15
    assert len(torch.cat(parts).unique()) == 15 * 13 * 145


# ---- Dirichlet


def table(parts: list[Tensor], labels: Tensor) -> Tensor:
    """Class x client counts."""
    return torch.stack([labels[part].bincount(minlength=int(labels.max()) + 1) for part in parts], dim=1)


@pytest.mark.parametrize("alpha", [0.02, 0.1, 0.5, 10])
def test_no_client_exceeds_the_cap_by_more_than_one_share_of_a_class(alpha: float):
    for seed in range(10):
        labels = torch.randint(20, (3000,), generator=gen(seed))
        parts = Dirichlet(alpha=alpha, min_size=1).split(3000, labels, 8, gen(seed))
        for client in table(parts, labels).T:
            # a client gets nothing more once it is at the cap: without its last class it was below
            assert client.sum() - client[int(client.nonzero().max())] < 3000 / 8
        assert torch.equal(torch.cat(parts).sort().values, torch.arange(3000))


def test_every_client_has_the_minimum():
    for seed in range(10):
        assert min(sizes(Dirichlet(alpha=0.1, min_size=60).split(2000, balanced(2000, 10), 10, gen(seed)))) >= 60


@pytest.mark.parametrize(("alpha", "share", "within"), [(1e-3, 1.0, 0.03), (0.5, 0.42, 0.1), (1e6, 0.1, 0.015)])
def test_alpha_goes_from_one_holder_a_class_to_equal_shares(alpha: float, share: float, within: float):
    labels = balanced(8000, 40)
    counts = table(Dirichlet(alpha=alpha, min_size=1).split(8000, labels, 10, gen()), labels)
    assert (counts.max(dim=1).values / counts.sum(dim=1)).mean().item() == pytest.approx(share, abs=within)


def test_shares_of_one_class_are_dirichlet_distributed():
    # with one class the cap never acts: the variance of a share is (1/K)(1 - 1/K) / (K alpha + 1)
    labels = torch.zeros(1000, dtype=torch.int64)
    draws = [Dirichlet(alpha=0.5, min_size=1).split(1000, labels, 4, gen(seed)) for seed in range(800)]
    shares = np.array([[len(part) / 1000 for part in parts] for parts in draws])
    assert shares.mean(axis=0) == pytest.approx(0.25, abs=0.03)
    # redrawing until nobody is empty takes the corners away, so the spread is a little smaller
    assert 0.8 < shares.var(axis=0).mean() / (0.25 * 0.75 / 3) <= 1.02


def patients(n: int, most: int, seed: int) -> torch.Tensor:
    """Group of each of n items: groups of 1 to ``most`` items, in mixed order, with numbers that have gaps."""
    rng = np.random.default_rng(seed)
    sizes = rng.integers(1, most + 1, size=n)
    groups = np.repeat(7 * np.arange(n) - 50, sizes)[:n]
    return torch.from_numpy(rng.permutation(groups))


def majority(labels: list[int]) -> int:
    """Majority by counting: most frequent, the smallest of several."""
    counts = Counter(labels)
    return min(label for label in counts if counts[label] == max(counts.values()))


@pytest.mark.parametrize("name", [*COMPLETE, "natural", "drop"])
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


@pytest.mark.parametrize("name", [*COMPLETE, "natural", "drop"])
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
        assert counts.sum() - counts[int(counts.nonzero().max())] < cap  # one class share above the cap at most
    assert torch.equal(torch.cat(parts).sort().values, torch.arange(2000))


def test_a_minimum_counts_items_not_groups() -> None:
    groups = torch.arange(30) // 10  # three groups of ten
    labels = torch.zeros(30, dtype=torch.int64)
    parts = Dirichlet(alpha=100, min_size=10).split(30, labels, 3, gen(), groups)
    assert [len(part) for part in parts] == [10, 10, 10]
    with pytest.raises(ConfigError, match=r"4 clients but only 3 groups of items; use at most 3 clients"):
        Dirichlet(min_size=1).split(30, labels, 4, gen(), groups)


@pytest.mark.parametrize("large", [40, 60])
def test_quantity_keeps_its_minimum_next_to_a_large_group(large: int) -> None:
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


# ---- natural clients


def test_natural_clients_are_the_largest_classes_and_rare_ones_join_the_smallest() -> None:
    country = torch.tensor([9] * 8 + [4] * 5 + [7] * 3 + [1] * 2 + [2] * 2 + [3])
    result = [sorted(country[part].unique().tolist()) for part in Natural().split(21, country, 3, gen())]
    # 3 + 2 (class 1) = 5; of two clients with 5 the last takes class 2, then client 1 with 5 takes class 3
    assert result == [[9], [3, 4], [1, 2, 7]]


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


def by_hand(shares: list[int], total: int) -> list[int]:
    """Largest remainder with exact fractions."""
    exact = [Fraction(share * total, sum(shares)) for share in shares]
    result = [int(value) for value in exact]
    for _ in range(total - sum(result)):
        k = max(range(len(shares)), key=lambda k: (exact[k] - result[k], -k))
        result[k] += 1
    return result


@given(shares=st.lists(st.integers(0, 50), min_size=1, max_size=6).filter(any), total=st.integers(0, 90))
def test_largest_remainder_is_exact(shares: list[int], total: int) -> None:
    assert largest_remainder(np.array(shares), total).tolist() == by_hand(shares, total)


def singles(labels: list[int]) -> Units:
    return Units(np.ones(len(labels), dtype=np.int64), np.array(labels))


def test_classes_go_where_they_are_held_and_unknown_ones_by_size() -> None:
    labels = [0] * 10 + [1] * 6 + [9] * 8
    held = {0: np.array([30, 0, 10]), 1: np.array([0, 5, 0])}
    parts = partitioned(singles(labels), held, np.array([30, 5, 5]), np.random.default_rng(0), 0)
    counts = [np.bincount(np.array(labels)[part], minlength=10)[[0, 1, 9]].tolist() for part in parts]
    assert counts == [[8, 0, 6], [0, 6, 1], [2, 0, 1]]  # 7.5 / 2.5 and its tie to the first; 6 / 1 / 1
    assert sorted(np.concatenate(parts)) == list(range(24))


@given(seed=st.integers(0, 10_000), clients=st.integers(1, 6), most=st.integers(1, 4))
def test_dealt_parts_are_disjoint_complete_and_large_enough(seed: int, clients: int, most: int) -> None:
    rng = np.random.default_rng(seed)
    groups = np.repeat(np.arange(100), rng.integers(1, most + 1, size=100))
    units, _ = grouped(groups, rng.integers(0, 5, size=len(groups)))
    held = {label: rng.integers(0, 40, size=clients) * (rng.random(clients) < 0.5) for label in range(4)}
    parts = partitioned(units, held, np.maximum(sum(held.values()), 1), rng, 2)
    assert sorted(np.concatenate(parts)) == list(range(len(units)))
    assert all(units.sizes[part].sum() >= 2 for part in parts)


def test_a_client_without_test_items_gets_some_of_classes_that_it_holds() -> None:
    held = {0: np.array([100, 0, 0]), 1: np.array([0, 100, 1])}
    parts = partitioned(singles([0] * 10 + [1] * 10), held, np.array([100, 100, 1]), np.random.default_rng(0), 2)
    assert [len(part) for part in parts] == [9, 9, 2] or [len(part) for part in parts] == [10, 8, 2]
    # the first gift comes from the first of the largest clients, which may hold nothing of class 1
    again = partitioned(singles([0] * 4 + [1] * 10), held, np.array([100, 100, 1]), np.random.default_rng(0), 2)
    assert {int(np.array([0] * 4 + [1] * 10)[unit]) for unit in again[2]} == {1}


def test_a_client_with_one_large_group_does_not_keep_others_from_giving() -> None:
    units = Units(np.array([50] + [1] * 20), np.zeros(21, dtype=np.int64))
    for seed in range(20):
        parts = partitioned(units, {0: np.array([1, 1, 1])}, np.array([1, 1, 1]), np.random.default_rng(seed), 2)
        assert sorted(np.concatenate(parts)) == list(range(21))
        assert min(int(units.sizes[part].sum()) for part in parts) >= 2


def last(spare: Indices, _: int) -> int:
    return int(spare[-1])


def from_the_richest_alone(sizes: list[int], parts: list[list[int]], least: int) -> list[list[int]] | None:
    """Top-up with lists: its last unit that it can spare, to the client with fewest; None: it has none."""
    while min(held := [sum(sizes[unit] for unit in part) for part in parts]) < least:
        rich, short = held.index(max(held)), held.index(min(held))
        spare = [unit for unit in parts[rich] if held[rich] - sizes[unit] >= least]
        if not spare:
            return None
        parts[rich].remove(spare[-1])
        parts[short].append(spare[-1])
    return parts


@given(
    sizes=st.lists(st.integers(1, 6), min_size=1, max_size=30),
    clients=st.integers(1, 5),
    least=st.integers(0, 6),
    seed=st.integers(0, 1000),
)
def test_filling_takes_from_the_richest_as_long_as_it_can(
    sizes: list[int], clients: int, least: int, seed: int
) -> None:
    owner = np.random.default_rng(seed).integers(0, clients, size=len(sizes))
    parts = [np.flatnonzero(owner == client) for client in range(clients)]
    result = [part.tolist() for part in with_least(Units(np.array(sizes)), parts, least, last)]
    expected = from_the_richest_alone(sizes, [part.tolist() for part in parts], least)
    assert expected is None or result == expected
    held = [sum(sizes[unit] for unit in part) for part in result]
    spare = [unit for part, own in zip(result, held, strict=True) for unit in part if own - sizes[unit] >= least]
    assert min(held) >= least or not spare
    assert sorted(unit for part in result for unit in part) == list(range(len(sizes)))


@pytest.mark.parametrize(
    ("test", "count", "sizes"), [(6, 5, r"\[.*[01].*\]"), (5, 5, r"\[.*[01].*\]"), (1, 1, r"\[1\]")]
)
def test_too_few_test_items_are_refused(test: int, count: int, sizes: str) -> None:
    counts = [f"data.sources.scenes.{key}" for key in (f"test={test}", "train=120")]
    experiment = Experiment.load("fedaid-scenes", [*counts, f"clients.hospital.count={count}"])
    message = (
        rf"clients\.hospital\.test is dealt, .* {sizes} items, and each needs 2; lower count, set test: all, or use"
    )
    with pytest.raises(ConfigError, match=message):
        planned_holdings(experiment)


def test_a_refusal_names_the_largest_group_that_stays_together(tmp_path: Path) -> None:
    split = opened(written(tmp_path, note=["p", "p", "p", "p", "p", "q"]))
    group = Experiment.load("fedaid-scenes").clients["hospital"].model_copy(
        update={"count": 2, "source": "s", "test_split": "train", "partition": Iid(together="note")}
    )  # fmt: skip
    deal = Assignment("a", group, 0, lambda *_: split, torch.arange(6))
    with pytest.raises(
        ConfigError, match=r"'s' train .* \[(5, 1|1, 5)\] items.* \(the largest .*, 'note', has 5\); lower"
    ):
        deal.test_items(0)
