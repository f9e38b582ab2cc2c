"""Shapley values: how much each group of clients contributes to what all reach together (FedCola, section 6.2)."""

from __future__ import annotations

import math
from collections.abc import Mapping


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
    """
    players = sorted(frozenset().union(*utility))
    n = len(players)
    # |S|! (n - |S| - 1)! / n! is one over n times the number of coalitions of that size among the others
    return {
        player: math.fsum(
            (utility[coalition | {player}] - value) / (n * math.comb(n - 1, len(coalition)))
            for coalition, value in utility.items()
            if player not in coalition
        )
        for player in players
    }
