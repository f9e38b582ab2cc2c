"""Results of a study so far: figures by row, point, column and seed, choices of tuning, and failures."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from polyfed.core.errors import ConfigError, PolyfedError, RunError
from polyfed.core.files import require_plain, write_atomically
from polyfed.core.settings import parse_settings
from polyfed.core.untrusted import code_of, file_json, yaml_content
from polyfed.lab.studies.cells import FIGURES, Cell, CellFigures, Chosen, SearchIncompleteError, StudyPlan, cell_label
from polyfed.lab.studies.claims import ALL, Claim, Judgement, Operand, Side, judge
from polyfed.lab.studies.column import ColumnSettings
from polyfed.lab.studies.columns.metrics import Metric
from polyfed.lab.studies.study import Point, Study, point_label
from polyfed.reporting.compare import Spread
from polyfed.reporting.metrics import EVALUATIONS
from polyfed.reporting.statistics import Comparison, PairedSample, compared
from polyfed.runs.opened import open_run
from polyfed.runs.records import SERVER


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
_TUNED_ONCE = "tuned once, for all seeds alike"
SeedFigures = Mapping[int, float]
Place = tuple[str, Point, str]
"""Row, point and column."""

Seeded = tuple[str, Point, int | None]
"""Row, point and seed; without a seed: one choice for all seeds, on seeds of its own."""


@dataclass(frozen=True)
class Results:
    """Figures of a study.

    Attributes:
        study: The study.
        values: Row, point and column -> seed -> figure; seeds without a figure are left out.
        chosen: (row, point, seed) -> what tuning chose.
        causes: Place or cell in words -> why it has no figure.
        cells: Label of every final cell that is complete -> its folder's name.
        code: Row -> versions and states of the code that ran it; a table should have one.
        replies: Row -> how many were clipped, and excluded, over all its cells.
        curves: (row, point) -> round -> validation over seeds.
        withheld: Row that decides nothing -> why.
    """

    study: Study
    values: Mapping[Place, SeedFigures]
    chosen: Mapping[Seeded, Chosen] = field(default_factory=dict)
    causes: Mapping[str, str] = field(default_factory=dict)
    cells: Mapping[str, str] = field(default_factory=dict)
    code: Mapping[str, Sequence[str]] = field(default_factory=dict)
    replies: Mapping[str, Sequence[int]] = field(default_factory=dict)
    curves: Mapping[tuple[str, Point], Curve] = field(default_factory=dict)
    withheld: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def gather(cls, plan: StudyPlan, failures: Mapping[str, str], recorded: Collection[str] = ()) -> Results:
        """Read what lies in the plan's store, but cells with ``recorded`` labels."""
        values: dict[Place, dict[int, float]] = {}
        chosen, causes, cells = dict[Seeded, Chosen](), dict(failures), dict[str, str]()
        code, replies = dict[str, set[str]](), dict[str, list[int]]()
        curves: dict[tuple[str, Point], Curve] = {}
        for row, point in plan.row_points():
            complete = list[int]()
            for cell, choice, figures in _complete(plan, row, point, recorded):
                if choice is not None:
                    chosen[row, point, cell.seed] = choice
                complete.append(cell.seed)
                cells[cell.label] = cell.digest
                code.setdefault(row, set()).add(figures.code)
                if figures.replies:
                    known = replies.get(row, [0, 0])
                    replies[row] = [old + new for old, new in zip(known, figures.replies, strict=True)]
                for column, settings in plan.study.columns_of(row).items():
                    value = figures.values.get(settings.digest)
                    if isinstance(value, str):
                        causes[f"{cell.label}: {column}"] = value
                    elif value is not None and math.isfinite(value):
                        values.setdefault((row, point, column), {})[cell.seed] = value
            if complete and (curve := validation_curve(plan, row, point, complete)):
                curves[row, point] = curve
        of_code = {row: sorted(states) for row, states in code.items()}
        return cls(plan.study, values, chosen, causes, cells, of_code, replies, curves)

    def merged(self, now: Results) -> Results:
        """These figures of before, with those of other cells in addition."""
        values = {place: dict(own) for place, own in self.values.items()}
        for place, own in now.values.items():
            values.setdefault(place, {}).update(own)
        code = {row: sorted({*self.code.get(row, ()), *now.code.get(row, ())}) for row in (*self.code, *now.code)}
        replies = {row: list(counts) for row, counts in self.replies.items()}
        for row, counts in now.replies.items():
            replies[row] = [old + new for old, new in zip(replies.get(row, (0, 0)), counts, strict=True)]
        chosen, causes = {**self.chosen, **now.chosen}, {**self.causes, **now.causes}
        curves = {**now.curves, **self.curves}  # of a row with a second look, that of the first
        return Results(now.study, values, chosen, causes, {**self.cells, **now.cells}, code, replies, curves)

    # ---- figures

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

    def choice(self, row: str, point: Point, seed: int) -> Chosen | None:
        """The choice of tuning for a row and a seed."""
        return self.chosen.get((row, point, seed)) or self.chosen.get((row, point, None))

    def judgements(self) -> list[Judgement]:
        """Every judged claim, as one family, each at the point that it names, or over all."""
        return self.judged(self.study.claims.to_judge, self.study.looks)

    def judged(self, claims: Sequence[Claim], looks: Sequence[Sequence[int]]) -> list[Judgement]:
        """Judge claims as one family; those on a row that is withheld are undecided."""
        items = judge(claims, list(map(self.sample, claims)), list(map(self.study.effect, claims)), looks)
        reasons = [[self.withheld.get(one.row, "") for one in item.claim.operands] for item in items]
        return [replace(item, why=max(why)) if any(why) else item for item, why in zip(items, reasons, strict=True)]

    def contest(self, left: str, right: str, point: Point, column: str) -> Judgement:
        """A row against another at a point: the claim that is judged on just that; else a test that decides nothing."""
        label = point_label(point)
        for item in self.judgements():
            claim = item.claim
            is_on_it = claim.left[0].column == column and claim.labels <= {"", label}
            if is_on_it and [one.row for one in claim.operands] == [left, right]:
                return item
        own, other = (Operand(row, column, label) for row in (left, right))
        sample = self.difference((left, point, column), (right, point, column))
        return self._shown(Claim(f"{left} > {right} on {column}", (own,), (other,), ">"), sample)

    def against(self, left: str, right: str, point: Point, column: str) -> tuple[Comparison | None, str]:
        """A row against another at a point, and the verdict in words where a claim on just that is judged."""
        item = self.contest(left, right, point, column)
        return item.comparison, item.in_words

    def _shown(self, claim: Claim, sample: PairedSample | None) -> Judgement:
        effect = self.study.effect(claim)
        known = None if sample is None else compared(sample, effect)
        return Judgement(claim, sample, effect, known, is_judged=False)

    def evidence(self) -> list[Judgement]:
        """Judged claims, then secondary ones, each by a test that decides nothing."""
        return [*self.judgements(), *(self._shown(*reading) for reading in self.readings())]

    def readings(self) -> list[tuple[Claim, PairedSample | None]]:
        """Every secondary claim with left against right by seed, at every point where it does not name one."""
        claims = [claim for given in self.study.claims.to_show for claim in self.at_points(given)]
        return [(claim, self.sample(claim)) for claim in claims]

    def at_points(self, claim: Claim) -> list[Claim]:
        """The claim at every point that its rows share, where it does not name one."""
        if "" not in claim.labels:
            return [claim]
        return [claim.at(point_label(point)) for point in self.study.shared_points(claim.operands)]

    def sample(self, claim: Claim) -> PairedSample | None:
        """Left against right by seed; None where no seed has all of it."""
        left, right = (self._by_seed(claim, side) for side in claim.sides)
        sample = PairedSample.between(left, right)
        costs = not any(self.study.columns[one.column].is_outcome for one in claim.operands)
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
        figures = [
            {
                "row": row,
                "point": list(point),
                "column": column,
                "by_seed": {str(seed): by[seed] for seed in sorted(by)},
            }
            for row in self.study.rows
            for point in self.study.points_of(row)
            for column in self.study.columns
            if (by := self.at(row, point, column))
        ]
        chosen = [
            {
                **{"row": row, "point": list(point), "seed": seed},
                **asdict(item),
                "scores": {name: one if math.isfinite(one) else None for name, one in item.scores.items()},
            }
            for (row, point, seed), item in sorted(self.chosen.items(), key=str)
        ]
        return {
            "figures": figures,
            "chosen": chosen,
            "causes": dict(sorted(self.causes.items())),
            "cells": self.cells,
            "code": {row: list(states) for row, states in self.code.items()},
            "replies": {row: list(counts) for row, counts in self.replies.items()},
            "curves": [
                {"row": row, "point": list(point), **curve_json(curve)} for (row, point), curve in self.curves.items()
            ],
        }

    @classmethod
    def load(cls, folder: Path, allow_code: bool = False) -> Results:
        """Load what ``save`` wrote; ``allow_code`` as for ``polyfed.open_run``.

        Raises:
            RunError: A file is missing or damaged.
            ConfigError: The study names code, which is not allowed.
        """
        require_plain(folder)
        try:
            with code_of(folder, allow_code):
                study = _study(yaml_content((folder / STUDY).read_text(encoding="utf-8")))
            return cls.from_json(study, file_json((folder / RESULTS).read_bytes()))
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise RunError(f"'{folder}' is damaged ({type(error).__name__}: {error}); run the study again") from error

    @classmethod
    def from_json(cls, study: Study, content: Mapping[str, Any]) -> Results:
        """Read the content that ``to_json`` gave.

        Raises:
            ValueError: There are figures of seeds that the study lacks.
        """
        values = {
            (entry["row"], tuple(entry["point"]), entry["column"]): {int(s): v for s, v in entry["by_seed"].items()}
            for entry in content["figures"]
        }
        if others := {seed for by_seed in values.values() for seed in by_seed} - {*study.all_seeds}:
            raise ValueError(f"figures of seeds {sorted(others)}, which its study lacks")
        entries = [entry for entry in content["chosen"] if "seed" in entry]  # those of 0.4.0 were means over seeds
        chosen = {(entry["row"], tuple(entry["point"]), entry["seed"]): _chosen(entry) for entry in entries}
        causes, cells, code = content["causes"], content["cells"], content["code"]
        code = dict.fromkeys(study.rows, code) if isinstance(code, list) else code
        curves = {(entry["row"], tuple(entry["point"])): curve_of(entry) for entry in content.get("curves", ())}
        # what such a choice adds to the spread over seeds is in no seed's figure, so that no test counts it
        once = {row: _TUNED_ONCE for row, _, seed in chosen if seed is None}
        return cls(study, values, chosen, causes, cells, code, content.get("replies", {}), curves, once)


def _study(content: Any) -> Study:
    """The study; one of 0.4.0 without tuning, claims and figures, whose settings and rules were others."""
    try:
        return parse_settings(Study, content)
    except ConfigError:
        for row in content["rows"].values():
            row.pop("tune", None)
        for column in content["columns"].values():
            if column.get("effect", 1) is None:  # the default, of costs
                del column["effect"]
        return parse_settings(Study, content | {"tuning": None, "claims": {}, "figures": []})


def _complete(
    plan: StudyPlan, row: str, point: Point, recorded: Collection[str]
) -> Iterator[tuple[Cell, Chosen | None, CellFigures]]:
    """The cells of a row that are complete, with what their seeds chose."""
    for seed in (one for one in plan.study.all_seeds if cell_label(row, point, one) not in recorded):
        with suppress(SearchIncompleteError, RunError):  # the search is incomplete, or the failure is recorded
            cell, chosen = plan.cell(row, point, seed), plan.chosen(row, point, seed)
            figures = CellFigures.of(cell.folder(plan.store))
            if figures is not None and any(one.digest in figures.values for one in plan.columns(cell)):
                yield cell, chosen, figures


def _chosen(entry: Mapping[str, Any]) -> Chosen:
    scores = {name: math.nan if one is None else one for name, one in entry["scores"].items()}
    return Chosen(entry["factors"], entry["settings"], scores, entry["ends"])


# ---- validation by round

Curve = Mapping[int, Spread]
"""Round -> validation, over seeds."""


def validation_curve(plan: StudyPlan, row: str, point: Point, seeds: Sequence[int]) -> Curve:
    """Validation by round: the column that tuning compares, else the server's metric; empty without validation.

    It is of the row's own cells where they validate as tuning does, and of the chosen candidates' where they do not.
    Raises as ``StudyPlan.cell``.
    """
    final, server = [plan.cell(row, point, seed) for seed in seeds], plan.experiment(row, point).server
    if plan.tuning is not None and plan.tuning.column is not None:
        column = plan.tuning.column
    elif server is not None:
        column = Metric(metric=server.task.primary, kind="validation")
    else:
        return {}
    if isinstance(column, Metric) and column.of == SERVER:
        column = column.changed({"round": "final"}, "round")  # of each round, not the best so far
    searches = [search for seed in seeds if not plan.main and (search := plan.row_search(row, point, seed))]
    for cells in (final, [search.cell(search.chosen.factors) for search in searches]):
        with suppress(ConfigError, IndexError):  # without validation, or not as in tuning
            column.require(cells[0].experiment)
            folders = [cell.folder(plan.store) for cell in cells]
            curves = [_by_round(column, folder) for folder in folders if (folder / FIGURES).is_file()]
            rounds = sorted(set.intersection(*map(set, curves))) if curves else []
            return {number: Spread.of([curve[number] for curve in curves]) for number in rounds}
    return {}


_KNOWN: dict[tuple[str, Path], Mapping[int, float]] = {}
"""Digest of a column and folder of a complete cell -> what is read only once, as results are gathered cell by cell."""


def _by_round(column: ColumnSettings, folder: Path) -> Mapping[int, float]:
    """A column as if the run had ended after each evaluated round."""
    if (known := _KNOWN.get((column.digest, folder))) is not None:
        return known
    curve, run = dict[int, float](), open_run(folder)
    measured = () if column.needs_models else run.records.measurements
    for number in sorted({one.round for one in measured if one.kind in EVALUATIONS}):
        ended = replace(run)
        until = tuple(one for one in measured if one.round <= number)
        vars(ended)["records"] = replace(run.records, measurements=until)
        with suppress(PolyfedError):  # clients are measured after the first round
            curve[number] = column.measure(ended)
    finite = {number: value for number, value in curve.items() if math.isfinite(value)}
    return _KNOWN.setdefault((column.digest, folder), finite)


def curve_json(curve: Curve) -> dict[str, Any]:
    """Rounds, means and standard deviations, four digits of each."""
    stds = [None if math.isnan(spread.std) else float(f"{spread.std:.4g}") for spread in curve.values()]
    return {"rounds": list(curve), "mean": [float(f"{spread.mean:.4g}") for spread in curve.values()], "std": stds}


def curve_of(content: Mapping[str, Any]) -> Curve:
    """The curve that ``curve_json`` wrote."""
    stds = (math.nan if std is None else std for std in content["std"])
    return dict(zip(content["rounds"], map(Spread, content["mean"], stds), strict=True))
