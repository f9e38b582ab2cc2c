"""Centres of data sets (or of their classes) in a model's representations, their distances, and a 2-d picture.

FedCola, appendix B.7: the distances between the centres of uni-modal and multi-modal data sets say how far apart the
model keeps them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int64
from torch import Tensor
from torch.nn import functional as F

from polyfed.analysis.encoders import Encoders, drawn, encoders_of, require_different
from polyfed.analysis.lda import lda
from polyfed.core.device import cpu_threads
from polyfed.core.errors import ConfigError, nearest
from polyfed.data.samples import Samples
from polyfed.data.source import Split
from polyfed.runs.opened import ServerModel

BY = ("data", "class")
SHOWN = 200
"""Points of a group in a picture."""
ALL = "all modalities"


@dataclass(frozen=True)
class Distances:
    """Distances of all pairs of c centres; cosine distance is 1 - cos, and 1 for a centre at the origin."""

    euclidean: Float[Tensor, "c c"]
    cosine: Float[Tensor, "c c"]

    @classmethod
    def of(cls, centres: Float[Tensor, "c d"]) -> Distances:
        """In float64; each matrix is symmetric with a diagonal of zeros."""
        centres = centres.double()
        unit = F.normalize(centres, dim=1)
        euclidean = torch.linalg.vector_norm(centres[:, None] - centres, dim=-1)
        return cls(euclidean, (1 - unit @ unit.T).clamp(0, 2).fill_diagonal_(0))


@dataclass(frozen=True)
class Picture:
    """Some groups of representations, projected by LDA to two dimensions.

    Attributes:
        groups: numbers of the groups [g].
        points: coordinates of at most 200 representations of each group [m, 2].
        labels: group number of each point [m].
        places: coordinates of the groups' centres [g, 2].
        ratios: variance between over variance within groups along the two axes [2].
    """

    groups: tuple[int, ...]
    points: Float[Tensor, "m 2"]
    labels: Int64[Tensor, " m"]
    places: Float[Tensor, "g 2"]
    ratios: Float[Tensor, " 2"]

    @classmethod
    def of(cls, groups: Mapping[int, Float[Tensor, "n d"]]) -> Picture:
        """Project groups, given by number; at least two."""
        sizes = torch.tensor([len(rows) for rows in groups.values()])
        found = lda(torch.cat(list(groups.values())), torch.repeat_interleave(torch.tensor(list(groups)), sizes))
        return cls(
            groups=tuple(groups),
            points=found.project(torch.cat([rows[:SHOWN] for rows in groups.values()])),
            labels=torch.repeat_interleave(torch.tensor(list(groups)), sizes.clamp(max=SHOWN)),
            places=found.project(torch.stack([rows.double().mean(0) for rows in groups.values()])),
            ratios=found.ratios,
        )


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
    pictures: Mapping[str, Picture]

    @property
    def distances(self) -> Distances:
        """Between the centres."""
        return Distances.of(self.values)

    def to_json(self) -> dict[str, Any]:
        """Names, sizes and distances, without points."""
        distances = self.distances
        return {
            "run": self.run,
            "round": self.round,
            "split": self.split,
            "groups": list(self.names),
            "modalities": list(self.modalities),
            "counts": self.counts.tolist(),
            "euclidean": distances.euclidean.tolist(),
            "cosine": distances.cosine.tolist(),
            "lda_ratios": {title: picture.ratios.tolist() for title, picture in self.pictures.items()},
        }


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
    _require(encoders, splits, by)
    with cpu_threads(server.run.conditions.run.threads):
        groups: dict[str, Tensor] = {}
        for modality in encoders.views:
            for part in splits:
                if modality in part.columns:
                    groups |= _groups(encoders, part, modality, by, most)
        return _centres(server, split, groups)


def _require(encoders: Encoders, splits: Sequence[Split], by: str) -> None:
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
    samples = encoders.samples(split, modality)
    rows = torch.unique(samples.rows[modality])
    rows = rows[drawn(len(rows), most, "centres", split.source, modality)]
    values = torch.cat(list(encoders.embeddings(samples, modality, rows)))
    if by == "data":
        return {f"{modality}: {split.source}": values}
    labels, names = _labels(samples, modality, next(iter(split.targets)))
    return {
        f"{modality}: {split.source} / {names.get(label, label)}": values[labels[rows] == label]
        for label in sorted(set(labels[rows].tolist()))
    }


def _labels(samples: Samples, modality: str, target: str) -> tuple[Int64[Tensor, " rows"], dict[int, str]]:
    """Class of each row of a modality (of several samples that share a row, the last one's), and names of classes."""
    labels = torch.full((len(samples.inputs[modality]),), -1)
    labels[samples.rows[modality]] = samples.targets[target]
    return labels, dict(enumerate(samples.classes.get(target, ())))


def _centres(server: ServerModel, split: str, groups: Mapping[str, Float[Tensor, "n d"]]) -> Centres:
    modalities = tuple(name.partition(":")[0] for name in groups)
    return Centres(
        run=server.run.name,
        round=server.round,
        split=split,
        names=tuple(groups),
        modalities=modalities,
        counts=torch.tensor([len(rows) for rows in groups.values()]),
        values=torch.stack([rows.double().mean(0) for rows in groups.values()]),
        pictures=_pictures(list(groups.values()), modalities),
    )


def _pictures(groups: Sequence[Float[Tensor, "n d"]], modalities: Sequence[str]) -> dict[str, Picture]:
    """Modalities apart, since they lie farther from each other than anything within one; then all together."""
    chosen = {name: [k for k, own in enumerate(modalities) if own == name] for name in dict.fromkeys(modalities)}
    if len(chosen) > 1:
        chosen[ALL] = list(range(len(groups)))
    return {title: Picture.of({k: groups[k] for k in numbers}) for title, numbers in chosen.items() if len(numbers) > 1}
