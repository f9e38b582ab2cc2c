"""Centres of data sets (or of their classes) in a model's representations, their distances, and a 2-d picture.

FedCola, appendix B.7: the distances between the centres of uni-modal and multi-modal data sets say how far apart the
model keeps them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import combinations
from typing import Any, ClassVar, Literal

import torch
from jaxtyping import Float, Int64
from pydantic import Field
from torch import Tensor
from torch.nn import functional as F

from polyfed.core.device import cpu_threads
from polyfed.core.errors import ConfigError, nearest
from polyfed.data.assembly import assemble
from polyfed.data.samples import Samples
from polyfed.data.source import Split
from polyfed.lab.analysis.analysis import Analysis, AnalysisResult, ModelName, server_model
from polyfed.lab.analysis.drawing import PointMap, draw_panels
from polyfed.lab.analysis.projections import drawn, lda
from polyfed.reporting.tables import TextTable, format_number
from polyfed.runs.opened import Run, ServerModel

_LISTED = 40  # distances in the table


class Centres(Analysis):
    """Measure how far apart a server model keeps data sets or classes, and draw them; several runs side by side."""

    takes_several: ClassVar[bool] = True

    data: list[str] | None = Field(default=None, description="sources; by default all of the first run")
    by: Literal["data", "class"] = Field(
        default="data", description="data: a centre for each data set; class: for each class of it"
    )
    split: str = Field(default="test", description="split of all of them")
    samples: int = Field(default=1000, ge=1, description="at most so many of each, at random")
    model: ModelName = "last"

    def answer(self, run: Run) -> AnalysisResult:
        return self.answer_several([run])

    def answer_several(self, runs: Sequence[Run]) -> AnalysisResult:
        servers = [server_model(run, self.model) for run in runs]
        names = list(servers[0].run.conditions.data.sources) if self.data is None else self.data
        each = [run_centres(server, names, by=self.by, split=self.split, most=self.samples) for server in servers]
        maps = [shown for centres in each for shown in centres.maps]
        columns = max(len(centres.maps) for centres in each)
        picture = partial(draw_panels, "Representations, projected by LDA", maps, columns)
        content = {"by": self.by, "runs": [centres.to_json() for centres in each]}
        return AnalysisResult(content, [centres.table() for centres in each], picture)


def centre_distances(centres: Float[Tensor, "c d"]) -> tuple[Float[Tensor, "c c"], Float[Tensor, "c c"]]:
    """Euclidean and cosine distances (1 - cos; 1 for a centre at the origin) of all pairs of centres, in float64."""
    centres = centres.double()
    unit = F.normalize(centres, dim=1)
    euclidean = torch.linalg.vector_norm(centres[:, None] - centres, dim=-1)
    return euclidean, (1 - unit @ unit.T).clamp(0, 2).fill_diagonal_(0)


@dataclass(frozen=True)
class RunCentres:
    """Centres of groups of representations.

    Attributes:
        run, round: whose model, and after which round it was saved.
        split: split of the data sets.
        names: of the groups: ``<modality>: <data set>``, and ``/ <class>`` behind it where groups are classes.
        modalities: of each group.
        counts: representations in each group [c].
        values: the centres [c, d].
        maps: LDA projections: one of each modality with several groups, and one of all modalities.
    """

    run: str
    round: int
    split: str
    names: tuple[str, ...]
    modalities: tuple[str, ...]
    counts: Int64[Tensor, " c"]
    values: Float[Tensor, "c d"]
    maps: Sequence[PointMap]

    def to_json(self) -> dict[str, Any]:
        euclidean, cosine = centre_distances(self.values)
        return {
            "run": self.run,
            "round": self.round,
            "split": self.split,
            "groups": self.names,
            "modalities": self.modalities,
            "counts": self.counts.tolist(),
            "euclidean": euclidean.tolist(),
            "cosine": cosine.tolist(),
        }

    def table(self) -> TextTable:
        """Distances of all pairs of centres, the farthest first."""
        euclidean, cosine = centre_distances(self.values)
        pairs = sorted(combinations(range(len(self.names)), 2), key=lambda pair: -float(euclidean[pair]))
        rows = [
            (
                f"{self.names[i]} - {self.names[j]}",
                *(format_number(float(kind[i, j]), 4) for kind in (euclidean, cosine)),
            )
            for i, j in pairs[:_LISTED]
        ]
        left = len(pairs) - len(rows)
        notes = (f"The farthest {_LISTED}; {left} more are in the JSON file.",) if left else ()
        title = f"{self.run}, round {self.round}: distances of centres"
        return TextTable(title, ("between", "Euclidean", "cosine"), rows, notes)


def run_centres(
    server: ServerModel,
    sources: Sequence[str] | None = None,
    *,
    by: str = "data",
    split: str = "test",
    most: int | None = 1000,
) -> RunCentres:
    """Centres in the representations (unit norm) of a run's server model.

    Args:
        server: the model.
        sources: data sets; by default all of the run.
        by: one group a modality of a data set, or one for each of its classes (by the first target of the source).
        split: of the data sets.
        most: at most so many samples of a data set and modality, drawn at random; None: all.

    Raises:
        ConfigError: a source is unknown, has no modality that the model encodes, or no labels where they are needed;
            or there are fewer than two groups.
        DataError: a source has no such split.
    """
    names = list(server.run.conditions.data.sources) if sources is None else list(sources)
    if twice := [name for name in names if names.count(name) > 1]:
        raise ConfigError(f"data sets: '{twice[0]}' is named {names.count(twice[0])} times; name it once")
    splits = [_split(server, name, split) for name in names]
    _require_groups(server, splits, by)
    groups: dict[str, Tensor] = {}
    with cpu_threads(server.run.conditions.run.threads):
        for modality in server.views:
            for part in splits:
                if modality in part.columns:
                    groups |= _groups(server, part, modality, by, most)
        modalities = tuple(name.partition(":")[0] for name in groups)
        maps = _maps(f"{server.run.name}, round {server.round}", groups, modalities)
    counts = torch.tensor([len(rows) for rows in groups.values()])
    means = torch.stack([rows.double().mean(0) for rows in groups.values()])
    return RunCentres(server.run.name, server.round, split, tuple(groups), modalities, counts, means, maps)


def _maps(model: str, groups: Mapping[str, Float[Tensor, "n d"]], modalities: Sequence[str]) -> list[PointMap]:
    # modalities apart, since they lie farther from each other than anything within one; then all together
    shown = {one: [name for name, own in zip(groups, modalities, strict=True) if own == one] for one in modalities}
    if len(shown) > 1:
        shown["all modalities"] = list(groups)
    maps = []
    for title, names in shown.items():
        if len(names) > 1:
            sizes = [len(groups[name]) for name in names]
            codes = torch.repeat_interleave(torch.arange(len(names)), torch.tensor(sizes))
            points = torch.split(lda(torch.cat([groups[name] for name in names]), codes), sizes)
            maps.append(PointMap(f"{model}: {title}", dict(zip(names, points, strict=True)), has_centres=True))
    return maps


def _split(server: ServerModel, source: str, name: str) -> Split:
    data = server.run.conditions.data
    if source not in data.sources:
        raise ConfigError(f"no source '{source}' in data.sources; {nearest(source, data.sources)}")
    return data.sources[source].open(name, name=source, data_dir=data.data_folder)


def _require_groups(server: ServerModel, splits: Sequence[Split], by: str) -> None:
    number = 0
    for split in splits:
        encoded = [name for name in server.views if name in split.columns]
        number += len(encoded)
        if not encoded:
            raise ConfigError(
                f"'{split.source}' has {', '.join(split.columns) or 'no modality'}, of which the model encodes none "
                f"(it encodes {', '.join(server.views)}); leave it out"
            )
        if by == "class" and not split.targets:
            raise ConfigError(f"'{split.source}' has no targets, hence no classes; use by: data, or leave it out")
    if by == "data" and number < 2:
        raise ConfigError("one data set of one modality has one centre and no distance; name more, or use by: class")


def representations(server: ServerModel, samples: Samples, modality: str, rows: Int64[Tensor, " n"]) -> Tensor:
    """Of unit norm [n, d], on the CPU."""
    load, model = samples.inputs[modality], server.model
    parts = torch.split(rows, server.run.conditions.run.evaluation_batch)
    with torch.no_grad():
        return torch.cat([model.represent(modality, load(part).to(model.device)).float().cpu() for part in parts])


def _groups(server: ServerModel, split: Split, modality: str, by: str, most: int | None) -> Mapping[str, Tensor]:
    """Name of a group -> its representations [n, d]."""
    samples = assemble(split, {modality: server.views[modality]}, server.context).having(modality)
    rows = torch.unique(samples.rows[modality])  # siblings share a picture, which counts once
    rows = rows[drawn(len(rows), most, "centres", split.source, modality)]
    values = representations(server, samples, modality, rows)
    if by == "data":
        return {f"{modality}: {split.source}": values}
    target = next(iter(split.targets))
    names = dict(enumerate(samples.classes.get(target, ())))
    labels = torch.full((len(samples.inputs[modality]),), -1)
    labels[samples.rows[modality]] = samples.targets[target]  # of several samples that share a row, the last one's
    return {
        f"{modality}: {split.source} / {names.get(label, label)}": values[labels[rows] == label]
        for label in sorted(set(labels[rows].tolist()))
    }
