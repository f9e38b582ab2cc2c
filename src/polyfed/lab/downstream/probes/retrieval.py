"""Retrieval between two modalities: on clients' own test samples, a data set, or data sets that nobody trained on."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import fmean
from typing import ClassVar

from pydantic import Field

from polyfed.core.errors import DataError
from polyfed.data.samples import Samples
from polyfed.lab.downstream.bench import Bench
from polyfed.lab.downstream.results import Outcome, ProbeRow
from polyfed.lab.downstream.search import Search, can_be_missed


class RetrievalProbe(Search):
    """Recalls on every client's own test samples, or on a data set (FedAID, arXiv 2404.03854, appendix B.2).

    In batches of ``batch`` samples (galleries as the paper's) and among all. Without a ``source`` every client's own
    test samples are searched; the mean over clients, the worst client and the disparity (best less worst) are added.
    Clients whose every search would succeed, as they have a single sample, are left out, and named in the notes.
    """

    short_name: ClassVar[str] = "retrieval"

    source: str | None = Field(default=None, description="name of a source; None: the clients' own test samples")
    split: str = Field(default="test", description="split of the source")

    def unsuitable(self, bench: Bench) -> str | None:
        """The model does not encode both modalities, or there are no clients to search."""
        if self.source is None and bench.subject.clients is None:
            return f"{bench.subject.name} has no clients; give a run, or a source to search"
        return bench.subject.lacks(self.between)

    def check(self, bench: Bench, task: str) -> None:
        """Split and columns, or that a client has both modalities; and that there is something to search."""
        if self.source is not None:
            bench.require(task, self.source, [self.split], self.between)
        if not self.where(bench):  # of a source this raises, and says why
            both = " and ".join(self.between)
            raise DataError(f"tasks.{task}: no client has two test samples with {both} that do not answer each other")

    def where(self, bench: Bench) -> Mapping[str, Samples]:
        if self.source is not None:
            return {self.split: self.of_source(bench, self.source, self.split)}
        return {name: tests for name, tests in self._paired(bench).items() if can_be_missed(tests)}

    def run(self, bench: Bench, task: str) -> Outcome:
        rows = self.rows(bench, task)
        if self.source is not None:
            return Outcome(self.source, rows, self.notes())
        names = [name for name, tests in self._paired(bench).items() if not can_be_missed(tests)]
        reason = "with a single test sample, or none that do not answer each other"
        left_out = [f"Left out, {reason}: {', '.join(names)}."] if names else []
        return Outcome("clients' own test samples", [*rows, *_over_clients(rows)], [*self.notes(), *left_out])

    def _paired(self, bench: Bench) -> dict[str, Samples]:
        every = bench.subject.clients() if bench.subject.clients is not None else {}
        return {name: tests for name, tests in every.items() if set(self.between) <= set(tests.inputs) and len(tests)}


def _over_clients(rows: Sequence[ProbeRow]) -> list[ProbeRow]:
    """Mean over clients, worst client and disparity of every metric, draw by draw."""
    summaries: dict[str, Callable[[Sequence[float]], float]] = {
        "mean over clients": fmean,
        "worst client": min,
        "disparity": lambda values: max(values) - min(values),
    }
    by_metric = {metric: list(zip(*(row.values[metric] for row in rows), strict=True)) for metric in rows[0].values}
    return [
        ProbeRow(on, {metric: list(map(summary, draws)) for metric, draws in by_metric.items()}, {"clients": len(rows)})
        for on, summary in summaries.items()
    ]


class OutOfDomain(Search):
    """Recalls, as of ``retrieval``, on other data sets (FedAID's are question-answer pairs), one row each.

    Those among ``sources`` that clients of the run, or its public set, come from are left out, and named in the notes.
    """

    short_name: ClassVar[str] = "out_of_domain"

    sources: tuple[str, ...] = Field(min_length=1, description="names of sources; those trained on are left out")
    split: str = Field(default="test", description="split of all of them")

    def unsuitable(self, bench: Bench) -> str | None:
        """The model does not encode both modalities, or was trained on all of the sources."""
        if self._known(bench) == list(self.sources):
            return f"{bench.subject.name} was trained on {', '.join(self.sources)}"
        return bench.subject.lacks(self.between)

    def _known(self, bench: Bench) -> list[str]:
        there, folder = bench.data.sources, bench.data.data_folder
        return [source for source in self.sources if source in there and bench.subject.knows(there[source], folder)]

    def check(self, bench: Bench, task: str) -> None:
        for source in self.sources:
            bench.require(task, source, [self.split], self.between)
        self.where(bench)

    def where(self, bench: Bench) -> Mapping[str, Samples]:
        """Every source that the model was not trained on."""
        new = [source for source in self.sources if source not in self._known(bench)]
        return {source: self.of_source(bench, source, self.split) for source in new}

    def run(self, bench: Bench, task: str) -> Outcome:
        known = self._known(bench)
        notes = [f"Left out, as the model was trained on it: {', '.join(known)}."] if known else []
        return Outcome(f"other data sets, {self.split}", self.rows(bench, task), [*self.notes(), *notes])
