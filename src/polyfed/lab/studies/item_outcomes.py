"""Outcomes by test item: what a cell keeps of them, and how far a claim's difference depends on the items."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from jaxtyping import Float, Int64
from torch import Tensor
from torch.nn import functional as F

from polyfed.lab.studies.claims import Claim
from polyfed.lab.studies.columns.metric import Metric
from polyfed.lab.studies.results import Place, Results
from polyfed.reporting.client_spread import selected_round
from polyfed.reporting.statistics import CONFIDENCE, ItemSpread
from polyfed.runs.events import Callback, Event, Measured, RunComplete
from polyfed.runs.folder import RunFolder
from polyfed.runs.records import SERVER, RunRecords
from polyfed.tasks.scores import TaskScores, drawn_means

_DRAWS = 2000
_FOLDER, _INDEX, _METRICS = "items", "index", "metrics"


class ItemRecorder(Callback):
    """Writes the server's test outcomes by item, and keeps those of the round that validation selects and of the last.

    A round's file has sums and counts by item of every mean that a metric is the sum of; what metrics share stands
    there once.

    Args:
        folder: of the run.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = RunFolder(folder)

    def handle(self, event: Event) -> None:
        if isinstance(event, RunComplete):
            self._thin_out()
        elif isinstance(event, Measured) and (event.participant, event.kind) == (SERVER, "test"):
            by_item = event.metrics.by_item if isinstance(event.metrics, TaskScores) else {}
            if by_item:
                self._save(event.round, by_item)

    def _save(self, number: int, by_item: Mapping[str, Sequence[Tensor]]) -> None:
        distinct: list[Tensor] = []
        places: dict[str, list[int]] = {}
        for metric, terms in by_item.items():
            for term in terms:
                at = next((k for k, known in enumerate(distinct) if torch.equal(known, term)), len(distinct))
                distinct += [term] if at == len(distinct) else []
                places.setdefault(metric, []).append(at)
        size = max(term.shape[1] for term in distinct)
        padded = torch.stack([F.pad(term, (0, size - term.shape[1])) for term in distinct])
        index = padded[:, 1].sum(0).nonzero()[:, 0]
        tensors = {_INDEX: index, **{str(k): term[:, index].float() for k, term in enumerate(padded)}}
        self._folder.save_tensors(_file(number), tensors, {_METRICS: json.dumps(places)})

    def _thin_out(self) -> None:
        known = {int(path.stem): path for path in (self._folder.path / _FOLDER).glob("*.safetensors")}
        chosen = selected_round(RunRecords.load(self._folder.path))
        for number, path in known.items():
            if number not in (chosen, max(known)):
                path.unlink()


def _file(number: int) -> str:
    return f"{_FOLDER}/{number}.safetensors"


@dataclass(frozen=True)
class ItemMeans:
    """A metric as a sum of means over items.

    Attributes:
        items: numbers of the items, ascending.
        terms: of each mean sums and counts by item.
    """

    items: Int64[Tensor, " k"]
    terms: Float[Tensor, "t 2 k"]

    @classmethod
    def of(cls, folder: Path, column: Metric) -> ItemMeans | None:
        """Of a cell, at the round that a column reads; None where it has none."""
        number = column.tested_round(RunRecords.load(folder)) if (folder / _FOLDER).is_dir() else None
        run, name = RunFolder(folder), "" if number is None else _file(number)
        tensors = run.tensors(name) if name else None
        places = json.loads(run.metadata(name)[_METRICS]).get(column.metric) if tensors else None
        if not tensors or not places:
            return None
        terms = torch.stack([tensors[str(place)] for place in places]).double()
        has = terms[:, 1].sum(0) > 0
        return cls(tensors[_INDEX][has], terms[:, :, has])

    @property
    def value(self) -> float:
        """The metric."""
        sums = self.terms.sum(2)
        return float((sums[:, 0] / sums[:, 1]).sum())


def item_spreads(results: Results, store: Path) -> dict[Claim, ItemSpread]:
    """Of every claim whose figures are means over the same test items in all of its cells.

    Items are drawn with replacement, the same for all rows and seeds, whose differences are averaged.

    Args:
        results: of a study.
        store: folder of its cells.
    """
    outcomes = _Outcomes(results, store)
    claims = [*results.study.claims.to_judge, *(claim for claim, _ in results.readings())]
    spreads = {claim: outcomes.spread(claim) for claim in claims if not claim.is_of_spreads}
    return {claim: spread for claim, spread in spreads.items() if spread is not None}


class _Outcomes:
    """The outcomes of a study's cells, each read once."""

    def __init__(self, results: Results, store: Path) -> None:
        self._results, self._store = results, store
        self._known: dict[tuple[str, Metric], ItemMeans | None] = {}

    def spread(self, claim: Claim) -> ItemSpread | None:
        parts = list(self._parts(claim))
        known = [(weight, means) for weight, means in parts if means is not None]
        if not known or len(known) < len(parts):
            return None
        items = known[0][1].items
        if any(not torch.equal(means.items, items) for _, means in known):
            return None
        terms = torch.cat([means.terms for _, means in known])
        weights = [weight for weight, means in known for _ in means.terms]
        drawn = drawn_means(terms, _DRAWS) @ torch.tensor(weights, dtype=torch.float64)
        low, high = drawn.quantile(torch.tensor([(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2], dtype=torch.float64))
        return ItemSpread(len(items), float(drawn.std()), (float(low), float(high)))

    def _parts(self, claim: Claim) -> Iterator[tuple[float, ItemMeans | None]]:
        """The outcomes whose weighted sum is the mean difference over seeds."""
        sample = self._results.sample(claim)
        seeds = sample.seeds if sample else []
        for seed in seeds:
            for weight, place in self._results.places(claim):
                yield weight / len(seeds), self._of(place, seed)

    def _of(self, place: Place, seed: int) -> ItemMeans | None:
        row, point, name = place
        column, cell = self._results.study.columns_of(row)[name], self._results.cell(row, point, seed)
        if not isinstance(column, Metric) or cell is None:
            return None
        if (cell, column) not in self._known:
            self._known[cell, column] = ItemMeans.of(self._store / cell, column)
        return self._known[cell, column]
