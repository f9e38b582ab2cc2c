import pytest
import torch

from polyfed.core.errors import ConfigError
from polyfed.partitions.by_label import ByLabel
from polyfed.partitions.drop import Drop
from polyfed.partitions.iid import Iid
from polyfed.partitions.quantity import Quantity
from polyfed.partitions.shards import Shards


def gen(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def sizes(parts: list[torch.Tensor]) -> list[int]:
    return [len(part) for part in parts]


def test_iid_sizes_differ_by_at_most_one():
    assert sorted(sizes(Iid().split(11, None, 4, gen()))) == [2, 3, 3, 3]


def test_iid_does_not_follow_the_order_of_the_items():
    parts = Iid().split(1000, None, 2, gen())
    assert parts[0].double().mean() == pytest.approx(499.5, abs=40)


def test_quantity_sizes_spread_with_small_alpha_and_even_out_with_large():
    assert max(sizes(Quantity(alpha=0.1).split(1000, None, 10, gen()))) > 300
    assert set(sizes(Quantity(alpha=1e6).split(1000, None, 10, gen()))) <= {99, 100, 101}


@pytest.mark.parametrize("seed", range(30))
def test_quantity_keeps_the_minimum_even_when_it_takes_all(seed: int):
    assert min(sizes(Quantity(alpha=0.01, min_size=5).split(100, None, 10, gen(seed)))) >= 5
    assert sizes(Quantity(alpha=0.01, min_size=10).split(100, None, 10, gen(seed))) == [10] * 10


def test_quantity_does_not_skew_classes():
    labels = torch.arange(10_000) % 2
    largest = max(Quantity(alpha=0.5).split(10_000, labels, 5, gen()), key=len)
    assert labels[largest].double().mean() == pytest.approx(0.5, abs=0.04)


def test_drop_keeps_between_95_and_99_per_cent_of_equal_parts():
    parts = Drop().split(10_000, None, 8, gen())
    assert all(0.95 * 1250 - 1 <= size <= 0.99 * 1250 for size in sizes(parts))
    assert len(set(sizes(parts))) > 3
    joined = torch.cat(parts)
    assert len(joined.unique()) == len(joined) < 10_000


def test_drop_never_leaves_a_client_empty():
    assert sizes(Drop(keep_least=0.1, keep_most=0.2).split(3, None, 3, gen())) == [1, 1, 1]


def test_drop_refuses_bounds_in_the_wrong_order():
    with pytest.raises(ValueError, match=r"keep_least=0.9 is above keep_most=0.8"):
        Drop(keep_least=0.9, keep_most=0.8)


def test_label_shards_give_few_classes_to_a_client():
    labels = torch.randint(10, (2000,), generator=gen(1))
    for part in Shards(order="label", per_client=2).split(2000, labels, 10, gen()):
        # a shard of a tenth of the set touches two or, rarely, three classes
        assert len(labels[part].unique()) <= 6
    one = Shards(order="label", per_client=1).split(2000, torch.arange(2000) % 10, 10, gen())
    assert sorted(labels_of(part) for part in one) == [[k] for k in range(10)]


def labels_of(part: torch.Tensor) -> list[int]:
    return (part % 10).unique().tolist()


def test_shards_of_flickr_as_in_fedafd():
    parts = Shards(per_client=13, total=200).split(29_000, None, 15, gen())
    assert sizes(parts) == [13 * 145] * 15
    assert len(torch.cat(parts).unique()) == 15 * 13 * 145


def test_random_shards_mix_all_classes():
    labels = torch.arange(1000) % 5
    for part in Shards(per_client=3).split(1000, labels, 4, gen()):
        assert labels[part].bincount(minlength=5).min() > 25


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"per_client": 3, "total": 5}, "total=5, but 2 clients with per_client=3 need 6"),
        ({"per_client": 6}, "12 shards of only 10"),
    ],
)
def test_shards_that_do_not_fit_are_errors(settings: dict[str, int], message: str):
    with pytest.raises(ConfigError, match=message):
        Shards(**settings).split(10, None, 2, gen())


@pytest.mark.parametrize(("clients", "each"), [(5, 2), (10, 3), (3, 10), (7, 4), (10, 1)])
def test_by_label_gives_exactly_so_many_classes_and_leaves_none_out(clients: int, each: int):
    labels = torch.arange(1000) % 10
    parts = ByLabel(classes_per_client=each).split(1000, labels, clients, gen())
    assert all(len(labels[part].unique()) == each for part in parts)
    assert torch.equal(torch.cat(parts).sort().values, torch.arange(1000))


def test_by_label_with_one_class_a_client_follows_the_sites():
    site = torch.tensor([4, 4, 9, 9, 9, 2])
    parts = ByLabel(classes_per_client=1).split(6, site, 3, gen())
    assert sorted(sorted(part.tolist()) for part in parts) == [[0, 1], [2, 3, 4], [5]]


def test_by_label_names_what_would_be_valid():
    with pytest.raises(ConfigError, match=r"classes_per_client=1 with 3 clients and 10 classes; .* between 4 and 10"):
        ByLabel(classes_per_client=1).split(100, torch.arange(100) % 10, 3, gen())


def test_by_label_names_a_class_that_is_too_small():
    labels = torch.tensor([0] + [1] * 9)
    with pytest.raises(ConfigError, match="class 0 has 1 items for 2 clients"):
        ByLabel(classes_per_client=2).split(10, labels, 2, gen())
