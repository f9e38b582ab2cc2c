"""The search of settings: which candidates it tries, where it ends, and what of an experiment can be tuned."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import pytest

from polyfed.core.errors import ConfigError
from polyfed.lab.studies.search import Choice, Kind, Ladders, PatternSearch, Tunable, choice_label
from polyfed.runs.experiment import Experiment
from small_federations import three_kinds

Landscape = Callable[..., float]
NAN = math.nan


def peak(*place: float) -> Landscape:
    """Best at one place, by 1 for every factor of 2 away from it."""
    return lambda *at: -sum(abs(math.log2(own / best)) for own, best in zip(at, place, strict=True))


def rates(*factors: float) -> Kind:
    return Kind({"lr": 0.1}, factors)


def searched(landscape: Landscape, kinds: Mapping[str, Kind], most: int = 9) -> tuple[PatternSearch, list[list[str]]]:
    """A search to its end, and candidates that were due together."""
    search, steps, known = PatternSearch(kinds, most), [], dict[str, float]()

    def figures(choice: Choice) -> float | None:
        return known.get(choice_label(choice))

    while due := search.advance(figures):
        assert search.advance(figures) == due  # to ask changes nothing
        steps.append([", ".join(f"{factor:g}" for factor in choice.values()) for choice in due])
        known |= {choice_label(choice): landscape(*choice.values()) for choice in due}
    return search, steps


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


def test_a_ladder_reports_ends_beyond_which_it_could_go_on() -> None:
    search, steps = searched(peak(64), {"passes": Kind({"epochs": 3}, (1, 2, 4))})
    assert steps == [["1"], ["2"], ["4"]]
    assert (search.best, search.ends) == ({"passes": 4.0}, ["passes"])
    assert searched(peak(0.5), {"passes": Kind({"epochs": 1}, (1, 2))})[0].ends == []  # no pass is less than one
    assert searched(peak(8), {"rate": rates()}, 4)[0].ends == ["rate"]
    assert searched(peak(8), {"rate": rates()}, 6)[0].ends == []


def test_each_kind_has_so_many_candidates_and_is_searched_once() -> None:
    search, steps = searched(peak(16, 0.5), {"a": rates(), "b": rates()}, 5)
    assert steps == [["1, 1"], ["2, 1", "0.5, 1"], ["4, 1"], ["8, 1"], ["8, 2", "8, 0.5"], ["8, 0.25"]]
    assert (search.best, search.ends) == ({"a": 8.0, "b": 0.5}, ["a"])
    ridge = searched(lambda a, b: -abs(math.log2(a) - 2 * math.log2(b)), {"a": rates(), "b": rates()}, 5)[1]
    assert [step[0][0] for step in ridge] == ["1", "2", "1"]  # it does not come back to the first kind


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


def test_a_label_names_what_differs() -> None:
    assert choice_label({"a": 0.5, "b": 1.0, "c": 4.0}) == "a x 0.5, c x 4"
    assert choice_label({"a": 1.0, "b": 1.0}) == "as given" == choice_label({})


# ---- What of an experiment can be tuned, and what it is with other numbers.

LADDERS: Ladders = {
    "clients' rate": (["clients.*.training.optimizer.lr"], ()),
    "server's rate": (["server.training.optimizer.lr", "algorithm.distiller.training.optimizer.lr"], ()),
    "passes": (["algorithm.task.epochs", "algorithm.distiller.epochs", "algorithm.server_epochs"], (1, 2, 4)),
    "weight": (["algorithm.distiller.weight"], ()),
}


def paths(*overrides: str, method: str = "creamfl") -> dict[str, list[str]]:
    tunable = Tunable.of(Experiment.load(three_kinds(name=method), overrides), LADDERS)
    return {name: list(kind.values) for name, kind in tunable.kinds.items()}


def test_a_method_has_the_kinds_of_which_it_has_a_number_that_may_be_another() -> None:
    rates = [f"clients.{group}.training.optimizer.lr" for group in ("image", "text", "paired")]
    own = paths()
    assert own == {
        "clients' rate": rates,
        "server's rate": ["server.training.optimizer.lr"],
        "passes": ["algorithm.task.epochs", "algorithm.distiller.epochs"],
        "weight": ["algorithm.distiller.weight"],
    }
    # passes of a joint task are the distiller's; a weight of 0 stays 0
    assert paths("algorithm.task.order=joint")["passes"] == ["algorithm.distiller.epochs"]
    assert "weight" not in paths("algorithm.distiller.weight=0")
    alone = {"server's rate": own["server's rate"], "passes": ["algorithm.server_epochs"]}
    assert paths("twin.kind=server-only") == alone
    assert paths(method="fedavg") == {"clients' rate": rates}  # whose server averages


def test_a_choice_multiplies_what_there_is_and_nothing_else() -> None:
    own = Experiment.load(three_kinds(name="creamfl"))
    tunable = Tunable.of(own, LADDERS)
    made = tunable.at({"clients' rate": 0.5, "passes": 4.0, "unknown": 2.0})
    for name, group in own.clients.items():
        assert made.clients[name].training.optimizer.lr == group.training.optimizer.lr / 2
    assert made.algorithm.server_passes == 4 * (own.algorithm.server_passes or 0)
    assert tunable.at({}) == own
    assert tunable.accepts({"server's rate": 2.0})
    assert not tunable.accepts({"server's rate": 2.0**20})
    with pytest.raises(ConfigError, match=r"server\.training\.optimizer\.lr"):
        tunable.at({"server's rate": 2.0**20})
