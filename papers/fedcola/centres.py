"""Centres of data sets in a model's representations, their distances, and a map.

FedCola, appendix B.7: the distances between the centres of uni-modal and multi-modal data sets measure how far apart
the model keeps them; figure 8c shows the representations by linear discriminant analysis.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import combinations
from typing import Any

import torch
from jaxtyping import Float, Int64
from papers.drawing import PointMap, draw_panels
from papers.projections import drawn, pca
from pydantic import Field
from torch import Tensor
from torch.nn import functional as F

from polyfed.core.device import cpu_threads
from polyfed.core.errors import ConfigError, DataError, nearest
from polyfed.core.extras import brought_by
from polyfed.data.assembly import assemble
from polyfed.data.samples import Samples
from polyfed.data.source import Split
from polyfed.lab.analysis.analysis import Analysis, AnalysisResult, ModelName, server_model
from polyfed.reporting.tables import TextTable, format_number
from polyfed.runs.opened import Run, ServerModel


class Centres(Analysis):
    """Measure how far apart a server model keeps data sets, and draw them."""

    data: list[str] | None = Field(default=None, description="sources; by default all of the run")
    split: str = Field(default="test", description="split of all of them")
    samples: int = Field(default=1000, ge=1, description="at most so many of each, at random")
    model: ModelName = "last"

    def answer(self, run: Run) -> AnalysisResult:
        centres = run_centres(server_model(run, self.model), self.data, split=self.split, most=self.samples)
        draw = partial(draw_panels, "Representations, projected by LDA", [centres.map], 1)
        return AnalysisResult(centres.to_json(), [centres.table()], draw)


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
        names: of the groups: ``<modality>: <data set>``.
        modalities: Modality of each group.
        counts: representations in each group [c].
        values: the centres [c, d].
        map: all representations, by linear discriminant analysis.
    """

    run: str
    round: int
    split: str
    names: tuple[str, ...]
    modalities: tuple[str, ...]
    counts: Int64[Tensor, " c"]
    values: Float[Tensor, "c d"]
    map: PointMap

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
                *(format_number(float(distances[i, j]), 4) for distances in (euclidean, cosine)),
            )
            for i, j in pairs
        ]
        title = f"{self.run}, round {self.round}: distances of centres"
        return TextTable(title, ("between", "Euclidean", "cosine"), rows)


def run_centres(
    server: ServerModel, sources: Sequence[str] | None = None, *, split: str = "test", most: int | None = 1000
) -> RunCentres:
    """Centres in the representations (unit norm) of a run's server model.

    Args:
        server: the model.
        sources: data sets; by default all of the run.
        split: Split of the data sets.
        most: at most so many samples of a data set and modality, drawn at random; None: all.

    Raises:
        ConfigError: a source is unknown, or has no modality that the model encodes; or there are fewer than two groups.
        DataError: a source has no such split, or the model has diverged.
    """
    names = list(server.run.conditions.data.sources) if sources is None else list(sources)
    if twice := [name for name in names if names.count(name) > 1]:
        raise ConfigError(f"data sets: '{twice[0]}' is named {names.count(twice[0])} times; name it once")
    splits = [_split(server, name, split) for name in names]
    _require_groups(server, splits)
    groups: dict[str, Tensor] = {}
    with cpu_threads(server.run.conditions.run.threads):
        for modality in server.views:
            for part in splits:
                if modality in part.columns:
                    groups[f"{modality}: {part.source}"] = _group(server, part, modality, most)
        shown = PointMap(f"{server.run.name}, round {server.round}", discriminants(groups), has_centres=True)
    modalities = tuple(name.partition(":")[0] for name in groups)
    counts = torch.tensor([len(rows) for rows in groups.values()])
    means = torch.stack([rows.double().mean(0) for rows in groups.values()])
    return RunCentres(server.run.name, server.round, split, tuple(groups), modalities, counts, means, shown)


def discriminants(groups: Mapping[str, Float[Tensor, "_ d"]]) -> dict[str, Float[Tensor, "_ 2"]]:
    """Points of each group along the axes that separate groups best, by scikit-learn; two groups have one axis.

    Groups without any width are separated by principal components.
    """
    with brought_by("lab"):
        from sklearn.discriminant_analysis import LinearDiscriminantAnalysis

    x = torch.cat(list(groups.values())).double()
    sizes = [len(rows) for rows in groups.values()]
    if all(bool((rows == rows[0]).all()) for rows in groups.values()):
        points = pca(x)
    else:
        codes = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
        axes = torch.from_numpy(LinearDiscriminantAnalysis().fit_transform(x.numpy(), codes.numpy()))[:, :2]
        points = F.pad(axes, (0, 2 - axes.shape[1]))
    return dict(zip(groups, torch.split(points, sizes), strict=True))


def _split(server: ServerModel, source: str, name: str) -> Split:
    data = server.run.conditions.data
    if source not in data.sources:
        raise ConfigError(f"no source '{source}' in data.sources; {nearest(source, data.sources)}")
    return data.sources[source].open(name, name=source, data_dir=data.data_folder)


def _require_groups(server: ServerModel, splits: Sequence[Split]) -> None:
    number = 0
    for split in splits:
        encoded = [name for name in server.views if name in split.columns]
        number += len(encoded)
        if not encoded:
            raise ConfigError(
                f"'{split.source}' has {', '.join(split.columns) or 'no modality'}, of which the model encodes none "
                f"(it encodes {', '.join(server.views)}); leave it out"
            )
    if number < 2:
        raise ConfigError("one data set of one modality has one centre and no distance; name more")


def representations(server: ServerModel, samples: Samples, modality: str, rows: Int64[Tensor, " n"]) -> Tensor:
    """Representations of unit norm [n, d], on the CPU.

    Raises:
        DataError: one is not finite.
    """
    load, model = samples.inputs[modality], server.model
    parts = torch.split(rows, server.run.conditions.run.evaluation_batch)
    with torch.no_grad():
        values = torch.cat([model.represent(modality, load(part).to(model.device)).float().cpu() for part in parts])
    if not bool(values.isfinite().all()):
        raise DataError(f"representations of '{modality}' hold NaN or infinity: the model has diverged")
    return values


def _group(server: ServerModel, split: Split, modality: str, most: int | None) -> Float[Tensor, "n d"]:
    """Representations of a data set in a modality."""
    samples = assemble(split, {modality: server.views[modality]}, server.context).having(modality)
    rows = torch.unique(samples.rows[modality])  # siblings share an image, which counts once
    return representations(server, samples, modality, rows[drawn(len(rows), most, "centres", split.source, modality)])
