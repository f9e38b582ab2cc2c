"""Pattern search on ladders that were worked by hand."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import pytest

from polyfed.runs.tuning import Choice, Kind, PatternSearch, choice_label

NAN = math.nan
Landscape = Callable[..., float]


def rates(*factors: float) -> Kind:
    return Kind({"lr": 0.1}, factors)


def searched(landscape: Landscape, kinds: Mapping[str, Kind], most: int = 9) -> tuple[PatternSearch, list[list[str]]]:
    """A search to its end, and what was due together."""
    search, steps, known = PatternSearch(kinds, most), [], dict[str, float]()

    def score(choice: Choice) -> float | None:
        return known.get(choice_label(choice))

    while due := search.advance(score):
        assert search.advance(score) == due  # to ask changes nothing
        steps.append([", ".join(f"{factor:g}" for factor in choice.values()) for choice in due])
        known |= {choice_label(choice): landscape(*choice.values()) for choice in due}
    return search, steps


def peak(*place: float) -> Landscape:
    """Best at one place, by 1 for every factor of 2 away from it."""
    return lambda *at: -sum(abs(math.log2(own / best)) for own, best in zip(at, place, strict=True))


@pytest.mark.parametrize(
    ("landscape", "most", "steps"),
    [
        (peak(1), 9, [["1"], ["2", "0.5"]]),
        (peak(8), 9, [["1"], ["2", "0.5"], ["4"], ["8"], ["16"]]),
        (peak(0.25), 9, [["1"], ["2", "0.5"], ["0.25"], ["0.125"]]),
        (peak(1024), 5, [["1"], ["2", "0.5"], ["4"], ["8"]]),
        (peak(8), 2, [["1"], ["2"]]),
        (peak(8), 1, [["1"]]),
    ],
)
def test_one_kind_is_followed_while_it_rises(landscape: Landscape, most: int, steps: list[list[str]]) -> None:
    assert searched(landscape, {"rate": rates()}, most)[1] == steps


def test_kind_by_kind_and_again_until_nothing_beside_the_best_is_untried() -> None:
    search, steps = searched(peak(2, 0.5), {"a": rates(), "b": rates()}, 99)
    assert steps == [["1, 1"], ["2, 1", "0.5, 1"], ["4, 1"], ["2, 2", "2, 0.5"], ["2, 0.25"], ["4, 0.5", "1, 0.5"]]
    assert (search.best, search.is_surrounded) == ({"a": 2.0, "b": 0.5}, True)


@pytest.mark.parametrize("place", [(2.0, 1.0), (0.5, 2.0), (1.0, 4.0)])
def test_nine_candidates_find_what_is_near(place: tuple[float, float]) -> None:
    search, _ = searched(peak(*place), {"rate": rates(), "passes": Kind({"epochs": 4}, (1, 2, 4))})
    assert tuple(search.best.values()) == place


def test_a_ridge_across_two_kinds_is_climbed_in_a_second_sweep() -> None:
    def ridge(a: float, b: float) -> float:
        a, b = math.log2(a), math.log2(b)
        return -((a - b) ** 2) / 2 + a + b - (a + b) ** 2 / 16

    search, _ = searched(ridge, {"a": rates(), "b": rates()}, 30)
    assert search.is_surrounded
    assert search.best == {"a": 4.0, "b": 4.0}


def test_a_ladder_ends_at_its_ends() -> None:
    search, steps = searched(peak(64), {"passes": Kind({"epochs": 3}, (1, 2, 4))})
    assert steps == [["1"], ["2"], ["4"]]
    assert (search.best, search.is_surrounded) == ({"passes": 4.0}, True)


def test_whole_numbers_stay_whole_and_at_least_one() -> None:
    kind = Kind({"epochs": 3})
    assert [kind.at(factor) for factor in (4.0, 0.5, 0.25, 0.125)] == [{"epochs": n} for n in (12, 2, 1, 1)]
    assert kind.beside(0.25) == [0.5]  # an eighth is one epoch too
    assert Kind({"epochs": 1}).beside(1.0) == [2.0]
    assert Kind({"lr": 0.0002}).at(3.0) == {"lr": 0.0006}


@pytest.mark.parametrize(
    ("landscape", "best"),
    [
        (lambda a: 7.0, 1.0),
        (lambda a: {1: 0.0, 2: 5.0, 4: 5.0, 8: 1.0}.get(a, -1.0), 2.0),
        (lambda a: {0.5: NAN, 1: NAN, 2: 1.0, 4: NAN}[a], 2.0),
        (lambda a: NAN if a > 1 else -a, 0.5**7),
    ],
)
def test_of_equals_the_nearest_and_what_failed_comes_last(landscape: Landscape, best: float) -> None:
    assert searched(landscape, {"a": rates()})[0].best == {"a": best}


def test_where_nothing_has_a_score_nothing_is_chosen() -> None:
    search, steps = searched(lambda a: NAN, {"a": rates()})
    assert steps == [["1"], ["2", "0.5"]]
    with pytest.raises(LookupError, match="no candidate has a figure"):
        _ = search.best


def test_what_is_not_accepted_is_no_neighbour() -> None:
    search = PatternSearch({"a": rates()}, 9, lambda choice: choice["a"] < 2)
    assert search.advance(lambda choice: 0.0 if choice["a"] == 1 else None) == [{"a": 0.5}]


@pytest.mark.parametrize(
    ("choice", "label"),
    [({"a": 1.0, "b": 1.0}, "as given"), ({"a": 0.5, "b": 1.0, "c": 4.0}, "a x 0.5, c x 4"), ({}, "as given")],
)
def test_a_label_names_what_differs(choice: Choice, label: str) -> None:
    assert choice_label(choice) == label
