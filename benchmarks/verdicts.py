"""Level and power of the verdicts of studies: figures are drawn, ``judge`` judges them.

    python benchmarks/verdicts.py                      # 2,500 studies a line, three minutes on one core
    python benchmarks/verdicts.py --studies 300

A study has 1, 3 or 10 primary claims (a file may have three), all against one row, so that differences have a
correlation of a half, and 5 to 10 seeds. Effects are means of the differences in their standard deviations. *wrong*:
studies with any verdict where nothing differs; *beside*: with any on claims without effect, where the first has one of
three; then the share of claims that are held by effect. The first two must not be above the level of 0.05 by more than
three standard errors.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Sequence

import harness
import numpy as np
from numpy.typing import NDArray

from polyfed.lab.studies.claims import Claim, Judgement, judge
from polyfed.reporting.statistics import PairedSample

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


if __name__ == "__main__":
    main()
