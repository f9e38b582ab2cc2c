"""Centres of data sets (or of their classes) in a model's representations, their distances, and a 2-d picture.

FedCola, appendix B.7: the distances between the centres of uni-modal and multi-modal data sets say how far apart the
model keeps them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, combinations, product
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float, Int64
from torch import Tensor
from torch.nn import functional as F

from polyfed.core.device import cpu_threads
from polyfed.core.errors import ConfigError, nearest
from polyfed.data.source import Split
from polyfed.lab.analysis.drawing import MARKERS
from polyfed.lab.analysis.encoders import Encoders, drawn, encoders_of, require_different
from polyfed.lab.analysis.projections import class_means, lda
from polyfed.lab.analysis.results import AnalysisResult
from polyfed.reporting.figures import COLOURS, figure_grid, styled
from polyfed.reporting.tables import TextTable, figure
from polyfed.runs.opened import ServerModel

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BY = ("data", "class")
ALL_MODALITIES = "all modalities"
_POINTS = 200  # of a group in a picture
_LISTED = 40  # distances in the table
_NAMED = 16  # groups up to which the picture has a legend


def centre_distances(centres: Float[Tensor, "c d"]) -> tuple[Float[Tensor, "c c"], Float[Tensor, "c c"]]:
    """Euclidean and cosine distances (1 - cos; 1 for a centre at the origin) of all pairs of centres, in float64."""
    centres = centres.double()
    unit = F.normalize(centres, dim=1)
    euclidean = torch.linalg.vector_norm(centres[:, None] - centres, dim=-1)
    return euclidean, (1 - unit @ unit.T).clamp(0, 2).fill_diagonal_(0)


@dataclass(frozen=True)
class GroupMap:
    """Some groups of representations, projected by LDA to two dimensions.

    Attributes:
        groups: numbers of the groups [g].
        points: coordinates of at most 200 representations of each group [m, 2].
        labels: group number of each point [m].
        places: coordinates of the groups' centres [g, 2].
        ratios: variance between over (shrunk) variance within groups along the two axes [2].
    """

    groups: tuple[int, ...]
    points: Float[Tensor, "m 2"]
    labels: Int64[Tensor, " m"]
    places: Float[Tensor, "g 2"]
    ratios: Float[Tensor, " 2"]

    @classmethod
    def of(cls, groups: Mapping[int, Float[Tensor, "n d"]]) -> GroupMap:
        """Project groups, given by number; at least two."""
        numbers, sizes = torch.tensor(list(groups)), torch.tensor([len(rows) for rows in groups.values()])
        codes = torch.repeat_interleave(torch.arange(len(groups)), sizes)
        projected = lda(torch.cat(list(groups.values())), codes)
        means, _ = class_means(projected, codes)
        ratios = (means[codes] - projected.mean(0)).square().mean(0)  # of axes with unit variance within
        points = torch.cat([rows[:_POINTS] for rows in torch.split(projected, sizes.tolist())])
        labels = torch.repeat_interleave(numbers, sizes.clamp(max=_POINTS))
        return cls(tuple(groups), points, labels, means, ratios)


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
        pictures: title -> projection: one of each modality with several groups, and one of all modalities.
    """

    run: str
    round: int
    split: str
    names: tuple[str, ...]
    modalities: tuple[str, ...]
    counts: Int64[Tensor, " c"]
    values: Float[Tensor, "c d"]
    pictures: Mapping[str, GroupMap]

    def to_json(self) -> dict[str, Any]:
        """Names, sizes and distances, without points."""
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
            "lda_ratios": {title: picture.ratios.tolist() for title, picture in self.pictures.items()},
        }

    def table(self) -> TextTable:
        """Distances of all pairs of centres, the farthest first."""
        euclidean, cosine = centre_distances(self.values)
        pairs = sorted(combinations(range(len(self.names)), 2), key=lambda pair: -float(euclidean[pair]))
        rows = [
            (f"{self.names[i]} - {self.names[j]}", *(figure(float(kind[i, j]), 4) for kind in (euclidean, cosine)))
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
    require_different(names, "data sets")
    encoders = encoders_of(server, normalise=True)
    splits = [encoders.split(name, split) for name in names]
    _require_groups(encoders, splits, by)
    groups: dict[str, Tensor] = {}
    with cpu_threads(server.run.conditions.run.threads):
        for modality in encoders.views:
            for part in splits:
                if modality in part.columns:
                    groups |= _groups(encoders, part, modality, by, most)
        modalities = tuple(name.partition(":")[0] for name in groups)
        pictures = _pictures(list(groups.values()), modalities)
    counts = torch.tensor([len(rows) for rows in groups.values()])
    means = torch.stack([rows.double().mean(0) for rows in groups.values()])
    return Centres(server.run.name, server.round, split, tuple(groups), modalities, counts, means, pictures)


def _pictures(groups: Sequence[Float[Tensor, "n d"]], modalities: Sequence[str]) -> dict[str, GroupMap]:
    # modalities apart, since they lie farther from each other than anything within one; then all together
    shown = {name: [k for k, own in enumerate(modalities) if own == name] for name in dict.fromkeys(modalities)}
    if len(shown) > 1:
        shown[ALL_MODALITIES] = list(range(len(groups)))
    return {title: GroupMap.of({k: groups[k] for k in ks}) for title, ks in shown.items() if len(ks) > 1}


def _require_groups(encoders: Encoders, splits: Sequence[Split], by: str) -> None:
    for split in splits:
        if not encoders.modalities(split):
            raise ConfigError(
                f"'{split.source}' has {', '.join(split.columns) or 'no modality'}, of which the model encodes none "
                f"(it encodes {', '.join(encoders.views)}); leave it out"
            )
        if by == "class" and not split.targets:
            raise ConfigError(f"'{split.source}' has no targets, hence no classes; use --by data, or leave it out")
    if by == "data" and sum(len(encoders.modalities(split)) for split in splits) < 2:
        raise ConfigError("one data set of one modality has one centre and no distance; name more, or use --by class")


def _groups(encoders: Encoders, split: Split, modality: str, by: str, most: int | None) -> Mapping[str, Tensor]:
    """Name of a group -> its representations [n, d]."""
    samples = encoders.samples(split, modality).having(modality)
    rows = torch.unique(samples.rows[modality])  # siblings share a picture, which counts once
    rows = rows[drawn(len(rows), most, "centres", split.source, modality)]
    values = torch.cat(list(encoders.embeddings(samples, modality, rows)))
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
    return AnalysisResult(content, [centres.table() for centres in runs], partial(_draw, runs))


@styled
def _draw(runs: Sequence[Centres]) -> Figure:
    """LDA projections, a column a run and a row a modality; small marks are samples, large ones centres.

    The marker tells the modality and the colour the data set (or class), the same in all runs.
    """
    titles = list(dict.fromkeys(chain.from_iterable(centres.pictures for centres in runs)))
    drawing, axes = figure_grid(len(titles), len(runs), title="Representations, projected by LDA")
    names = {
        name: modality for centres in runs for name, modality in zip(centres.names, centres.modalities, strict=True)
    }
    data = list(dict.fromkeys(name.partition(": ")[2] for name in names))
    modalities = list(dict.fromkeys(names.values()))
    looks: dict[str, Any] = {}
    for name, modality in names.items():
        colour, marker = data.index(name.partition(": ")[2]), modalities.index(modality)
        looks[name] = {"color": COLOURS[colour % len(COLOURS)], "marker": MARKERS[marker % len(MARKERS)]}
    handles: dict[str, Any] = {}  # one legend for all panels, which share their groups
    for panel, (title, centres) in zip(axes, product(titles, runs), strict=True):
        panel.set(title=f"{centres.run}, round {centres.round}: {title}", xlabel="first axis", ylabel="second axis")
        if title not in centres.pictures:
            panel.set_axis_off()
            continue
        picture = centres.pictures[title]
        for k, (x, y) in zip(picture.groups, picture.places.tolist(), strict=True):
            name, points = centres.names[k], picture.points[picture.labels == k]
            panel.scatter(points[:, 0], points[:, 1], s=8, alpha=0.35, linewidths=0, **looks[name])
            handles[name] = panel.scatter([x], [y], s=110, edgecolors="black", linewidths=1, **looks[name])
    if len(names) <= _NAMED:
        drawing.legend(list(handles.values()), list(handles), loc="outside lower left", ncols=2 * len(runs))
    return drawing
