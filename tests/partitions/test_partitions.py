"""Partitions of single items: what holds for all, and for each kind."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from polyfed.core.errors import ConfigError
from polyfed.core.settings import Settings
from polyfed.partitions.partition import Partition
from polyfed.partitions.rules import Dirichlet, Drop, Iid, Quantity, Shards

COMPLETE = ["iid", "quantity", "shards", "dirichlet"]
every = pytest.mark.parametrize("name", [*COMPLETE, "drop"])


def make(name: str, **extra: object) -> Partition:
    least = {"min_size": 1} if name in ("quantity", "dirichlet") else {}
    return Partition.model_validate({"name": name, **least, **extra})


def gen(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def sizes(parts: list[Tensor]) -> list[int]:
    return [len(part) for part in parts]


def balanced(n: int, classes: int) -> Tensor:
    return torch.arange(n) % classes


def test_partition_is_a_setting_by_name():
    class Holder(Settings):
        partition: Partition

    assert set(Partition.available()) == {*COMPLETE, "drop", "natural"}
    assert Holder.model_validate({"partition": "iid"}).partition.component_name() == "iid"
    chosen = Holder.model_validate({"partition": {"name": "dirichlet", "alpha": 0.1}})
    assert Holder.model_validate(chosen.model_dump()) == chosen


@pytest.mark.parametrize("name", COMPLETE)
@settings(max_examples=15, deadline=None)
@given(n=st.integers(20, 300), clients=st.integers(1, 6), seed=st.integers(0, 1000))
def test_every_item_goes_to_exactly_one_client(name: str, n: int, clients: int, seed: int):
    parts = make(name).split(n, balanced(n, 2), clients, gen(seed))
    assert len(parts) == clients
    assert all(part.dtype == torch.int64 and len(part) > 0 for part in parts)
    assert torch.equal(torch.cat(parts).sort().values, torch.arange(n))


@every
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
        (Dirichlet(alpha=1e-3, attempts=50), 400, balanced(400, 2), 10,
         r"alpha=0.001, 10 clients and 2 classes .* 50 draws, min_size=10; raise alpha"),
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
        parts = Dirichlet(alpha=0.1, min_size=60).split(2000, balanced(2000, 10), 10, gen(seed))
        assert min(sizes(parts)) >= 60


@pytest.mark.parametrize(("alpha", "share", "within"), [(1e-3, 1.0, 0.03), (0.5, 0.42, 0.1), (1e6, 0.1, 0.015)])
def test_alpha_goes_from_one_holder_a_class_to_equal_shares(alpha: float, share: float, within: float):
    labels = balanced(8000, 40)
    counts = table(Dirichlet(alpha=alpha, min_size=1).split(8000, labels, 10, gen()), labels)
    largest = (counts.max(dim=1).values / counts.sum(dim=1)).mean().item()
    assert largest == pytest.approx(share, abs=within)


def test_shares_of_one_class_are_dirichlet_distributed():
    # with one class the cap never acts: the variance of a share is (1/K)(1 - 1/K) / (K alpha + 1)
    labels = torch.zeros(1000, dtype=torch.int64)
    draws = [Dirichlet(alpha=0.5, min_size=1).split(1000, labels, 4, gen(seed)) for seed in range(800)]
    shares = np.array([[len(part) / 1000 for part in parts] for parts in draws])
    assert shares.mean(axis=0) == pytest.approx(0.25, abs=0.03)
    # redrawing until nobody is empty takes the corners away, so the spread is a little smaller
    assert 0.8 < shares.var(axis=0).mean() / (0.25 * 0.75 / 3) <= 1.02
