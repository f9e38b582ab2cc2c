"""Local, global and fused features of a client's test samples (FedAFD, supplement, figures 1 and 2)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int64
from papers.drawing import PointMap, draw_panels
from papers.projections import Projection, drawn, project
from pydantic import Field
from torch import Tensor
from torch.nn import functional as F

from polyfed.algorithms.fedafd import FedAFD
from polyfed.algorithms.shared.guided_fusion import GuidedFusion
from polyfed.core.device import cpu_threads
from polyfed.core.errors import ConfigError, nearest
from polyfed.core.extras import brought_by
from polyfed.data.samples import Samples
from polyfed.federation.membership import Member
from polyfed.lab.analysis.analysis import Analysis, AnalysisResult
from polyfed.models.fusion import FusionGuidance, of_rows
from polyfed.reporting.tables import TextTable, format_number
from polyfed.runs.opened import Run
from polyfed.tasks.classification import Classification


class Features(Analysis):
    """Compare a client's own features, those of the server's encoders, and both fused (FedAFD), by class."""

    client: str | None = Field(default=None, description="a client that classifies; by default the first")
    samples: int | None = Field(default=1000, ge=1, description="test samples at most, at random; null: all")
    method: Projection = "tsne"

    def answer(self, run: Run) -> AnalysisResult:
        seen = features_by_kind(run, self.client, self.samples)
        client, labels = seen.client, seen.labels
        with cpu_threads(run.experiment.run.threads):
            units = {origin: F.normalize(values, dim=1) for origin, values in seen.values.items()}
            measures: dict[str, dict[str, Any]] = {}
            for origin, unit in units.items():
                measures[origin] = vars(Separation.of(unit, labels)) | {"head": seen.metrics[origin]}
            shown = drawn(len(labels), MOST_POINTS, "features on maps", client)
            points_by_origin = {origin: project(unit[shown], self.method) for origin, unit in units.items()}
            together = project(torch.cat([unit[shown] for unit in units.values()]), self.method)
        content = {
            "run": run.name,
            "client": client,
            "round": run.clients[client][0],
            "samples": len(labels),
            "classes": len(torch.unique(labels)),
            "features": measures,
        }
        maps = []
        for origin, points in points_by_origin.items():
            title = f"{origin}: silhouette {format_number(measures[origin]['silhouette'])}"
            maps.append(PointMap(title, _by_class(points, labels[shown], seen.classes)))
        maps.append(PointMap("all three", dict(zip(measures, together.chunk(len(measures)), strict=True))))
        picture = partial(draw_panels, f"{run.name}, client {client}: features of its test samples", maps, len(maps))
        return AnalysisResult(content, [_table(content, seen.primary)], picture)


@dataclass(frozen=True)
class Separation:
    """Measures of n labelled vectors; NaN for fewer than two classes.

    Attributes:
        silhouette: -1 to 1, higher is better (Rousseeuw 1987); 0 for a vector that is alone in its class.
        ratio: variance between classes over variance within; infinite for classes without width.
        nearest_mean: percent of the vectors that lie nearer to the mean of the others of their class than to that of
            any other class. Ties count as wrong; vectors alone in their class do not count.
    """

    silhouette: float
    ratio: float
    nearest_mean: float

    @classmethod
    def of(cls, x: Float[Tensor, "n d"], labels: Int64[Tensor, " n"]) -> Separation:
        """All measures, in float64."""
        with brought_by("lab"):
            from sklearn.metrics import silhouette_score

        x, codes = x.double().cpu(), torch.unique(labels.cpu(), return_inverse=True)[1]
        means, counts = class_means(x, codes)
        if len(counts) < 2:
            return cls(math.nan, math.nan, math.nan)
        silhouette = float(silhouette_score(x.numpy(), codes.numpy())) if len(counts) < len(x) else 0.0
        between = (means - x.mean(0)).square().sum(1) @ counts.to(x)
        ratio = float(between / (x - means[codes]).square().sum())
        return cls(silhouette, ratio, _nearest_mean(x, codes, means, counts))


def class_means(
    x: Float[Tensor, "n d"], codes: Int64[Tensor, " n"]
) -> tuple[Float[Tensor, "c d"], Int64[Tensor, " c"]]:
    """Mean and number of the points of each class 0 ... c - 1, in float64."""
    counts = torch.bincount(codes)
    sums = torch.zeros(len(counts), x.shape[1], dtype=torch.float64).index_add_(0, codes, x.double())
    return sums / counts[:, None], counts


def _nearest_mean(
    x: Float[Tensor, "n d"], codes: Int64[Tensor, " n"], means: Float[Tensor, "c d"], counts: Int64[Tensor, " c"]
) -> float:
    counted = counts[codes] > 1
    if not bool(counted.any()):
        return math.nan
    x, own, size = x[counted], codes[counted, None], counts[codes].to(x)[counted]
    # direct differences: the squared expansion would blur ties
    distances = torch.stack([torch.linalg.vector_norm(x - mean, dim=1) for mean in means], dim=1)
    inner = distances.gather(1, own)[:, 0] * size / (size - 1)  # x - mean of the others = n / (n - 1) (x - mean)
    return 100 * float((inner < distances.scatter(1, own, math.inf).amin(1)).double().mean())


ORIGINS = ("local", "global", "fused")
MOST_POINTS = 330  # samples on the maps


@dataclass(frozen=True)
class Tabled:
    """A model whose embeddings are known, by number of the row: heads are evaluated on it as on any model."""

    tables: Mapping[str, Float[Tensor, "r d"]]

    @property
    def device(self) -> torch.device:
        return next(iter(self.tables.values())).device

    def embed(self, modality: str, x: Int64[Tensor, " b"]) -> Float[Tensor, "b d"]:
        return self.tables[modality][x]

    def represent(self, modality: str, x: Int64[Tensor, " b"]) -> Float[Tensor, "b d"]:
        return F.normalize(self.embed(modality, x), dim=-1)


def _by_class(
    points: Float[Tensor, "m 2"], labels: Int64[Tensor, " m"], classes: Mapping[int, str]
) -> dict[str, Float[Tensor, "_ 2"]]:
    return {classes.get(label, str(label)): points[labels == label] for label in sorted(set(labels.tolist()))}


def _table(content: Mapping[str, Any], primary: str) -> TextTable:
    """One row a kind of features."""
    rows = [
        (
            origin,
            *(format_number(own[name], 3) for name in ("silhouette", "ratio")),
            *map(format_number, (own["nearest_mean"], own["head"][primary])),
        )
        for origin, own in content["features"].items()
    ]
    columns = ("features", "silhouette", "between / within", "nearest mean %", f"own head: {primary}")
    note = f"{content['samples']} test samples of {content['classes']} classes. The head was trained on fused features."
    title = f"{content['run']}: features of {content['client']}, round {content['round']}"
    return TextTable(title, columns, rows, (note,))


class SeenFeatures(NamedTuple):
    """A client's test samples by kind of features, as its head takes them [n, d], and the head's metrics on these."""

    client: str
    values: Mapping[str, Float[Tensor, "n d"]]
    metrics: Mapping[str, dict[str, float]]
    labels: Int64[Tensor, " n"]
    classes: Mapping[int, str]
    primary: str


def features_by_kind(run: Run, client: str | None, most: int | None) -> SeenFeatures:
    """Features of a client's test samples by its own encoders, the server's that it keeps, and their fusion.

    Raises:
        ConfigError: the method fuses nothing; no such client, or one that does not classify, has no test samples, has
            received no encoders, or shares no modality with them.
        RunError: the client's state is missing or damaged.
        DataError: features are not finite.
    """
    algorithm = run.experiment.algorithm
    if not isinstance(algorithm, FedAFD) or algorithm.fusion is None:
        raise ConfigError(
            f"clients of '{algorithm.component_name()}' in '{run.folder}' do not fuse their features with the "
            "server's; give a run of fedafd with a fusion"
        )
    client = _classifier(run, client)
    member = run.federation.members[client]
    task, model, batch = member.settings.task, run.client_model(client), run.experiment.run.evaluation_batch
    assert isinstance(task, Classification)
    values, metrics = {}, {}
    with cpu_threads(run.experiment.run.threads):
        tables, numbered = _tables(run, algorithm.fusion, member, most)
        # the head goes to where the tables are
        labels, head = numbered.targets[task.target].long(), model.heads[member.head].cpu()
        for origin, table in tables.items():
            by_modality = [table.embed(name, numbered.rows[name]) for name in numbered.modalities]
            values[origin] = torch.stack(by_modality).mean(0)
            metrics[origin] = dict(task.evaluate(table, head, numbered, batch_size=batch))
    classes = dict(enumerate(numbered.classes.get(task.target, ())))
    return SeenFeatures(client, values, metrics, labels, classes, task.primary)


def _classifier(run: Run, client: str | None) -> str:
    if client is not None:
        run.client(client)  # refuses an unknown name
    classifying = [name for name in run.clients if _classifies(run.client(name))]
    chosen = client or next(iter(classifying), "")
    if chosen not in classifying:
        who = f"not client '{client}'" if client else "no client"
        raise ConfigError(
            f"{who} of '{run.folder}' classifies test samples of its own; {nearest(client or '', classifying)}"
        )
    return chosen


def _classifies(member: Member) -> bool:
    return isinstance(member.settings.task, Classification) and member.settings.test_split is not None


@torch.no_grad()
def _tables(run: Run, fusion: GuidedFusion, member: Member, most: int | None) -> tuple[dict[str, Tabled], Samples]:
    """Embeddings by kind, local and global ones as they enter the fusion; and the test samples, as rows of these."""
    kept = run.client_state(member.id)
    model, guidance = run.client_model(member.id, kept), _guidance(run, fusion, member, kept)
    test = run.federation.test(member)
    assert test is not None
    test = test.subset(drawn(len(test), most, "features", member.id)).only(_judged(member, test, guidance))
    test = test.having(*test.modalities)
    partner, numbered = of_rows(guidance, test)
    fused = fusion.fused(model, partner).eval()
    server, theirs, device = guidance.model, guidance.samples.inputs, model.device
    tables: dict[str, dict[str, Tensor]] = {origin: {} for origin in ORIGINS}
    for modality, inputs in test.inputs.items():
        rows = torch.unique(test.rows[modality])
        parts: dict[str, list[Tensor]] = {origin: [] for origin in ORIGINS}
        for part in torch.split(rows, run.experiment.run.evaluation_batch):
            parts["local"].append(model.embed(modality, inputs(part).to(device)))
            parts["global"].append(server.embed(modality, theirs[modality](part).to(device)))
            parts["fused"].append(fused.embed(modality, part))
        values = {origin: torch.cat(embeddings).float() for origin, embeddings in parts.items()}
        if fusion.inputs == "representations":  # then unit vectors enter the fusion
            values["local"], values["global"] = F.normalize(values["local"]), F.normalize(values["global"])
        for origin, embeddings in values.items():
            table = torch.zeros(len(inputs), embeddings.shape[1])  # unused rows stay empty
            tables[origin][modality] = table.index_copy_(0, rows, embeddings.cpu())
    return {origin: Tabled(by_modality) for origin, by_modality in tables.items()}, numbered


def _judged(member: Member, test: Samples, guidance: FusionGuidance) -> Sequence[str]:
    """Modalities by which the client classifies, all of which the server must encode."""
    task = member.settings.task
    assert isinstance(task, Classification)
    names = test.modalities if task.modality is None else (task.modality,)
    for name in names:
        if name not in guidance.samples.modalities:
            raise ConfigError(
                f"client '{member.id}' classifies by '{name}', which the server does not encode, so nothing is "
                "fused there; choose another client"
            )
    return names


def _guidance(
    run: Run, fusion: GuidedFusion, member: Member, kept: Mapping[str, Mapping[str, Tensor]]
) -> FusionGuidance:
    """The encoders that the client received last, and its test samples in their views."""
    weights = kept.get("encoders", {})
    assert run.experiment.server is not None
    if not weights:
        raise ConfigError(f"client '{member.id}' has received no encoders of the server; choose another client")
    model = run.federation.shared_model(run.experiment.server.model)
    # encoders of modalities that the client lacks were not sent; they stay as initialised, and unused
    model.load(weights, partly=True)
    test = run.federation.test(member, run.experiment.server.model)
    assert test is not None
    sent = [name for name in test.modalities if any(key.startswith(f"encoders.{name}.") for key in weights)]
    batch = run.experiment.run.evaluation_batch
    return FusionGuidance(model.to(run.place), test.only(sent), fusion.level == "maps", batch, {})
