from __future__ import annotations

import math
from collections.abc import Callable
from itertools import chain, combinations, permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polyfed.lab.studies.results import Results, shapley_values
from polyfed.lab.studies.study import Study
from polyfed.lab.studies.tables import study_tables

Utility = dict[frozenset[str], float]
UTILITIES = st.floats(-1e3, 1e3)


@st.composite
def games(draw: st.DrawFn) -> Utility:
    players = "abcde"[: draw(st.integers(1, 5))]
    subsets = chain.from_iterable(combinations(players, size) for size in range(len(players) + 1))
    return {frozenset(subset): draw(UTILITIES) for subset in subsets}


def by_orders(utility: Utility) -> dict[str, float]:
    """The definition: the mean, over all orders of joining, of what a player adds when it joins."""
    players = sorted(frozenset().union(*utility))
    orders = list(permutations(players))
    added = dict.fromkeys(players, 0.0)
    for order in orders:
        for place, player in enumerate(order):
            before = frozenset(order[:place])
            added[player] += utility[before | {player}] - utility[before]
    return {player: value / len(orders) for player, value in added.items()}


@given(games(), UTILITIES)
def test_values_are_means_over_orders_of_joining_linear_and_share_out_the_gain(utility: Utility, more: float) -> None:
    values = shapley_values(utility)
    assert values == pytest.approx(by_orders(utility), abs=1e-8)
    gain = utility[frozenset().union(*utility)] - utility[frozenset()]
    assert math.fsum(values.values()) == pytest.approx(gain, abs=1e-8)
    moved = {coalition: 2 * value + more for coalition, value in utility.items()}
    assert shapley_values(moved) == pytest.approx({player: 2 * value for player, value in values.items()}, abs=1e-8)


ROWS = {"none": {"groups": ["paired"]}, "a": {"groups": ["paired", "a"]}, "b": {"groups": ["b", "paired"]}, "all": {}}


def test_a_study_of_all_coalitions_divides_gains_by_seed(loaded: Callable[..., Study]) -> None:
    study = loaded(rows={**ROWS, "all, prox": {"set": {"algorithm": "fedprox"}}}, seeds=3, against="none")
    own = {"none": {0: 1.0, 1: 2.0, 2: 0.0}, "b": {0: 2.0, 1: 2.0}, "a": {0: 1.0, 1: 2.0}, "all": {0: 5.0, 1: 8.0}}
    results = Results(study, {(row, (), "r1"): by_seed for row, by_seed in own.items()})
    assert results.shapley((), "r1") == {"b": {0: 2.5, 1: 3.0}, "a": {0: 1.5, 1: 3.0}}
    table = next(table for table in study_tables(results) if "Shapley" in table.title)
    assert table.rows == [["a", "2.25 ± 1.06"], ["b", "2.75 ± 0.35"]]
    assert table.notes == ("They sum to all - none.",)


@pytest.mark.parametrize("left_out", ROWS)
def test_rows_that_are_not_all_coalitions_have_no_values(loaded: Callable[..., Study], left_out: str) -> None:
    rows = {name: row for name, row in ROWS.items() if name != left_out}
    assert loaded(rows=rows, against=next(iter(rows))).coalitions == {}
    assert loaded().coalitions == {}
