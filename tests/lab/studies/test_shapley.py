from __future__ import annotations

import math
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from made_up_cells import made_up
from polyfed import Experiment
from polyfed.core.errors import ConfigError
from polyfed.lab.studies.shapley import (
    Contributions,
    coalitions,
    contributions,
    label_of,
    player_coalitions,
    shapley_values,
)

Utility = dict[frozenset[str], float]
UTILITIES = st.floats(-1e3, 1e3)


@st.composite
def games(draw: st.DrawFn, least: int = 1) -> Utility:
    players = "abcde"[: draw(st.integers(least, 5))]
    return {coalition: draw(UTILITIES) for coalition in coalitions(players)}


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


def test_the_four_coalitions_of_the_paper() -> None:
    utility = {
        frozenset(): 81.08,
        frozenset({"image"}): 84.08,
        frozenset({"text"}): 85.48,
        frozenset({"image", "text"}): 91.96,
    }
    found = shapley_values(utility)
    assert found == pytest.approx({"image": 4.74, "text": 6.14})
    assert math.fsum(found.values()) == pytest.approx(10.88) == pytest.approx(91.96 - 81.08)


@settings(max_examples=20)
@given(games(), UTILITIES)
def test_values_are_means_over_orders_of_joining_linear_and_share_out_the_gain(utility: Utility, more: float) -> None:
    values = shapley_values(utility)
    assert values == pytest.approx(by_orders(utility), abs=1e-8)
    gain = utility[frozenset().union(*utility)] - utility[frozenset()]
    assert math.fsum(values.values()) == pytest.approx(gain, abs=1e-8)
    moved = {coalition: 2 * value + more for coalition, value in utility.items()}
    assert shapley_values(moved) == pytest.approx({player: 2 * value for player, value in values.items()}, abs=1e-8)


@settings(max_examples=20)
@given(games(least=2))
def test_players_who_add_the_same_get_the_same_and_who_adds_nothing_gets_nothing(utility: Utility) -> None:
    alike = {s: utility[frozenset(map({"a": "b", "b": "a"}.get, s, s))] + value for s, value in utility.items()}
    values = shapley_values(alike)
    assert values["a"] == pytest.approx(values["b"], abs=1e-8)
    idle = {s: utility[s - {"a"}] for s in utility}
    assert shapley_values(idle)["a"] == pytest.approx(0, abs=1e-8)


@pytest.mark.parametrize(
    ("utility", "message"),
    [
        ({frozenset("a"): 1.0, frozenset("ab"): 1.0}, r"'none' is missing.*4 coalitions of: a, b"),
        ({frozenset(): 1.0, frozenset("a"): 1.0, frozenset("ab"): 1.0}, "'b' is missing"),
        ({frozenset(): 0.0, frozenset("a"): math.nan}, "'a' is nan"),
        ({}, "'none' is missing.*nobody"),
    ],
)
def test_a_utility_that_is_missing_or_no_number_is_named(utility: Utility, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        shapley_values(utility)


def test_labels_have_players_in_their_order() -> None:
    assert [label_of(c, "ba") for c in coalitions("ba")] == ["none", "b", "a", "b+a"]


def test_coalitions_leave_groups_out_and_keep_the_others(three_groups: dict[str, Any]) -> None:
    assert player_coalitions(Experiment.load(three_groups), ["image", "text"]) == {
        "none": ["paired"],
        "image": ["paired", "image"],
        "text": ["paired", "text"],
        "image+text": ["paired", "image", "text"],
    }


@pytest.mark.parametrize(
    ("players", "message"),
    [
        ([], "players names no group; valid: image, paired"),
        (["images"], "no group 'images' under 'clients'; did you mean 'image'"),
        (["image", "image"], "'image' is named 2 times"),
        (["image", "paired"], "no client is left"),
    ],
)
def test_players_that_cannot_be(tiny: dict[str, Any], players: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        player_coalitions(Experiment.load(tiny), players)


def test_a_group_called_like_nobody(tiny: dict[str, Any]) -> None:
    tiny["clients"]["none"] = tiny["clients"]["image"]
    with pytest.raises(ConfigError, match="rename it"):
        player_coalitions(Experiment.load(tiny), ["none"])


def test_values_of_every_seed_and_their_spread() -> None:
    utilities = {
        "none": {0: 1.0, 7: 2.0},
        "b": {0: 2.0, 7: 2.0},
        "a": {0: 1.0, 7: 2.0},
        "b+a": {0: 5.0, 7: 8.0},
    }
    found = Contributions.of("accuracy", ["b", "a"], utilities)
    assert found.values == {"b": {0: 2.5, 7: 3.0}, "a": {0: 1.5, 7: 3.0}}
    content = found.to_json()
    assert content["values"]["a"] == {
        "mean": 2.25,
        "std": pytest.approx(1.5 / math.sqrt(2)),
        "by_seed": {"0": 1.5, "7": 3.0},
    }
    assert list(content["utilities"]) == ["none", "b", "a", "b+a"]


def test_values_come_from_the_runs_of_every_coalition(
    three_groups: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("polyfed.lab.studies.coalitions.run_study", made_up)
    found = contributions(Experiment.load(three_groups), ["text"], [0, 1], tmp_path / "out")
    assert list(found.utilities) == ["none", "text"]
    gains = {seed: found.utilities["text"][seed] - found.utilities["none"][seed] for seed in (0, 1)}
    assert found.values == {"text": pytest.approx(gains)}
    assert contributions(Experiment.load(three_groups), ["text"], [0, 1], tmp_path / "out") == found
