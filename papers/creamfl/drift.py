"""Model drift: how differently clients represent the same public samples (CreamFL, section 4.4 and figure 3)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, combinations
from typing import Any

import torch
from jaxtyping import Float, Int64
from papers.drawing import Matrix, PointMap, draw_panels
from papers.projections import Method, Projection, drawn, project
from pydantic import Field
from torch import Tensor

from polyfed.core.device import cpu_threads
from polyfed.core.errors import ConfigError, DataError
from polyfed.data.samples import Samples
from polyfed.lab.analysis.analysis import Analysis, AnalysisResult, ModelName
from polyfed.models.model import Model, ModelSettings
from polyfed.reporting.tables import TextTable, format_number
from polyfed.runs.opened import Run
from polyfed.runs.records import SERVER

LEAST_SAMPLES = 4
"""Samples that the debiased estimate needs."""

_ROWS = 64  # rows of the kernel matrices that are in memory at a time
_NOTHING = 1e-6  # spread, as a share of the size of the vectors, below which they count as one vector


def linear_cka(representations: Sequence[Float[Tensor, "n _"]]) -> Float[Tensor, "p p"]:
    """Debiased linear CKA of every two of p sets of vectors of the same n samples, in float64.

    CKA(X, Y) = HSIC(X, Y) / sqrt(HSIC(X, X) HSIC(Y, Y)) (Kornblith et al., ICML 2019, Eq. 2) with linear kernels and
    the unbiased HSIC (Song et al., JMLR 2012, Eq. 5): for kernel matrices without their diagonals and centred so that
    all rows and columns sum to 0, it is their inner product over n (n - 3). The usual, biased estimate rises with
    d / n even for unrelated vectors; this one is 0 in expectation for these, and may be slightly negative.

    1 for vectors that differ by rotation, shift and one scale; widths may differ. NaN for vectors that are all equal.
    Memory is that of the vectors, not of n x n matrices.

    Raises:
        DataError: fewer than 4 samples, sets of different sizes, or values that are not finite.
    """
    sizes = sorted({len(x) for x in representations})
    if len(sizes) != 1 or sizes[0] < LEAST_SAMPLES or not all(map(_is_finite, representations)):
        raise DataError(
            f"no kernel alignment of sets of {', '.join(map(str, sizes)) or 'no'} vectors: "
            f"it needs one finite vector for each of at least {LEAST_SAMPLES} samples in all sets"
        )
    n, centred = sizes[0], [_centred(x.double().cpu()) for x in representations]
    offsets = torch.stack([_offsets(x) for x in centred])
    products = torch.zeros(len(centred), len(centred), dtype=torch.float64)
    for rows in torch.split(torch.arange(n), _ROWS):
        kernels = torch.stack([x[rows] @ x.T for x in centred]) - offsets[:, rows, None] - offsets[:, None, :]
        kernels[:, torch.arange(len(rows)), rows] = 0
        flat = kernels.flatten(1)
        products += flat @ flat.T
    # unbiased estimates of unrelated sets may be below 0
    norms = products.diagonal().clamp(min=0).sqrt()
    return (products / (norms[:, None] * norms)).clamp(-1, 1)


def _is_finite(x: Tensor) -> bool:
    return bool(x.isfinite().all())


def _centred(x: Float[Tensor, "n d"]) -> Float[Tensor, "n d"]:
    # scaled too, as squares of large values would lose the differences; what is left of equal vectors is rounding
    centred: Tensor = x - x.mean(0)
    spread, size = (float(value.abs().max()) if value.numel() else 0.0 for value in (centred, x))
    return torch.zeros_like(centred) if spread <= _NOTHING * size else centred / spread


def _offsets(x: Float[Tensor, "n d"]) -> Float[Tensor, " n"]:
    """o with o_i + o_j to be taken from entry (i, j) of x x^T so that rows sum to 0, the diagonal left out."""
    n = len(x)
    sums = x @ x.sum(0) - x.square().sum(1)  # of rows, without the diagonal
    return sums / (n - 2) - sums.sum() / (2 * (n - 1) * (n - 2))


PAIRS = {"all": "all pairs", "same": "same group", "different": "different groups", "server": "client and server"}
_POINTS = 1000  # on a map, of all participants together
_METHODS = {"tsne": "t-SNE", "pca": "principal components"}


class Drift(Analysis):
    """Measure how differently clients and server represent the same public samples, and draw these on a map."""

    samples: int = Field(default=250, ge=4, description="public samples at most, at random")
    method: Projection = "tsne"
    model: ModelName = "last"

    def answer(self, run: Run) -> AnalysisResult:
        number, modalities = drifts_of(run, self.model, self.samples, self.method)
        return drift_result(run.name, number, self.method, modalities)


@dataclass(frozen=True)
class Represented:
    """How a client or the server represents the samples.

    Attributes:
        name: client id, or ``server``.
        group: of the client; None: it is the server.
        round: after which its model was kept.
        values: modality -> representations of the same samples [n, d], of unit norm.
    """

    name: str
    group: str | None
    round: int
    values: dict[str, Float[Tensor, "n d"]]


@dataclass(frozen=True)
class PairMeans:
    """Means over pairs of participants; NaN without pairs."""

    pairs: int
    distance: float
    cka: float


@dataclass(frozen=True)
class ModalityDrift:
    """Differences of everybody who encodes one modality: clients in their order, then the server if it does.

    Attributes:
        modality: its name.
        names: Names of the p participants.
        groups: of the participants; None: the server.
        rounds: after which their models were kept.
        distances: mean over the samples of the distance of two participants' representations, 0 to 2; NaN between
            different widths.
        alignment: debiased linear CKA.
        mapped: positions of the participants on the map, those of the most frequent width.
        points: their samples on the map, the same few of each.
    """

    modality: str
    names: tuple[str, ...]
    groups: tuple[str | None, ...]
    rounds: tuple[int, ...]
    distances: Float[Tensor, "p p"]
    alignment: Float[Tensor, "p p"]
    mapped: tuple[int, ...]
    points: Float[Tensor, "m k 2"]

    @property
    def clients(self) -> tuple[int, ...]:
        return tuple(position for position, group in enumerate(self.groups) if group is not None)

    @property
    def server(self) -> int | None:
        return self.groups.index(None) if None in self.groups else None

    def between(self, kind: str) -> PairMeans:
        """Means over pairs of clients: ``all``, of the ``same`` group or of ``different`` ones; or with the
        ``server``."""
        if kind == "server":
            return self.over([(position, self.server) for position in self.clients if self.server is not None])
        pairs = combinations(self.clients, 2)
        wanted = {"all": (True, False), "same": (True,), "different": (False,)}[kind]
        return self.over([(i, j) for i, j in pairs if (self.groups[i] == self.groups[j]) in wanted])

    def of_client(self, position: int) -> PairMeans:
        return self.over([(position, other) for other in self.clients if other != position])

    def over(self, pairs: Sequence[tuple[int, int]]) -> PairMeans:
        """Means over some pairs of positions; NaN entries do not count."""
        chosen = tuple(torch.tensor(pairs, dtype=torch.int64).reshape(-1, 2).unbind(1))
        return PairMeans(len(pairs), float(self.distances[chosen].nanmean()), float(self.alignment[chosen].nanmean()))

    def to_json(self) -> dict[str, Any]:
        return {
            "participants": self.names,
            "groups": self.groups,
            "rounds": self.rounds,
            "distances": self.distances.tolist(),
            "cka": self.alignment.tolist(),
            "means": {kind: vars(self.between(kind)) for kind in PAIRS},
            "mapped": self.mapped,
        }


def drift_result(run: str, samples: int, method: Method, modalities: Sequence[ModalityDrift]) -> AnalysisResult:
    """``modalities``: those that two participants or more encode."""
    panels: list[Matrix | PointMap] = []
    for each in modalities:
        points = {each.names[position]: own for position, own in zip(each.mapped, each.points, strict=True)}
        panels.append(PointMap(f"{each.modality}: {_METHODS[method]}", points))
        title = f"{each.modality}: debiased linear CKA"
        panels.append(Matrix(title, "", each.names, each.names, each.alignment, limits=(0, 1)))
    by_modality = {each.modality: each.to_json() for each in modalities}
    return AnalysisResult(
        {"run": run, "samples": samples, "method": method, "modalities": by_modality},
        [_table(run, samples, each) for each in modalities],
        partial(draw_panels, f"{run}: {samples} public samples as everybody represents them", panels, 2),
    )


def _table(run: str, samples: int, each: ModalityDrift) -> TextTable:
    """Each client, then means over pairs."""
    note = (
        f"Mean distance of unit vectors (0 to 2), and debiased linear CKA, of the same {samples} public "
        "samples; round: after which the model was kept."
    )

    def cells(means: PairMeans) -> tuple[str, str]:
        return format_number(means.distance, 3), format_number(means.cka, 3)

    rows = []
    for position in each.clients:
        server = each.over([] if each.server is None else [(position, each.server)])
        rows.append(
            (each.names[position], str(each.rounds[position]), *cells(each.of_client(position)), *cells(server))
        )
    for kind, title in PAIRS.items():
        means = each.between(kind)
        of_kind = ("", "", *cells(means)) if kind == "server" else (*cells(means), "", "")
        rows.append((f"mean, {title} ({means.pairs})", "", *of_kind))
    columns = ("", "round", "distance to clients", "CKA", "distance to server", "CKA")
    return TextTable(f"{run}: drift of {each.modality}", columns, rows, (note,))


def drifts_of(run: Run, which: str, samples: int, method: Method) -> tuple[int, list[ModalityDrift]]:
    """Number of samples, and each modality as every client's kept model and the server's represent it.

    Raises:
        ConfigError: no public set, too few samples, or no modality that two participants encode.
        RunError: a kept model is missing or damaged.
        DataError: a model has diverged.
    """
    index = _public_index(run, samples)
    with cpu_threads(run.experiment.run.threads):
        participants = list(_participants(run, which, index))
        names = dict.fromkeys(chain.from_iterable(each.values for each in participants))
        encoding = {name: [each for each in participants if name in each.values] for name in names}
        modalities = [modality_drift(name, who, method) for name, who in encoding.items() if len(who) > 1]
    if not modalities:
        raise ConfigError(f"no two participants of '{run.folder}' encode the same modality of the public set")
    return len(index), modalities


def _public_index(run: Run, samples: int) -> Int64[Tensor, " n"]:
    """The same for everybody: public samples have one order."""
    if run.experiment.public is None:
        raise ConfigError(
            f"run '{run.folder}' has no public set, and so no common samples; "
            "give a run whose configuration has a 'public' section"
        )
    public = run.federation.public_samples({})
    assert public is not None
    first = one_of_each_item(public.items)
    if min(len(first), samples) < LEAST_SAMPLES:
        raise ConfigError(f"{min(len(first), samples)} public samples are too few to compare; it takes {LEAST_SAMPLES}")
    return first[drawn(len(first), samples, "drift")]


def modality_drift(modality: str, participants: Sequence[Represented], method: Method = "pca") -> ModalityDrift:
    """Compare participants that represent the same samples in ``modality``; at least two, clients before the server."""
    values = [participant.values[modality] for participant in participants]
    widths = [rows.shape[1] for rows in values]
    mapped = tuple(position for position, width in enumerate(widths) if width == max(widths, key=widths.count))
    # widths that differ have no common map
    shown = torch.stack([values[position] for position in mapped])[:, : max(1, _POINTS // len(mapped))]
    return ModalityDrift(
        modality=modality,
        names=tuple(participant.name for participant in participants),
        groups=tuple(participant.group for participant in participants),
        rounds=tuple(participant.round for participant in participants),
        distances=mean_distances(values),
        alignment=linear_cka(values),
        mapped=mapped,
        points=project(shown.flatten(0, 1), method).view(len(mapped), -1, 2),
    )


def mean_distances(values: Sequence[Float[Tensor, "n _"]]) -> Float[Tensor, "p p"]:
    """Mean over n samples of the Euclidean distance of every two sets' vectors of a sample, in float64."""
    means = torch.full((len(values), len(values)), math.nan, dtype=torch.float64).fill_diagonal_(0)
    for (i, first), (j, second) in combinations(enumerate(values), 2):
        if first.shape == second.shape:
            means[i, j] = means[j, i] = torch.linalg.vector_norm(first.double() - second.double(), dim=1).mean()
    return means


def one_of_each_item(items: Int64[Tensor, " n"]) -> Int64[Tensor, " k"]:
    values, inverse = torch.unique(items, return_inverse=True)
    first = torch.full((len(values),), len(items))
    return first.scatter_reduce(0, inverse, torch.arange(len(items)), "amin").sort().values


@torch.no_grad()
def public_representations(
    model: Model, modality: str, samples: Samples, index: Int64[Tensor, " n"], batch: int, whose: str
) -> Float[Tensor, "n d"]:
    """Representations (unit norm) of some samples in one modality, on the CPU.

    Raises:
        DataError: one is not finite.
    """
    load, rows = samples.inputs[modality], samples.rows[modality][index]
    parts = [model.represent(modality, load(part).to(model.device)).float().cpu() for part in torch.split(rows, batch)]
    values = torch.cat(parts)
    if not bool(values.isfinite().all()):
        raise DataError(f"representations of '{modality}' by {whose} hold NaN or infinity: its model has diverged")
    return values


def _participants(run: Run, which: str, index: Int64[Tensor, " n"]) -> Iterator[Represented]:
    def represented(model: Model, settings: ModelSettings, whose: str) -> dict[str, Tensor]:
        public = run.federation.public_samples({name: each.view for name, each in settings.encoders.items()})
        assert public is not None
        batch = run.experiment.run.evaluation_batch
        return {name: public_representations(model, name, public, index, batch, whose) for name in public.modalities}

    for client, (number, _) in run.clients.items():
        member = run.federation.members[client]
        values = represented(run.client_model(client), member.model, f"client '{client}'")
        yield Represented(client, member.group, number, values)
    if run.experiment.server is not None:
        server = run.server_model(which)
        server.warn_if_untrained()
        yield Represented(SERVER, None, server.round, represented(server.model, server.settings, "the server"))
