"""Retrieval between two modalities, on the clients' own test samples or on a data set."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean

from pydantic import Field

from polyfed.data.samples import Samples
from polyfed.downstream.bench import Bench
from polyfed.downstream.results import Outcome, Row
from polyfed.downstream.search import Search
from polyfed.errors import DataError


class Retrieval(Search):
    """Recalls on every client's own test samples, or on a data set (FedAID, arXiv 2404.03854, appendix B.2).

    In batches of ``batch`` samples (galleries as the paper's) and among all. Without a ``source`` every client's own
    test samples are searched; the mean over clients, the worst client and the disparity (best less worst) are added.
    """

    source: str | None = Field(default=None, description="name of a source; None: the clients' own test samples")
    split: str = Field(default="test", description="split of the source")

    def unsuitable(self, bench: Bench) -> str | None:
        """The subject does not encode both modalities, or there are no clients to search."""
        if self.source is None and bench.subject.clients is None:
            return f"{bench.subject.name} has no clients; give a run, or a source to search"
        return bench.subject.lacks(self.between)

    def check(self, bench: Bench, task: str) -> None:
        """Split and columns, or that a client has both modalities.

        Raises:
            ConfigError, DataError: something is missing.
        """
        if self.source is not None:
            bench.require(task, self.source, [self.split], self.between)
        elif not self.where(bench):
            raise DataError(f"tasks.{task}: no client has test samples with {' and '.join(self.between)}")

    def where(self, bench: Bench) -> Mapping[str, Samples]:
        """The source, or the clients that have test samples with both modalities."""
        if self.source is not None:
            return {self.split: bench.pairs(self.source, self.split, self.between)}
        every = bench.subject.clients() if bench.subject.clients is not None else {}
        return {name: tests for name, tests in every.items() if set(self.between) <= set(tests.inputs) and len(tests)}

    def run(self, bench: Bench, task: str) -> Outcome:
        """Search."""
        rows = self.rows(bench, task)
        if self.source is not None:
            return Outcome(self.source, rows, self.notes())
        return Outcome("clients' own test samples", [*rows, *_over_clients(rows)], self.notes())


def _over_clients(rows: Sequence[Row]) -> list[Row]:
    """Mean over clients, worst client and disparity of every metric, draw by draw."""
    found: dict[str, dict[str, list[float]]] = {"mean over clients": {}, "worst client": {}, "disparity": {}}
    for metric in rows[0].values:
        for by_client in zip(*(row.values[metric] for row in rows), strict=True):
            parts = (fmean(by_client), min(by_client), max(by_client) - min(by_client))
            for name, value in zip(found, parts, strict=True):
                found[name].setdefault(metric, []).append(value)
    return [Row(name, values, {"clients": len(rows)}) for name, values in found.items()]
