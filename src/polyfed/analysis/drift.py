"""Model drift: how differently clients represent the same public samples (CreamFL, section 4.4 and figure 3)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from polyfed.analysis.encoders import drawn
from polyfed.analysis.kernel_alignment import LEAST, linear_cka
from polyfed.analysis.projections import project, require_method
from polyfed.analysis.public_samples import one_of_each_item, represented
from polyfed.core.device import cpu_threads
from polyfed.core.errors import ConfigError
from polyfed.models.model import Model, ModelSettings
from polyfed.runs.opened import KeptClients
from polyfed.runs.records import SERVER

SAMPLES = 250
"""As many as in the figure of the paper."""
SHOWN = 1000
"""Points on a map, of all participants together."""


@dataclass(frozen=True)
class Participant:
    """A client or the server, and how it represents the samples.

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
class Pairs:
    """Means over pairs of participants; NaN where there is no pair."""

    count: int
    distance: float
    alignment: float


@dataclass(frozen=True)
class ModalityDrift:
    """Differences of everybody who encodes one modality: clients in their order, then the server if it does.

    Attributes:
        modality: its name.
        names: of the p participants.
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
        """Positions of the clients."""
        return tuple(place for place, group in enumerate(self.groups) if group is not None)

    @property
    def server(self) -> int | None:
        """Position of the server, if it encodes the modality."""
        return self.groups.index(None) if None in self.groups else None

    def between(self, kind: str) -> Pairs:
        """Means over pairs of clients: ``all``, of the ``same`` group or of ``different`` ones; or with the
        ``server``."""
        if kind == "server":
            return self.over([(place, self.server) for place in self.clients if self.server is not None])
        pairs = [(i, j) for i in self.clients for j in self.clients if i < j]
        wanted = {"all": (True, False), "same": (True,), "different": (False,)}[kind]
        return self.over([(i, j) for i, j in pairs if (self.groups[i] == self.groups[j]) in wanted])

    def of_client(self, place: int) -> Pairs:
        """Means over the pairs of one client with the others."""
        return self.over([(place, other) for other in self.clients if other != place])

    def over(self, pairs: Sequence[tuple[int, int]]) -> Pairs:
        """Means over some pairs of positions; NaN entries do not count."""
        return Pairs(len(pairs), _mean(self.distances, pairs), _mean(self.alignment, pairs))

    def to_json(self) -> dict[str, Any]:
        """All figures, without the map."""
        return {
            "participants": list(self.names),
            "groups": list(self.groups),
            "rounds": list(self.rounds),
            "distances": self.distances.tolist(),
            "cka": self.alignment.tolist(),
            "means": {kind: _pairs_json(self.between(kind)) for kind in ("all", "same", "different", "server")},
        }


@dataclass(frozen=True)
class Drift:
    """Drift in a run, by modality.

    Attributes:
        run: its name.
        samples: public samples that everybody represented.
        method: of the maps.
        modalities: those that two participants or more encode.
    """

    run: str
    samples: int
    method: str
    modalities: tuple[ModalityDrift, ...]

    def to_json(self) -> dict[str, Any]:
        """All figures."""
        found = {each.modality: each.to_json() for each in self.modalities}
        return {"run": self.run, "samples": self.samples, "method": self.method, "modalities": found}


def run_drift(clients: KeptClients, *, which: str = "last", samples: int = SAMPLES, method: str = "tsne") -> Drift:
    """Represent the same public samples with every client's kept model and with the server's, and compare.

    Args:
        clients: they.
        which: ``last`` or ``best`` server model.
        samples: public items at most, drawn at random, one sample of each.
        method: of the maps, ``tsne`` or ``pca``.

    Raises:
        ConfigError: no public set, too few samples, no such method, or no modality that two participants encode.
        RunError: a kept model is missing or damaged.
        DataError: a model has diverged.
    """
    require_method(method)
    index = _public_index(clients, samples)
    with cpu_threads(clients.run.experiment.run.threads):
        participants = list(_participants(clients, which, index))
        modalities = dict.fromkeys(modality for participant in participants for modality in participant.values)
        shared = {
            name: [participant for participant in participants if name in participant.values] for name in modalities
        }
        found = tuple(drift(name, who, method) for name, who in shared.items() if len(who) > 1)
    if not found:
        raise ConfigError(f"no two participants of '{clients.run.folder}' encode the same modality of the public set")
    return Drift(clients.run.name, len(index), method, found)


def drift(modality: str, participants: Sequence[Participant], method: str = "pca") -> ModalityDrift:
    """Compare participants that represent the same samples in ``modality``; at least two, clients before the server."""
    values = [participant.values[modality] for participant in participants]
    widths = [rows.shape[1] for rows in values]
    mapped = tuple(place for place, width in enumerate(widths) if width == max(widths, key=widths.count))
    shown = torch.stack([values[place] for place in mapped])[:, : max(1, SHOWN // len(mapped))]
    return ModalityDrift(
        modality=modality,
        names=tuple(participant.name for participant in participants),
        groups=tuple(participant.group for participant in participants),
        rounds=tuple(participant.round for participant in participants),
        distances=mean_distances(values),
        alignment=linear_cka(values),
        mapped=mapped,
        points=project(shown.flatten(0, 1), method, "drift", modality).view(len(mapped), -1, 2),
    )


def mean_distances(values: Sequence[Float[Tensor, "n _"]]) -> Float[Tensor, "p p"]:
    """Mean over n samples of the Euclidean distance of every two sets' vectors of a sample, in float64."""
    found = torch.full((len(values), len(values)), math.nan, dtype=torch.float64).fill_diagonal_(0)
    for i, first in enumerate(values):
        for j, second in enumerate(values[:i]):
            if first.shape == second.shape:
                found[i, j] = found[j, i] = torch.linalg.vector_norm(first.double() - second.double(), dim=1).mean()
    return found


def _public_index(clients: KeptClients, samples: int) -> Int64[Tensor, " n"]:
    """The same for everybody: public samples have one order."""
    if clients.run.experiment.public is None:
        raise ConfigError(
            f"run '{clients.run.folder}' has no public set, so there are no samples that all may see; "
            "give a run whose configuration has a 'public' section"
        )
    public = clients.run.federation.public_samples({})
    assert public is not None
    first = one_of_each_item(public.items)
    if min(len(first), samples) < LEAST:
        raise ConfigError(f"{min(len(first), samples)} public samples are too few to compare; it takes {LEAST}")
    return first[drawn(len(first), samples, "drift")]


def _participants(clients: KeptClients, which: str, index: Int64[Tensor, " n"]) -> Iterator[Participant]:
    members = clients.run.federation.members
    for client, (number, _) in clients.versions.items():
        model, settings = clients.model(client), members[client].model
        values = _represented(clients, model, settings, index, f"client '{client}'")
        yield Participant(client, members[client].group, number, values)
    if clients.run.experiment.server is not None:
        server = clients.run.server_model(which)
        server.warn_if_untrained()
        values = _represented(clients, server.model, server.saved.settings, index, "the server")
        yield Participant(SERVER, None, server.round, values)


def _represented(
    clients: KeptClients, model: Model, settings: ModelSettings, index: Int64[Tensor, " n"], whose: str
) -> dict[str, Tensor]:
    views = {name: encoder.view for name, encoder in settings.encoders.items()}
    public = clients.run.federation.public_samples(views)
    assert public is not None
    batch = clients.run.experiment.run.evaluation_batch
    return {name: represented(model, name, public, index, batch, whose) for name in public.modalities}


def _mean(values: Float[Tensor, "p p"], pairs: Sequence[tuple[int, int]]) -> float:
    finite = [value for value in (float(values[pair]) for pair in pairs) if not math.isnan(value)]
    return fmean(finite) if finite else math.nan


def _pairs_json(pairs: Pairs) -> dict[str, float]:
    return {"pairs": pairs.count, "distance": pairs.distance, "cka": pairs.alignment}
