"""Retrieval on data sets that nobody trained on."""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import Field

from polyfed.data.samples import Samples
from polyfed.lab.downstream.bench import Bench
from polyfed.lab.downstream.results import Outcome
from polyfed.lab.downstream.search import Search


class OutOfDomain(Search):
    """Recalls, as of ``retrieval``, on other data sets (FedAID's are question-answer pairs), one row each.

    Those among ``sources`` that clients of the run, or its public set, come from are left out, and named in the notes.
    """

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
