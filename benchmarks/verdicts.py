"""Level and power of the verdicts of studies: figures are drawn, ``judge`` judges them.

    python benchmarks/verdicts.py                      # 2,500 studies a line, ten minutes on one core
    python benchmarks/verdicts.py --studies 300

A study has 1, 3 or 10 judged claims (a file may have three), all against one row, so that differences have a
correlation of a half, and 5 to 10 seeds. Effects are means of the differences in their standard deviations. *wrong*:
studies with any verdict where nothing differs; *beside*: with any on claims without effect, where the first has one of
three; then the share of claims that are held by effect. The first two must not be above the level of 0.05 by more than
three standard errors.

Then tuning and verdict together: a method that equals its baseline, both tuned alike on three seeds of their own by
noisy figures (standard deviation 1, of which a share is the seed's and the same for all), is compared with it on five
others. The figure falls by a curvature times the squared distance in doublings from an optimum that is as many
doublings from the default as is said. *level*: any verdict with what the losing
row is allowed, *alone*: without.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Sequence
from itertools import product

import harness
import numpy as np
from numpy.typing import NDArray

from polyfed.lab.studies.cells import Chosen
from polyfed.lab.studies.claims import Allowance, Claim, Judgement, judge
from polyfed.reporting.statistics import PairedSample
from polyfed.runs.tuning import Choice, Kind, PatternSearch, choice_label

LEVEL, EFFECTS = 0.05, (0.5, 1.0, 2.0, 3.0)
CLAIMS = (1, 3, 10)
SEEDS = (5, 6, 8, 10)
CLAIM = Claim.parse("a > b on c")


def verdicts(effects: Sequence[float], seeds: int, draw: np.random.Generator) -> list[Judgement]:
    """Of one study."""
    figures = draw.normal(0, math.sqrt(0.5), (len(effects) + 1, seeds))  # the last row is what all are compared with
    differences = figures[:-1] - figures[-1] + np.array(effects)[:, None]
    samples = [PairedSample(dict(enumerate(row.tolist()))) for row in differences]
    return judge([CLAIM] * len(effects), samples, range(seeds))


def line(claims: int, seeds: int, studies: int, seed: int = 0) -> dict[str, float]:
    """Figures of one kind of study."""
    draw = np.random.default_rng(seed)
    found = {"wrong": _any(verdicts([0.0] * claims, seeds, draw) for _ in range(studies))}
    if claims > 1:
        found["beside"] = _any(verdicts([3.0] + [0.0] * (claims - 1), seeds, draw)[1:] for _ in range(studies))
    for effect in EFFECTS:
        judged = [item for _ in range(studies // claims + 1) for item in verdicts([effect] * claims, seeds, draw)]
        found[f"held at {effect:g}"] = float(np.mean([item.verdict == "held" for item in judged]))
    return found


def _any(studies: Iterator[Sequence[Judgement]]) -> float:
    decided: NDArray[np.bool_] = np.array([any(item.verdict != "open" for item in judged) for judged in studies])
    return float(decided.mean())


OPTIMA = (
    (0.0, 0.0),
    (0.25, 0.0),
    (1.0, 0.0),
    (1.0, 1.0),
    (0.5, 1.0),
    (2.0, 1.0),
    (0.25, 2.0),
    (0.25, 3.0),
    (0.1, 3.0),
    (0.25, 4.0),
    (0.1, 5.0),
    (0.02, 8.0),
)
"""Curvature, and doublings from the default to the optimum."""
SHARES = (0.0, 0.5, 0.9)
MOST = 25


def searched(curvature: float, optimum: float, share: float, draw: np.random.Generator) -> list[Chosen]:
    """What two equal rows choose."""
    shared, chosen = draw.normal(0, math.sqrt(share), 3), []
    for _ in range(2):
        search = PatternSearch({"rate": Kind({"lr": 0.1})}, MOST, seeds=3)

        def figures(choice: Choice, search: PatternSearch = search) -> list[float]:
            mean = _figure(choice, curvature, optimum)
            values = (mean + shared + draw.normal(0, math.sqrt(1 - share), 3)).tolist()
            return values[:1] if search.scores and search.is_hopeless(values[0]) else values

        search.advance(figures)
        scores = {choice_label(choice): values for choice, values in search.scores}
        chosen.append(Chosen(search.chosen, {}, scores, search.ends))
    return chosen


def _figure(choice: Choice, curvature: float, optimum: float) -> float:
    return -curvature * (math.log2(choice["rate"]) - optimum) ** 2


def tuned_level(curvature: float, optimum: float, share: float, studies: int, seeds: int = 5) -> dict[str, float]:
    """Share of studies of two equal rows with a verdict, and cells that a search took."""
    draw, level, alone, cells = np.random.default_rng(0), 0, 0, 0
    for _ in range(studies):
        left, right = searched(curvature, optimum, share, draw)
        cells += sum(map(len, left.scores.values()))
        noise = draw.normal(0, math.sqrt(1 - share), (2, seeds))
        means = [_figure(row.factors, curvature, optimum) for row in (left, right)]
        sample = PairedSample(dict(enumerate((noise[0] - noise[1] + means[0] - means[1]).tolist())))
        loser, winner = (right, left) if sample.mean > 0 else (left, right)
        allowed = Allowance(loser.slack() + loser.missed(winner), loser.doubt)
        (item,), (bare,) = (judge([CLAIM], [sample], range(seeds), own) for own in ([allowed], None))
        level += item.verdict != "open" and not loser.ends
        alone += bare.verdict != "open"
    return {"level": level / studies, "alone": alone / studies, "cells": cells / studies}


def main() -> None:
    """Print a line a kind of study."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--studies", type=int, default=2500, help="a line")
    studies = parser.parse_args().studies
    limit = LEVEL + 3 * math.sqrt(LEVEL * (1 - LEVEL) / studies)
    for claims in CLAIMS:
        for seeds in SEEDS:
            found = line(claims, seeds, studies)
            worst = max(found["wrong"], found.get("beside", 0.0))
            name = f"verdicts of {claims} claims, {seeds} seeds"
            harness.report(name, ratio=worst, against="the level of 0.05", limit=limit, **found)
    for (curvature, optimum), share in product(OPTIMA, SHARES):
        found = tuned_level(curvature, optimum, share, studies)
        name = f"tuned alike: curvature {curvature:g}, optimum at {optimum:g} doublings, {share:g} of the noise shared"
        harness.report(name, ratio=found["level"], against="the level of 0.05", limit=limit, **found)


if __name__ == "__main__":
    main()
