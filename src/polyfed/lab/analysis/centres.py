"""Centres of data sets (or of their classes) in a model's representations, their distances, and a 2-d picture.

FedCola, appendix B.7: the distances between the centres of uni-modal and multi-modal data sets say how far apart the
model keeps them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import combinations
from typing import Any

import torch
from jaxtyping import Float, Int64
from torch import Tensor
from torch.nn import functional as F

from polyfed.core.device import cpu_threads
from polyfed.core.errors import ConfigError, nearest
from polyfed.data.assembly import assemble
from polyfed.data.samples import Samples
from polyfed.data.source import Split
from polyfed.lab.analysis.drawing import PointMap, draw_panels
from polyfed.lab.analysis.projections import drawn, lda
from polyfed.lab.analysis.results import AnalysisResult
from polyfed.reporting.tables import TextTable, format_number
from polyfed.runs.opened import ServerModel

BY = ("data", "class")
_LISTED = 40  # distances in the table


def centre_distances(centres: Float[Tensor, "c d"]) -> tuple[Float[Tensor, "c c"], Float[Tensor, "c c"]]:
    """Euclidean and cosine distances (1 - cos; 1 for a centre at the origin) of all pairs of centres, in float64."""
    centres = centres.double()
    unit = F.normalize(centres, dim=1)
    euclidean = torch.linalg.vector_norm(centres[:, None] - centres, dim=-1)
    return euclidean, (1 - unit @ unit.T).clamp(0, 2).fill_diagonal_(0)


@dataclass(frozen=True)
class Centres:
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
) -> Centres:
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
    if by not in BY:
        raise ConfigError(f"by '{by}'; {nearest(by, BY)}")
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
    return Centres(server.run.name, server.round, split, tuple(groups), modalities, counts, means, maps)


def _maps(model: str, groups: Mapping[str, Float[Tensor, "n d"]], modalities: Sequence[str]) -> list[PointMap]:
    # modalities apart, since they lie farther from each other than anything within one; then all together
    shown = {one: [name for name, own in zip(groups, modalities, strict=True) if own == one] for one in modalities}
    if len(shown) > 1:
        shown["all modalities"] = list(groups)
    return [
        PointMap(f"{model}: {title}", _projected({name: groups[name] for name in names}), has_centres=True)
        for title, names in shown.items()
        if len(names) > 1
    ]


def _projected(groups: Mapping[str, Float[Tensor, "n d"]]) -> dict[str, Float[Tensor, "n 2"]]:
    sizes = [len(rows) for rows in groups.values()]
    codes = torch.repeat_interleave(torch.arange(len(groups)), torch.tensor(sizes))
    return dict(zip(groups, torch.split(lda(torch.cat(list(groups.values())), codes), sizes), strict=True))


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
            raise ConfigError(f"'{split.source}' has no targets, hence no classes; use --by data, or leave it out")
    if by == "data" and number < 2:
        raise ConfigError("one data set of one modality has one centre and no distance; name more, or use --by class")


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


def centres_of_runs(by: str, runs: Sequence[Centres]) -> AnalysisResult:
    """Centres of the same data sets in the models of several runs, side by side."""
    content = {"by": by, "runs": [centres.to_json() for centres in runs]}
    maps = [each for centres in runs for each in centres.maps]
    picture = partial(draw_panels, "Representations, projected by LDA", maps, max(len(each.maps) for each in runs))
    return AnalysisResult(content, [centres.table() for centres in runs], picture)
