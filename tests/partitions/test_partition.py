"""What holds for every partition."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from polyfed.core.errors import ConfigError
from polyfed.core.settings import Settings
from polyfed.partitions.partition import Partition

COMPLETE = ["iid", "quantity", "shards", "by_label", "dirichlet"]
WITH_MINIMUM = {"quantity", "dirichlet"}


def make(name: str, **extra: object) -> Partition:
    least = {"min_size": 1} if name in WITH_MINIMUM else {}
    return Partition.model_validate({"name": name, **least, **extra})


def gen(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def balanced(n: int, classes: int) -> torch.Tensor:
    return torch.arange(n) % classes


def test_family_lists_its_members():
    assert set(Partition.available()) == {*COMPLETE, "drop", "natural"}


def test_partition_is_a_setting_by_name():
    class Holder(Settings):
        partition: Partition

    assert Holder.model_validate({"partition": "iid"}).partition.component_name() == "iid"
    chosen = Holder.model_validate({"partition": {"name": "dirichlet", "alpha": 0.1}})
    assert Holder.model_validate(chosen.model_dump()) == chosen


@pytest.mark.parametrize("name", COMPLETE)
@settings(max_examples=25, deadline=None)
@given(n=st.integers(20, 300), clients=st.integers(1, 6), seed=st.integers(0, 1000))
def test_every_item_goes_to_exactly_one_client(name: str, n: int, clients: int, seed: int):
    parts = make(name).split(n, balanced(n, 2), clients, gen(seed))
    assert len(parts) == clients
    assert all(part.dtype == torch.int64 and len(part) > 0 for part in parts)
    assert torch.equal(torch.cat(parts).sort().values, torch.arange(n))


@pytest.mark.parametrize("name", [*COMPLETE, "drop"])
def test_same_generator_state_gives_the_same_parts_and_another_seed_others(name: str):
    labels = balanced(120, 4)
    first, again, other = (make(name).split(120, labels, 4, gen(seed)) for seed in (3, 3, 4))
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert any(not torch.equal(a, b) for a, b in zip(first, other, strict=True))


@pytest.mark.parametrize("name", [*COMPLETE, "drop"])
def test_global_generators_are_left_alone(name: str):
    before = torch.random.get_rng_state()
    make(name).split(60, balanced(60, 3), 3, gen())
    assert torch.equal(before, torch.random.get_rng_state())


@pytest.mark.parametrize("name", [*COMPLETE, "drop"])
def test_items_of_a_client_are_in_random_order(name: str):
    parts = make(name).split(200, balanced(200, 2), 2, gen())
    assert all(not torch.equal(part, part.sort().values) for part in parts)


@pytest.mark.parametrize("name", [*COMPLETE, "drop"])
def test_more_clients_than_items_is_an_error_with_numbers(name: str):
    with pytest.raises(ConfigError, match="5 clients but only 4 items"):
        make(name).split(4, balanced(4, 2), 5, gen())


@pytest.mark.parametrize("name", [*COMPLETE, "drop"])
def test_no_clients_is_an_error(name: str):
    with pytest.raises(ConfigError, match="clients=0"):
        make(name).split(4, balanced(4, 2), 0, gen())


@pytest.mark.parametrize(("name", "extra"), [("dirichlet", {}), ("by_label", {}), ("shards", {"order": "label"})])
def test_missing_labels_are_an_error(name: str, extra: dict[str, object]):
    with pytest.raises(ConfigError, match="needs a label for each item"):
        make(name, **extra).split(100, None, 2, gen())


@pytest.mark.parametrize("name", ["iid", "quantity", "shards", "drop"])
def test_labels_are_not_needed_where_they_do_not_matter(name: str):
    with_labels = make(name).split(100, balanced(100, 5), 4, gen())
    without = make(name).split(100, None, 4, gen())
    assert all(torch.equal(a, b) for a, b in zip(with_labels, without, strict=True))


def test_number_of_labels_must_be_the_number_of_items():
    with pytest.raises(ConfigError, match="9 labels for 10 items"):
        make("iid").split(10, balanced(9, 3), 2, gen())


@pytest.mark.parametrize("name", sorted(WITH_MINIMUM))
def test_a_minimum_that_does_not_fit_is_an_error_with_numbers_and_remedy(name: str):
    with pytest.raises(ConfigError, match=r"min_size=11 for 10 clients needs 110 items, there are 100.*lower"):
        make(name, min_size=11).split(100, balanced(100, 2), 10, gen())
