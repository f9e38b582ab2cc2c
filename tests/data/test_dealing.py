from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polyfed.data.dealing import dealt, largest_remainder
from polyfed.data.units import Units, grouped


def by_hand(shares: list[int], total: int) -> list[int]:
    """Largest remainder with exact fractions."""
    exact = [Fraction(share * total, sum(shares)) for share in shares]
    found = [int(value) for value in exact]
    for _ in range(total - sum(found)):
        k = max(range(len(shares)), key=lambda k: (exact[k] - found[k], -k))
        found[k] += 1
    return found


@settings(max_examples=200, deadline=None)
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


@settings(max_examples=40, deadline=None)
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


@pytest.mark.parametrize("seed", [0, 1])
def test_the_stream_alone_decides(seed: int) -> None:
    def parts(number: int) -> list[list[int]]:
        rng = np.random.default_rng(number)
        found = dealt(singles([0] * 30), {0: np.array([1, 2])}, np.array([1, 2]), rng, 2)
        return [sorted(part.tolist()) for part in found]

    assert parts(seed) == parts(seed) != parts(seed + 2)
