"""What a study has found so far: figures by row, point, column and seed, what was chosen, and what failed."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean, variance
from typing import Any

import yaml

from polyfed.core.errors import RunError
from polyfed.core.files import require_plain, write_atomically
from polyfed.core.settings import parse_settings
from polyfed.core.untrusted import code_of, file_json, yaml_content
from polyfed.lab.studies.cells import Cell, CellFigures, Chosen, StudyPlan
from polyfed.lab.studies.claims import ALL, FEWEST_TUNING_SEEDS, Allowance, Claim, Judgement, Side, judge
from polyfed.lab.studies.curves import Curve, curve_json, curve_of, validation_curve
from polyfed.lab.studies.study import Point, Study, point_label
from polyfed.reporting.compare import Spread
from polyfed.reporting.statistics import PairedSample, PairedSpreads, Sample


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


STUDY, RESULTS = "study.yaml", "results.json"
SeedFigures = Mapping[int, float]
Place = tuple[str, Point, str]
"""Row, point and column."""


@dataclass(frozen=True)
class Results:
    """Figures of a study.

    Attributes:
        study: whose.
        values: place -> seed -> figure; seeds without a figure are left out.
        chosen: (row, point) -> what tuning chose.
        causes: place or cell in words -> why it has no figure.
        cells: label of every final cell that is complete -> its folder's name.
        code: versions and states of the code that ran them; a table should have one.
        replies: row -> how many were clipped, and excluded, over all its cells.
        curves: (row, point) -> round -> validation over seeds, where somebody validates.
        generations: of figures, of the code that ran them; 0 of cells that ran before there were generations.
        settings: row with its point in words -> ``Cell.settings_digest``.
    """

    study: Study
    values: Mapping[Place, SeedFigures]
    chosen: Mapping[tuple[str, Point], Chosen] = field(default_factory=dict)
    causes: Mapping[str, str] = field(default_factory=dict)
    cells: Mapping[str, str] = field(default_factory=dict)
    code: Sequence[str] = ()
    replies: Mapping[str, Sequence[int]] = field(default_factory=dict)
    curves: Mapping[tuple[str, Point], Curve] = field(default_factory=dict)
    generations: Sequence[int] = ()
    settings: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def gather(cls, plan: StudyPlan, failures: Mapping[str, str]) -> Results:
        """What lies in the plan's store."""
        values: dict[Place, dict[int, float]] = {}
        chosen, causes, cells, code = dict[tuple[str, Point], Chosen](), dict(failures), dict[str, str](), set[str]()
        replies: dict[str, list[int]] = {}
        curves: dict[tuple[str, Point], Curve] = {}
        generations, digests = set[int](), dict[str, str]()
        for row, point in plan.row_points():
            with suppress(LookupError, RunError):  # its search is not complete, or chose nothing
                if (choice := plan.chosen(row, point)) is not None:
                    chosen[row, point] = choice
                for cell, figures in _complete(plan, row, point):
                    cells[cell.label] = cell.digest
                    code.add(figures.code)
                    generations.add(figures.generation)
                    digests[", ".join((row, *point))] = cell.settings_digest
                    if figures.replies:
                        known = replies.get(row, [0, 0])
                        replies[row] = [old + new for old, new in zip(known, figures.replies, strict=True)]
                    for column, settings in plan.study.columns_of(row).items():
                        value = figures.values.get(settings.digest)
                        if isinstance(value, str):
                            causes[f"{cell.label}: {column}"] = value
                        elif value is not None and math.isfinite(value):
                            values.setdefault((row, point, column), {})[cell.seed] = value
                if curve := validation_curve(plan, row, point):
                    curves[row, point] = curve
        of_code = sorted(generations), digests
        return cls(plan.study, values, chosen, causes, cells, tuple(sorted(code)), replies, curves, *of_code)

    # ---- questions

    def at(self, row: str, point: Point, column: str) -> SeedFigures:
        return self.values.get((row, point, column), {})

    def spread(self, row: str, point: Point, column: str) -> Spread:
        return Spread.of(list(self.at(row, point, column).values()))

    @property
    def reference(self) -> str:
        return self.study.against or next(iter(self.study.rows))

    def difference(self, left: Place, right: Place) -> PairedSample | None:
        """Left minus right by seed; None where no seed has both."""
        return PairedSample.between(self.values.get(left, {}), self.values.get(right, {}))

    def shapley(self, point: Point, column: str) -> dict[str, dict[int, float]]:
        """Player -> seed -> Shapley value, of the seeds that all coalitions have."""
        utilities = {who: self.at(row, point, column) for who, row in self.study.coalitions.items()}
        values: dict[str, dict[int, float]] = {}
        for seed in self.study.seeds:
            if all(seed in by_seed for by_seed in utilities.values()):
                for player, value in shapley_values({who: own[seed] for who, own in utilities.items()}).items():
                    values.setdefault(player, {})[seed] = value
        return values

    def judgements(self) -> list[Judgement]:
        """Every judged claim, as one family, each at the point that it names, or over all."""
        claims = self.study.claims.to_judge
        allowances = list(map(self._allowance, claims))
        judged = judge(claims, list(map(self.sample, claims)), self.study.seeds, allowances)
        return [self._opened(self._if_it_matters(item)) for item in judged]

    def _opened(self, item: Judgement) -> Judgement:
        """The same, but open where the tuning of a row that decides it does not bear a verdict."""
        if item.verdict not in ("held", "contradicted") or not self._is_of_outcomes(item.claim):
            return item
        fewest = min((one.seeds for one in self._chosen_of(item.claim.operands).values()), default=math.inf)
        ends = {", ".join(row): one.ends for row, one in self._chosen_of(self._losers(item.claim)).items() if one.ends}
        why = "; ".join(f"the search of {row} ended at an end of {', '.join(names)}" for row, names in ends.items())
        if fewest < FEWEST_TUNING_SEEDS:
            why = f"tuned on {fewest} seed{'s' * (fewest > 1)}"
        return replace(item, verdict="open", why=why) if why else item

    def _is_of_outcomes(self, claim: Claim) -> bool:
        return all(self.study.columns[one.column].is_outcome for one in claim.operands)

    def _losers(self, claim: Claim) -> Side:
        """The side whose figures are worse; both of a difference of differences, and of spreads."""
        sample = self.sample(claim)
        if not isinstance(sample, PairedSample) or len(claim.operands) > 2:
            return claim.operands
        lower = self.study.columns[claim.left[0].column].lower
        return claim.right if (sample.mean > 0) != lower else claim.left

    def _chosen_of(self, operands: Side) -> dict[Point, Chosen]:
        """Row, with its point where there are several -> what tuning chose for it there, where a claim reads it."""
        return {
            (row, *point): chosen
            for one in operands
            for (row, point), chosen in self.chosen.items()
            if row == one.row and one.label in ("", ALL, point_label(point))
        }

    def _allowance(self, claim: Claim) -> Allowance:
        """Of the losing side, from its search; in spreads over seeds, where another metric was tuned by."""
        tuning, losers = self.study.tuning, self._chosen_of(self._losers(claim))
        if tuning is None or not losers or not self._is_of_outcomes(claim):
            return Allowance()
        scales = [1.0] * len(losers)
        if getattr(self.study.columns[claim.left[0].column], "metric", None) != getattr(tuning.column, "metric", ""):
            sides = [side for side in (self._by_seed(claim, side).values() for side in claim.sides) if len(side) > 1]
            spread = math.sqrt(fmean(map(variance, sides))) if sides else 0.0
            scales = [spread / one.spread if one.spread else 0.0 for one in losers.values()]
        rows, lower = self._chosen_of(claim.operands), tuning.column.lower
        slack = doubt = 0.0
        for scale, (place, one) in zip(scales, losers.items(), strict=True):
            missed = max(one.missed(other, lower) for at, other in rows.items() if at[1:] == place[1:])
            slack, doubt = max(slack, scale * (one.slack(lower) + missed)), max(doubt, scale * one.doubt)
        return Allowance(slack, doubt)

    def _if_it_matters(self, item: Judgement) -> Judgement:
        """Open where a difference is smaller than its column's effect, unless a margin says what matters."""
        column, sample = self.study.columns[item.claim.left[0].column], item.sample
        if item.verdict not in ("held", "contradicted") or item.claim.margin or not isinstance(sample, PairedSample):
            return item
        least = 0.5 * 10**-column.decimals if column.effect is None else column.effect
        if sample.is_exact or abs(sample.mean) >= least:
            return item
        return replace(item, verdict="open", why=f"less than {least:g}")

    def readings(self) -> list[tuple[Claim, Sample | None]]:
        """Every secondary claim with left against right by seed, at every point where it does not name one."""
        claims = [claim for given in self.study.claims.to_show for claim in self.at_points(given)]
        return [(claim, self.sample(claim)) for claim in claims]

    def at_points(self, claim: Claim) -> list[Claim]:
        """The claim at every point that its rows share, where it does not name one."""
        if "" not in claim.labels:
            return [claim]
        return [claim.at(point_label(point)) for point in self.study.shared_points(claim.operands)]

    def sample(self, claim: Claim) -> Sample | None:
        """Left against right by seed; None where no seed has all of it."""
        left, right = (self._by_seed(claim, side) for side in claim.sides)
        columns = self.study.columns
        seeds = [seed for seed in left if seed in right]
        if seeds and claim.is_of_spreads:
            return PairedSpreads({seed: left[seed] for seed in seeds}, {seed: right[seed] for seed in seeds})
        sample = PairedSample.between(left, right)
        costs = not any(columns[one.column].is_outcome for one in claim.operands)
        # costs that are the same with every seed are known exactly; an outcome moves in steps, and may seem so
        is_exact = costs and all(len(side) > 1 and len({*side.values()}) == 1 for side in (left, right))
        return sample and replace(sample, is_exact=is_exact)

    def _by_seed(self, claim: Claim, side: Side) -> dict[int, float]:
        """Figures of a side of a claim, of the seeds that have all of it."""
        named = {point_label(point): [point] for point in self.study.points}
        shared = self.study.shared_points(claim.operands)
        parts = [
            (sign / len(points), self.at(operand.row, point, operand.column))
            for sign, operand in zip((1, -1), side, strict=False)
            for points in [shared if operand.label == ALL else named[operand.label]]
            for point in points
        ]
        seeds = (seed for seed in parts[0][1] if all(seed in by_seed for _, by_seed in parts))
        return {seed: sum(weight * by_seed[seed] for weight, by_seed in parts) for seed in seeds}

    # ---- files

    def save(self, folder: Path) -> None:
        """Write ``study.yaml`` and ``results.json``; equal results are equal bytes."""
        text = yaml.safe_dump(self.study.content(), sort_keys=False, allow_unicode=True)
        write_atomically(folder / STUDY, text.encode())
        write_atomically(folder / RESULTS, (json.dumps(self.to_json(), indent=1) + "\n").encode())

    def to_json(self) -> dict[str, Any]:
        """All of it, in the order of the study."""
        order = [
            (row, point, column)
            for row in self.study.rows
            for point in self.study.points_of(row)
            for column in self.study.columns
        ]
        figures = [
            {
                "row": row,
                "point": list(point),
                "column": column,
                "by_seed": {str(seed): by[seed] for seed in sorted(by)},
            }
            for row, point, column in order
            if (by := self.at(row, point, column))
        ]
        chosen = [
            {
                "row": row,
                "point": list(point),
                "factors": dict(item.factors),
                "settings": dict(item.settings),
                "scores": {
                    name: [one if math.isfinite(one) else None for one in values]
                    for name, values in item.scores.items()
                },
                "ends": list(item.ends),
            }
            for (row, point), item in sorted(self.chosen.items())
        ]
        return {
            "figures": figures,
            "chosen": chosen,
            "causes": dict(sorted(self.causes.items())),
            "cells": self.cells,
            "code": list(self.code),
            "replies": {row: list(counts) for row, counts in self.replies.items()},
            "curves": [
                {"row": row, "point": list(point), **curve_json(curve)} for (row, point), curve in self.curves.items()
            ],
            "generations": list(self.generations),
            "settings": dict(self.settings),
        }

    @classmethod
    def load(cls, folder: Path, allow_code: bool = False) -> Results:
        """What ``save`` wrote; ``allow_code`` as for ``polyfed.open_run``.

        Raises:
            RunError: there is none, or a file is damaged.
            ConfigError: its study names code, which is not allowed.
        """
        if not (folder / RESULTS).is_file():
            raise RunError(
                f"no study in '{folder}' (no {RESULTS} in it); give the folder that polyfed study run printed"
            )
        require_plain(folder)
        try:
            with code_of(folder, allow_code):
                study = parse_settings(Study, yaml_content((folder / STUDY).read_text(encoding="utf-8")))
            return cls.from_json(study, file_json((folder / RESULTS).read_bytes()))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise RunError(f"'{folder}' is damaged ({type(error).__name__}: {error}); run the study again") from error

    @classmethod
    def from_json(cls, study: Study, content: Mapping[str, Any]) -> Results:
        """What ``to_json`` gave.

        Raises:
            ValueError: there are figures of seeds that the study has not.
        """
        values = {
            (entry["row"], tuple(entry["point"]), entry["column"]): {int(s): v for s, v in entry["by_seed"].items()}
            for entry in content["figures"]
        }
        if others := {seed for by_seed in values.values() for seed in by_seed} - {*study.seeds}:
            raise ValueError(f"figures of seeds {sorted(others)}, which its study has not")
        chosen = {(entry["row"], tuple(entry["point"])): _chosen(entry) for entry in content["chosen"]}
        causes, cells, code = content["causes"], content["cells"], content["code"]
        curves = {(entry["row"], tuple(entry["point"])): curve_of(entry) for entry in content.get("curves", ())}
        of_code = content.get("generations", ()), content.get("settings", {})
        return cls(study, values, chosen, causes, cells, code, content.get("replies", {}), curves, *of_code)


def _complete(plan: StudyPlan, row: str, point: Point) -> Iterator[tuple[Cell, CellFigures]]:
    """The cells of a row that are complete; raises as ``StudyPlan.final``."""
    for cell in plan.final(row, point):
        try:
            figures = CellFigures.of(cell.folder(plan.store))
        except RunError:
            continue  # told as a failure already
        if figures is not None:
            yield cell, figures


def _chosen(entry: Mapping[str, Any]) -> Chosen:
    scores = {name: [math.nan if one is None else one for one in values] for name, values in entry["scores"].items()}
    return Chosen(entry["factors"], entry["settings"], scores, entry["ends"])
