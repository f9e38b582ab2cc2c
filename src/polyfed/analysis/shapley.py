"""Shapley values: how much each type of client contributes to what all reach together (FedCola, section 6.2)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

from polyfed.analysis.results import spread_json
from polyfed.analysis.series import Found, Told, carry_out, plan, primary_metric, require_groups, without
from polyfed.core.errors import ConfigError
from polyfed.reporting.compare import Spread
from polyfed.runs.experiment import Experiment

NOBODY = "none"
"""Label of the coalition without any player."""


def shapley_values(utility: Mapping[frozenset[str], float]) -> dict[str, float]:
    """Each player's mean marginal contribution over all orders in which the players may join.

        phi_i = sum over S without i of |S|! (n - |S| - 1)! / n! (U(S + i) - U(S))

    (Shapley 1953). With two players it is the mean over the two coalitions that the other one may form, as in
    FedCola, section 6.2. The values sum to U(all) - U(none).

    >>> shapley_values({frozenset(): 0.0, frozenset("a"): 1.0, frozenset("b"): 2.0, frozenset("ab"): 4.0})
    {'a': 1.5, 'b': 2.5}

    Args:
        utility: coalition -> its utility, for all 2^n subsets of the n players that occur in any of them.

    Returns:
        Player -> value, players in alphabetical order.

    Raises:
        ConfigError: a coalition is missing, or its utility is not finite.
    """
    players = sorted(frozenset().union(*utility))
    for coalition in coalitions(players):
        value = utility.get(coalition)
        if value is None or not math.isfinite(value):
            what = "is missing" if value is None else f"is {value}"
            raise ConfigError(
                f"utility of coalition '{label_of(coalition, players)}' {what}; "
                f"give a finite one for each of the {2 ** len(players)} coalitions of: {', '.join(players) or 'nobody'}"
            )
    return {player: _value(player, players, utility) for player in players}


def _value(player: str, players: Sequence[str], utility: Mapping[frozenset[str], float]) -> float:
    others = [other for other in players if other != player]
    return math.fsum(
        (utility[coalition | {player}] - utility[coalition]) / (len(players) * math.comb(len(others), len(coalition)))
        for coalition in coalitions(others)
    )


def coalitions(players: Sequence[str]) -> Iterator[frozenset[str]]:
    """All subsets, the smaller first, and those of one size in the order of ``players``."""
    for size in range(len(players) + 1):
        yield from (frozenset(chosen) for chosen in combinations(players, size))


def label_of(coalition: frozenset[str], players: Sequence[str]) -> str:
    """``image+text``, players in their order; ``none`` without any."""
    return "+".join(player for player in players if player in coalition) or NOBODY


def coalition_experiments(experiment: Experiment, players: Sequence[str]) -> dict[frozenset[str], Experiment]:
    """The experiment of every coalition: groups outside it are left out, groups that are no players stay in all.

    Raises:
        ConfigError: a player is no group of the experiment, or no client would be left in the smallest coalition.
    """
    require_groups(experiment, players, "players")
    if NOBODY in players:
        raise ConfigError(f"group '{NOBODY}' is called like the coalition of nobody; rename it under 'clients'")
    return {
        coalition: without(
            experiment, [name for name in players if name not in coalition], label_of(coalition, players)
        )
        for coalition in coalitions(players)
    }


@dataclass(frozen=True)
class Contributions:
    """What players contribute.

    Attributes:
        metric: name of the utility, the server's primary test metric after the last round.
        players: in the order in which they were named.
        utilities: label of a coalition -> seed -> utility.
        values: player -> seed -> Shapley value.
    """

    metric: str
    players: tuple[str, ...]
    utilities: Found
    values: Found

    @classmethod
    def of(cls, metric: str, players: Sequence[str], utilities: Found) -> Contributions:
        """Shapley values of every seed; utilities have the labels of ``label_of``."""
        sets = {label_of(coalition, players): coalition for coalition in coalitions(players)}
        values: Found = {player: {} for player in players}
        for seed in next(iter(utilities.values())):
            for player, value in shapley_values({sets[k]: by_seed[seed] for k, by_seed in utilities.items()}).items():
                values[player][seed] = value
        return cls(metric, tuple(players), utilities, values)

    @property
    def spreads(self) -> dict[str, Spread]:
        """Player -> mean and standard deviation over seeds."""
        return {player: Spread.of(list(by_seed.values())) for player, by_seed in self.values.items()}

    def to_json(self) -> dict[str, Any]:
        """All of it, with mean and spread over seeds."""
        return {
            "metric": self.metric,
            "players": list(self.players),
            "values": {player: spread_json(by_seed) for player, by_seed in self.values.items()},
            "utilities": {label: spread_json(by_seed) for label, by_seed in self.utilities.items()},
        }


def contributions(
    experiment: Experiment, players: Sequence[str], seeds: Sequence[int], out: Path, told: Told = lambda line: None
) -> Contributions:
    """Run every coalition with every seed below ``out`` (what is complete there is not run again), and divide the gain.

    Args:
        experiment: with all groups.
        players: groups whose contribution is asked for.
        seeds: of the runs; coalitions of one seed share initial weights, data and partitions.
        out: folder; the runs are its subfolders.
        told: is given lines that say how far it is.

    Raises:
        ConfigError, RunError: before any run, if one of them is impossible.
    """
    experiments = coalition_experiments(experiment, players)
    labelled = {label_of(coalition, players): one for coalition, one in experiments.items()}
    utilities = carry_out(plan(labelled, seeds, out), told)
    return Contributions.of(primary_metric(experiment), players, utilities)
