from __future__ import annotations

from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from item_tables import opened, written
from polyfed.core.errors import ConfigError
from polyfed.federation.membership import Assignment
from polyfed.lab.analysis.partitions import planned_holdings
from polyfed.partitions.partition import Indices, Units, dealt, filled, grouped, largest_remainder
from polyfed.partitions.rules import Iid
from polyfed.runs.experiment import Experiment


def by_hand(shares: list[int], total: int) -> list[int]:
    """Largest remainder with exact fractions."""
    exact = [Fraction(share * total, sum(shares)) for share in shares]
    found = [int(value) for value in exact]
    for _ in range(total - sum(found)):
        k = max(range(len(shares)), key=lambda k: (exact[k] - found[k], -k))
        found[k] += 1
    return found


@given(shares=st.lists(st.integers(0, 50), min_size=1, max_size=6).filter(any), total=st.integers(0, 90))
def test_largest_remainder_is_exact(shares: list[int], total: int) -> None:
    assert largest_remainder(np.array(shares), total).tolist() == by_hand(shares, total)


def singles(labels: list[int]) -> Units:
    return Units(np.ones(len(labels), dtype=np.int64), np.array(labels))


def test_classes_go_where_they_are_held_and_unknown_ones_by_size() -> None:
    labels = [0] * 10 + [1] * 6 + [9] * 8
    held = {0: np.array([30, 0, 10]), 1: np.array([0, 5, 0])}
    parts = dealt(singles(labels), held, np.array([30, 5, 5]), np.random.default_rng(0), 0)
    counts = [np.bincount(np.array(labels)[part], minlength=10)[[0, 1, 9]].tolist() for part in parts]
    assert counts == [[8, 0, 6], [0, 6, 1], [2, 0, 1]]  # 7.5 / 2.5 and its tie to the first; 6 / 1 / 1
    assert sorted(np.concatenate(parts)) == list(range(24))


@given(seed=st.integers(0, 10_000), clients=st.integers(1, 6), most=st.integers(1, 4))
def test_dealt_parts_are_disjoint_complete_and_large_enough(seed: int, clients: int, most: int) -> None:
    rng = np.random.default_rng(seed)
    groups = np.repeat(np.arange(100), rng.integers(1, most + 1, size=100))
    units, _ = grouped(groups, rng.integers(0, 5, size=len(groups)))
    held = {label: rng.integers(0, 40, size=clients) * (rng.random(clients) < 0.5) for label in range(4)}
    sizes = np.maximum(sum(held.values()), 1)
    parts = dealt(units, held, sizes, rng, 2)
    assert sorted(np.concatenate(parts)) == list(range(len(units)))
    assert all(units.sizes[part].sum() >= 2 for part in parts)


def test_a_client_without_test_items_gets_some_of_classes_that_it_holds() -> None:
    labels = [0] * 10 + [1] * 10
    held = {0: np.array([100, 0, 0]), 1: np.array([0, 100, 1])}
    parts = dealt(singles(labels), held, np.array([100, 100, 1]), np.random.default_rng(0), 2)
    assert [len(part) for part in parts] == [9, 9, 2] or [len(part) for part in parts] == [10, 8, 2]
    # the first gift comes from the first of the largest clients, which may hold nothing of class 1
    again = dealt(singles([0] * 4 + [1] * 10), held, np.array([100, 100, 1]), np.random.default_rng(0), 2)
    assert {int(np.array([0] * 4 + [1] * 10)[unit]) for unit in again[2]} == {1}


def test_too_few_items_are_left_as_they_are() -> None:
    parts = dealt(singles([0, 0, 0]), {0: np.array([1, 1])}, np.array([1, 1]), np.random.default_rng(0), 2)
    assert sorted(len(part) for part in parts) == [1, 2]


def test_a_client_with_one_large_group_does_not_keep_others_from_giving() -> None:
    units = Units(np.array([50] + [1] * 20), np.zeros(21, dtype=np.int64))
    for seed in range(20):
        parts = dealt(units, {0: np.array([1, 1, 1])}, np.array([1, 1, 1]), np.random.default_rng(seed), 2)
        assert sorted(np.concatenate(parts)) == list(range(21))
        assert min(int(units.sizes[part].sum()) for part in parts) >= 2


def last(spare: Indices, _: int) -> int:
    return int(spare[-1])


def from_the_richest_alone(sizes: list[int], parts: list[list[int]], least: int) -> list[list[int]] | None:
    """By lists: its last unit that it can spare, to the client with fewest; None: it has none."""
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
    found = [part.tolist() for part in filled(Units(np.array(sizes)), parts, least, last)]
    expected = from_the_richest_alone(sizes, [part.tolist() for part in parts], least)
    assert expected is None or found == expected
    held = [sum(sizes[unit] for unit in part) for part in found]
    spare = [unit for part, own in zip(found, held, strict=True) for unit in part if own - sizes[unit] >= least]
    assert min(held) >= least or not spare
    assert sorted(unit for part in found for unit in part) == list(range(len(sizes)))


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
    deal = Assignment("a", group, 0, lambda *_: split, lambda: torch.arange(6))
    with pytest.raises(
        ConfigError, match=r"'s' train .* \[(5, 1|1, 5)\] items.* \(the largest .*, 'note', has 5\); lower"
    ):
        deal.test_items(0)


@pytest.mark.parametrize("seed", [0, 1])
def test_the_stream_alone_decides(seed: int) -> None:
    def parts(number: int) -> list[list[int]]:
        rng = np.random.default_rng(number)
        found = dealt(singles([0] * 30), {0: np.array([1, 2])}, np.array([1, 2]), rng, 2)
        return [sorted(part.tolist()) for part in found]

    assert parts(seed) == parts(seed) != parts(seed + 2)
