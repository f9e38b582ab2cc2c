"""Shapley values: how much each type of client contributes to what all reach together (FedCola, section 6.2)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, combinations
from pathlib import Path
from typing import TYPE_CHECKING, Any

from polyfed.core.errors import ConfigError
from polyfed.lab.analysis.drawing import whiskers
from polyfed.lab.studies.coalitions import (
    BySeed,
    by_seed_json,
    coalition_study,
    final_values,
    others,
    primary_metric,
    require_groups,
    spreads_of,
)
from polyfed.lab.studies.runner import OnProgress
from polyfed.reporting.figures import COLOURS, GREY, figure_grid, styled
from polyfed.reporting.tables import TextTable, figure
from polyfed.runs.experiment import Experiment

if TYPE_CHECKING:
    from matplotlib.figure import Figure

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
            wrong = "is missing" if value is None else f"is {value}"
            raise ConfigError(
                f"utility of coalition '{label_of(coalition, players)}' {wrong}; give a finite one for each of the "
                f"{2 ** len(players)} coalitions of: {', '.join(players) or 'nobody'}"
            )
    n = len(players)
    # |S|! (n - |S| - 1)! / n! is one over n times the number of coalitions of that size among the others
    return {
        player: math.fsum(
            (utility[coalition | {player}] - utility[coalition]) / (n * math.comb(n - 1, len(coalition)))
            for coalition in coalitions(players)
            if player not in coalition
        )
        for player in players
    }


def coalitions(players: Sequence[str]) -> Iterator[frozenset[str]]:
    """All subsets, the smaller first, and those of one size in the order of ``players``."""
    sizes = range(len(players) + 1)
    return map(frozenset, chain.from_iterable(combinations(players, size) for size in sizes))


def label_of(coalition: frozenset[str], players: Sequence[str]) -> str:
    """``image+text``, players in their order; ``none`` without any."""
    return "+".join(player for player in players if player in coalition) or NOBODY


def player_coalitions(experiment: Experiment, players: Sequence[str]) -> dict[str, list[str]]:
    """Label of a coalition -> the groups that take part; those that are no players are in all.

    Raises:
        ConfigError: a player is no group of the experiment, or no client would be left in the smallest coalition.
    """
    require_groups(experiment, players, "players")
    if NOBODY in players:
        raise ConfigError(f"group '{NOBODY}' is called like the coalition of nobody; rename it under 'clients'")
    labels = {label_of(coalition, players): coalition for coalition in coalitions(players)}
    return {
        label: others(experiment, [name for name in players if name not in coalition])
        for label, coalition in labels.items()
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
    utilities: BySeed
    values: BySeed

    @classmethod
    def of(cls, metric: str, players: Sequence[str], utilities: BySeed) -> Contributions:
        """Shapley values of every seed; utilities have the labels of ``label_of``."""
        sets = {label_of(coalition, players): coalition for coalition in coalitions(players)}
        values: BySeed = {player: {} for player in players}
        for seed in next(iter(utilities.values())):
            of_seed = {sets[label]: by_seed[seed] for label, by_seed in utilities.items()}
            for player, value in shapley_values(of_seed).items():
                values[player][seed] = value
        return cls(metric, tuple(players), utilities, values)

    def to_json(self) -> dict[str, Any]:
        values, utilities = by_seed_json(self.values), by_seed_json(self.utilities)
        return {"metric": self.metric, "players": self.players, "values": values, "utilities": utilities}


def contributions(
    experiment: Experiment,
    players: Sequence[str],
    seeds: Sequence[int],
    out: Path,
    listener: OnProgress = lambda progress: None,
) -> Contributions:
    """Run every coalition with every seed, as the study in ``out``, and divide the gain.

    Args:
        experiment: with all groups.
        players: groups whose contribution is asked for.
        seeds: of the runs; coalitions of one seed share initial weights, data and partitions.
        out: folder of the study; its runs are cells beside it, shared with other studies there.
        listener: is told of progress.

    Raises:
        ConfigError, DataError: before any run, if one of them is impossible.
        RunError: a run failed.
    """
    study = coalition_study(experiment, player_coalitions(experiment, players), seeds, "coalitions of clients")
    utilities = final_values(study, out, listener)
    return Contributions.of(primary_metric(experiment), players, utilities)


def shapley_tables(contributed: Contributions) -> list[TextTable]:
    """Utilities, and the values that come from them."""
    seeds = len(next(iter(contributed.utilities.values())))
    note = f"Mean over {seeds} seed{'s' * (seeds > 1)}{' ± standard deviation' * (seeds > 1)}."
    utilities, values = (
        [(label, str(spread)) for label, spread in spreads_of(by_seed).items()]
        for by_seed in (contributed.utilities, contributed.values)
    )
    metric, exact = contributed.metric, "They sum to all - none."
    return [
        TextTable("Utility of each coalition", ("clients that take part", metric), utilities, (note,)),
        TextTable("Shapley values", ("client type", f"share of {metric}"), values, (exact,)),
    ]


@styled
def draw_shapley(contributed: Contributions) -> Figure:
    """Left the Shapley values, right the utility of every coalition; whiskers: standard deviation over seeds."""
    metric = contributed.metric
    drawing, both = figure_grid(1, 2, title=f"Who contributes to {metric}")
    panels = (
        ("Shapley value", f"share of the gain in {metric}", contributed.values, COLOURS[0]),
        ("with these clients", metric, contributed.utilities, GREY),
    )
    for axes, (title, label, by_seed, colour) in zip(both, panels, strict=True):
        spreads = spreads_of(by_seed)
        bars, means = list(spreads.values()), [spread.mean for spread in spreads.values()]
        axes.bar(range(len(bars)), means, yerr=whiskers(bars), color=colour, capsize=4, width=0.6)
        axes.axhline(0, color="black", linewidth=0.8)
        for place, mean in enumerate(means):
            axes.annotate(figure(mean), (place, mean), (12, 3), textcoords="offset points", fontsize=8)
        axes.set_xticks(range(len(bars)), list(spreads))
        axes.tick_params(axis="x", rotation=20)
        axes.set(title=title, ylabel=label)
    return drawing
