"""Local, global and fused features of a client's test samples (FedAFD, supplement, figures 1 and 2)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from jaxtyping import Float, Int64
from torch import Tensor
from torch.nn import functional as F

from polyfed.algorithms.fedafd import FedAFD
from polyfed.analysis.encoders import drawn
from polyfed.analysis.projections import project, require_method
from polyfed.analysis.separation import Separation
from polyfed.core.device import cpu_threads
from polyfed.core.errors import ConfigError, nearest
from polyfed.data.samples import Samples
from polyfed.federation.membership import Member
from polyfed.models.fused import Fused, Guidance, of_rows
from polyfed.models.model import Model
from polyfed.runs.opened import KeptClients
from polyfed.tasks.classification import Classification

Kind = Literal["local", "global", "fused"]
KINDS: tuple[Kind, ...] = ("local", "global", "fused")
SAMPLES = 1000
SHOWN = 330
"""Samples on the maps."""
TOGETHER = "together"


@dataclass(frozen=True)
class Feature:
    """One kind of features of a client's test samples.

    Attributes:
        kind: ``local`` (the client's encoder), ``global`` (the server's) or ``fused``.
        values: as the client's head takes them [n, d].
        separation: of the classes by these, each scaled to unit norm.
        metrics: of the client's head on these.
    """

    kind: Kind
    values: Float[Tensor, "n d"]
    separation: Separation
    metrics: Mapping[str, float]

    @property
    def unit(self) -> Float[Tensor, "n d"]:
        """With unit norm."""
        return F.normalize(self.values, dim=1)


@dataclass(frozen=True)
class Features:
    """Features of a client's test samples.

    Attributes:
        run, client: whose.
        round: after which the client's model was kept.
        primary: name of the metric of the client's head that counts most.
        labels: class of each sample [n].
        classes: names of the classes, by number.
        found: the features by kind.
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
    found: Mapping[Kind, Feature]
    method: str
    shown: Int64[Tensor, " m"]
    maps: Mapping[str, Float[Tensor, "_ 2"]]

    def to_json(self) -> dict[str, Any]:
        """All figures, without the maps."""
        return {
            "run": self.run,
            "client": self.client,
            "round": self.round,
            "samples": len(self.labels),
            "classes": len(torch.unique(self.labels)),
            "features": {
                kind: vars(each.separation) | {"head": dict(each.metrics)} for kind, each in self.found.items()
            },
        }


@dataclass(frozen=True)
class Tabled:
    """A model whose embeddings are known, by number of the row."""

    tables: Mapping[str, Float[Tensor, "r d"]]

    @property
    def device(self) -> torch.device:
        """Of the embeddings."""
        return next(iter(self.tables.values())).device

    def embed(self, modality: str, x: Int64[Tensor, " b"]) -> Float[Tensor, "b d"]:
        """The known embeddings."""
        return self.tables[modality][x]

    def represent(self, modality: str, x: Int64[Tensor, " b"]) -> Float[Tensor, "b d"]:
        """With unit norm."""
        return F.normalize(self.embed(modality, x), dim=-1)


def run_features(
    clients: KeptClients, client: str | None = None, *, samples: int | None = SAMPLES, method: str = "tsne"
) -> Features:
    """What a classification client, the server's encoders that it keeps, and their fusion see in its test samples.

    Args:
        clients: they.
        client: id; None: the first that classifies and took part.
        samples: at most so many, drawn at random; None: all.
        method: of the maps, ``tsne`` or ``pca``.

    Raises:
        ConfigError: the method fuses nothing; no such client, or one that does not classify, has no test samples, has
            received no encoders, or shares no modality with them; no such projection.
        RunError: the client's state is missing or damaged.
        DataError: features are not finite.
    """
    require_method(method)
    algorithm = clients.run.experiment.algorithm
    if not isinstance(algorithm, FedAFD) or algorithm.fusion == "none":
        raise ConfigError(
            f"clients of '{algorithm.component_name()}' in '{clients.run.folder}' do not fuse their features with the "
            "server's; give a run of fedafd with a fusion"
        )
    chosen = _classifier(clients, client)
    with cpu_threads(clients.run.experiment.run.threads):
        tables, numbered = _tables(clients, algorithm, clients.run.federation.members[chosen], samples)
        return _features(clients, chosen, tables, numbered, method)


def _classifier(clients: KeptClients, client: str | None) -> str:
    classifying = [
        name
        for name in clients.versions
        if isinstance(clients.run.federation.members[name].settings.task, Classification)
        and clients.run.federation.members[name].settings.test_split is not None
    ]
    if client is not None:
        clients.member(client)
    if not classifying or (client is not None and client not in classifying):
        who = "no client" if client is None else f"not client '{client}'"
        raise ConfigError(
            f"{who} of '{clients.run.folder}' classifies test samples of its own; {nearest(client or '', classifying)}"
        )
    return classifying[0] if client is None else client


def _tables(
    clients: KeptClients, algorithm: FedAFD, member: Member, most: int | None
) -> tuple[dict[Kind, Tabled], Samples]:
    """Embeddings by kind, and the test samples, which hand over rows of these."""
    kept = clients.state(member.id)
    model = clients.model(member.id, kept)
    test = clients.run.federation.test(member)
    assert test is not None
    guidance = _guidance(clients, algorithm, member, kept)
    test = test.subset(drawn(len(test), most, "features", member.id)).only(_judged(member, test, guidance))
    partner, numbered = of_rows(guidance, test)
    unit, fused = algorithm.fuse == "representations", algorithm.fused(model, partner).eval()
    return _encoded(model, guidance, fused, test, unit, clients.run.experiment.run.evaluation_batch), numbered


def _guidance(
    clients: KeptClients, algorithm: FedAFD, member: Member, kept: Mapping[str, Mapping[str, Tensor]]
) -> Guidance:
    """The encoders that the client received last, and its test samples in their views."""
    server, weights = clients.run.experiment.server, kept.get("encoders", {})
    assert server is not None
    if not weights:
        raise ConfigError(f"client '{member.id}' has received no encoders of the server; choose another --client")
    model = clients.run.federation.shared_model(server.model)
    own = set(model.state_dict())
    model.load_state_dict({name: value for name, value in weights.items() if name in own}, strict=False)
    there = clients.run.federation.test(member, server.model)
    assert there is not None
    sent = [name for name in there.modalities if any(key.startswith(f"encoders.{name}.") for key in weights)]
    batch = clients.run.experiment.run.evaluation_batch
    return Guidance(model.to(clients.run.place), there.only(sent), algorithm.fusion == "maps", batch, {})


def _judged(member: Member, test: Samples, guidance: Guidance) -> Sequence[str]:
    """Modalities by which the client classifies, all of which the server must encode."""
    task = member.settings.task
    assert isinstance(task, Classification)
    names = test.modalities if task.modality is None else (task.modality,)
    lacking = [name for name in names if name not in guidance.samples.modalities]
    if lacking:
        raise ConfigError(
            f"client '{member.id}' classifies by '{lacking[0]}', which the server does not encode, so nothing is "
            "fused there; choose another --client"
        )
    return names


@torch.no_grad()
def _encoded(
    model: Model, guidance: Guidance, fused: Fused, test: Samples, unit: bool, batch: int
) -> dict[Kind, Tabled]:
    """Embeddings of all rows that the samples need; local and global ones as they enter the fusion."""
    tables: dict[Kind, dict[str, Tensor]] = {kind: {} for kind in KINDS}
    for modality, inputs in test.inputs.items():
        rows = torch.unique(test.rows[modality])
        parts: dict[Kind, list[Tensor]] = {kind: [] for kind in KINDS}
        for part in torch.split(rows, batch):
            parts["fused"].append(fused.embed(modality, part))
            parts["local"].append(model.embed(modality, inputs(part).to(model.device)))
            there = guidance.samples.inputs[modality](part).to(guidance.model.device)
            parts["global"].append(guidance.model.embed(modality, there))
        for kind in KINDS:
            found = torch.cat(parts[kind]).float().cpu()
            found = F.normalize(found, dim=1) if unit and kind != "fused" else found
            tables[kind][modality] = torch.zeros(len(inputs), found.shape[1]).index_copy_(0, rows, found)
    return {kind: Tabled(each) for kind, each in tables.items()}


def _features(
    clients: KeptClients, client: str, tables: Mapping[Kind, Tabled], samples: Samples, method: str
) -> Features:
    member = clients.run.federation.members[client]
    task, head = member.settings.task, clients.model(client).heads[member.head].cpu()
    assert isinstance(task, Classification)
    labels = samples.targets[task.target].long()
    batch = clients.run.experiment.run.evaluation_batch
    found: dict[Kind, Feature] = {}
    for kind, table in tables.items():
        values = torch.stack([table.embed(name, samples.rows[name]) for name in samples.modalities]).mean(0)
        separation = Separation.of(F.normalize(values, dim=1), labels)
        found[kind] = Feature(kind, values, separation, task.evaluate(table, head, samples, batch_size=batch))
    shown = drawn(len(labels), SHOWN, "features on maps", client)
    maps: dict[str, Tensor] = {
        kind: project(each.unit[shown], method, "features", kind) for kind, each in found.items()
    }
    every = torch.cat([each.unit[shown] for each in found.values()])
    maps[TOGETHER] = project(every, method, "features", TOGETHER)
    return Features(
        run=clients.run.name,
        client=client,
        round=clients.versions[client][0],
        primary=task.primary,
        labels=labels,
        classes=dict(enumerate(samples.classes.get(task.target, ()))),
        found=found,
        method=method,
        shown=shown,
        maps=maps,
    )
