"""Local, global and fused features of a client's test samples (FedAFD, supplement, figures 1 and 2)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float, Int64
from torch import Tensor
from torch.nn import functional as F

from polyfed.algorithms.fedafd import FedAFD
from polyfed.algorithms.shared.guided_fusion import GuidedFusion
from polyfed.core.device import cpu_threads
from polyfed.core.errors import ConfigError, nearest
from polyfed.data.samples import Samples
from polyfed.federation.membership import Member
from polyfed.lab.analysis.drawing import MARKERS, bare_map, cycled
from polyfed.lab.analysis.encoders import drawn
from polyfed.lab.analysis.projections import project, require_method
from polyfed.lab.analysis.results import AnalysisResult
from polyfed.lab.analysis.separation import Separation
from polyfed.models.fused import FusionGuidance, of_rows
from polyfed.reporting.figures import COLOURS, empty_figure, legend_below, styled
from polyfed.reporting.tables import TextTable, figure
from polyfed.runs.opened import Run
from polyfed.tasks.classification import Classification

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FEATURE_KINDS = ("local", "global", "fused")
TOGETHER = "together"
MOST_POINTS = 330  # samples on the maps
_NAMED_CLASSES = 14


@dataclass(frozen=True)
class KindOfFeatures:
    """One kind of features of a client's test samples.

    Attributes:
        values: as the client's head takes them [n, d].
        separation: of the classes by these, each scaled to unit norm.
        metrics: of the client's head on these.
    """

    values: Float[Tensor, "n d"]
    separation: Separation
    metrics: Mapping[str, float]


@dataclass(frozen=True)
class ComparedFeatures(AnalysisResult):
    """Features of a client's test samples.

    Attributes:
        run, client: whose.
        round: after which the client's model was kept.
        primary: name of the metric of the client's head that counts most.
        labels: class of each sample [n].
        classes: names of the classes, by number.
        kinds: ``local`` (the client's encoder), ``global`` (the server's) and ``fused`` features.
        method: of the maps.
        shown: the m samples that are on the maps.
        maps: kind -> their places [m, 2]; ``together``: those of all kinds, one after the other [3m, 2].
    """

    run: str
    client: str
    round: int
    primary: str
    labels: Int64[Tensor, " n"]
    classes: Mapping[int, str]
    kinds: Mapping[str, KindOfFeatures]
    method: str
    shown: Int64[Tensor, " m"]
    maps: Mapping[str, Float[Tensor, "_ 2"]]

    def to_json(self) -> dict[str, Any]:
        return {
            "run": self.run,
            "client": self.client,
            "round": self.round,
            "samples": len(self.labels),
            "classes": len(torch.unique(self.labels)),
            "features": {k: vars(each.separation) | {"head": dict(each.metrics)} for k, each in self.kinds.items()},
        }

    def tables(self) -> list[TextTable]:
        """One row a kind of features."""
        rows = [
            (
                kind,
                figure(each.separation.silhouette, 3),
                figure(each.separation.ratio, 3),
                figure(each.separation.nearest_mean),
                figure(each.metrics[self.primary]),
            )
            for kind, each in self.kinds.items()
        ]
        columns = ("features", "silhouette", "between / within", "nearest mean %", f"own head: {self.primary}")
        classes = len(torch.unique(self.labels))
        note = f"{len(self.labels)} test samples of {classes} classes. The head was trained on fused features."
        title = f"{self.run}: features of {self.client}, round {self.round}"
        return [TextTable(title, columns, rows, (note,))]

    @styled
    def draw(self) -> Figure:
        """Local, global and fused features, coloured by class, and all three on one map, coloured by kind."""
        drawing = empty_figure(16.5, 4.6, f"{self.run}, client {self.client}: features of its test samples")
        axes = drawing.subplots(1, 4)
        for place, (kind, each) in zip(axes, self.kinds.items(), strict=False):
            _draw_classes(place, self, self.maps[kind])
            place.set_title(f"{kind}: silhouette {figure(each.separation.silhouette)}")
        parts = self.maps[TOGETHER].chunk(len(FEATURE_KINDS))
        for number, (kind, points) in enumerate(zip(FEATURE_KINDS, parts, strict=True)):
            look: Any = {"color": COLOURS[number], "marker": MARKERS[number], "label": kind}
            axes[-1].scatter(points[:, 0], points[:, 1], s=7, alpha=0.6, linewidths=0, **look)
        axes[-1].set_title("all three")
        legend_below(axes[-1], columns=3, markerscale=2)
        bare_map(axes[-1])
        drawing.legend(*axes[0].get_legend_handles_labels(), loc="outside lower left", ncols=7, markerscale=2)
        return drawing


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


def run_features(
    run: Run, client: str | None = None, *, samples: int | None = 1000, method: str = "tsne"
) -> ComparedFeatures:
    """What a classification client, the server's encoders that it keeps, and their fusion see in its test samples.

    Raises:
        ConfigError: the method fuses nothing; no such client, or one that does not classify, has no test samples, has
            received no encoders, or shares no modality with them; no such projection.
        RunError: the client's state is missing or damaged.
        DataError: features are not finite.
    """
    require_method(method)
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
    with cpu_threads(run.experiment.run.threads):
        tables, numbered = _tables(run, algorithm.fusion, member, samples)
        # the head goes to where the tables are
        labels, head = numbered.targets[task.target].long(), model.heads[member.head].cpu()
        kinds, units = {}, {}
        for kind, table in tables.items():
            values = torch.stack([table.embed(name, numbered.rows[name]) for name in numbered.modalities]).mean(0)
            units[kind] = F.normalize(values, dim=1)
            metrics = task.evaluate(table, head, numbered, batch_size=batch)
            kinds[kind] = KindOfFeatures(values, Separation.of(units[kind], labels), metrics)
        shown = drawn(len(labels), MOST_POINTS, "features on maps", client)
        maps = {kind: project(unit[shown], method) for kind, unit in units.items()}
        maps[TOGETHER] = project(torch.cat([unit[shown] for unit in units.values()]), method)
    return ComparedFeatures(
        run=run.name,
        client=client,
        round=run.clients[client][0],
        primary=task.primary,
        labels=labels,
        classes=dict(enumerate(numbered.classes.get(task.target, ()))),
        kinds=kinds,
        method=method,
        shown=shown,
        maps=maps,
    )


def _classifier(run: Run, client: str | None) -> str:
    if client is not None:
        run.client(client)  # refuses a name that nobody has
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
    tables: dict[str, dict[str, Tensor]] = {kind: {} for kind in FEATURE_KINDS}
    for modality, inputs in test.inputs.items():
        rows = torch.unique(test.rows[modality])
        parts: dict[str, list[Tensor]] = {kind: [] for kind in FEATURE_KINDS}
        for part in torch.split(rows, run.experiment.run.evaluation_batch):
            parts["local"].append(model.embed(modality, inputs(part).to(device)))
            parts["global"].append(server.embed(modality, theirs[modality](part).to(device)))
            parts["fused"].append(fused.embed(modality, part))
        values = {kind: torch.cat(embeddings).float() for kind, embeddings in parts.items()}
        if fusion.inputs == "representations":  # then unit vectors enter the fusion
            values["local"], values["global"] = F.normalize(values["local"]), F.normalize(values["global"])
        for kind, embeddings in values.items():
            table = torch.zeros(len(inputs), embeddings.shape[1])  # rows that nobody asks for stay empty
            tables[kind][modality] = table.index_copy_(0, rows, embeddings.cpu())
    return {kind: Tabled(by_modality) for kind, by_modality in tables.items()}, numbered


def _judged(member: Member, test: Samples, guidance: FusionGuidance) -> Sequence[str]:
    """Modalities by which the client classifies, all of which the server must encode."""
    task = member.settings.task
    assert isinstance(task, Classification)
    names = test.modalities if task.modality is None else (task.modality,)
    for name in names:
        if name not in guidance.samples.modalities:
            raise ConfigError(
                f"client '{member.id}' classifies by '{name}', which the server does not encode, so nothing is "
                "fused there; choose another --client"
            )
    return names


def _guidance(
    run: Run, fusion: GuidedFusion, member: Member, kept: Mapping[str, Mapping[str, Tensor]]
) -> FusionGuidance:
    """The encoders that the client received last, and its test samples in their views."""
    weights = kept.get("encoders", {})
    assert run.experiment.server is not None
    if not weights:
        raise ConfigError(f"client '{member.id}' has received no encoders of the server; choose another --client")
    model = run.federation.shared_model(run.experiment.server.model)
    # encoders of modalities that the client lacks were not sent; they stay as initialised, and unused
    model.load(weights, partly=True)
    test = run.federation.test(member, run.experiment.server.model)
    assert test is not None
    sent = [name for name in test.modalities if any(key.startswith(f"encoders.{name}.") for key in weights)]
    batch = run.experiment.run.evaluation_batch
    return FusionGuidance(model.to(run.place), test.only(sent), fusion.level == "maps", batch, {})


def _draw_classes(axes: Axes, features: ComparedFeatures, points: Float[Tensor, "m 2"]) -> None:
    """The classes with most samples have colours, the others are grey."""
    labels = features.labels[features.shown]
    counts = torch.bincount(labels)
    order = counts.argsort(descending=True, stable=True)
    named = order[counts[order] > 0][:_NAMED_CLASSES].sort().values
    others = ~torch.isin(labels, named)
    if bool(others.any()):
        axes.scatter(points[others, 0], points[others, 1], s=6, color="#cccccc", label="other classes", zorder=1)
    for place, number in enumerate(named.tolist()):
        x, y = points[labels == number].unbind(1)
        look: Any = cycled(place) | {"label": features.classes.get(number, str(number))}
        axes.scatter(x, y, s=9, linewidths=0, zorder=2, **look)
    bare_map(axes)
