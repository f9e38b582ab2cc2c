"""Ensembles of clients' outputs on the public set: the teacher of server models."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated

import torch
from jaxtyping import Float
from pydantic import Field, SerializeAsAny
from torch import Tensor
from torch.nn import functional as F

from polyfed.aggregation.alignment import RIDGE_PENALTY, Alignment, align
from polyfed.aggregation.ensemble import Ensemble, Ensembled, Rows
from polyfed.aggregation.weighting import OF_REPRESENTATIONS, Evidence, Weighting
from polyfed.aggregation.weightings.by_client import Count, Mean
from polyfed.algorithms.algorithm import Reply, Server
from polyfed.algorithms.shared.instruments import Judge, mean_norms
from polyfed.algorithms.shared.public_exchange import DISTILS, PublicExchange, fixed_sample
from polyfed.core.effects import Facts, Not, Only, Such
from polyfed.core.errors import ConfigError, nearest
from polyfed.federation.public_outputs import (
    GALLERY,
    UNPAIRED,
    PublicOutputs,
    clip_row_norms,
    modality_of,
    of_part,
    part_of,
)
from polyfed.losses.distillation import DISTILLATIONS

COMPARING = Such(lambda weighting: weighting.compares, "one that compares with the server")
MEASURES = Only(diagnostic_samples=Not(0))
"""There are samples to judge on."""
HEAT_MAP_SAMPLES = 256
"""Public samples whose weights over clients are kept, for the heat map of the report."""


class EnsembleTeacher(PublicExchange):
    """Methods whose server weighs clients' outputs into one ensemble, sample by sample, and learns from that."""

    aggregation: Annotated[SerializeAsAny[Weighting], DISTILS] = Field(
        default=Mean(), description="weights over clients: gca, sed, entropy, variance, margin, mean, count, iot, ..."
    )
    renormalise_target: Annotated[bool, DISTILS] = Field(
        default=False, description="scale aggregated targets to unit length"
    )
    counted_groups: Annotated[tuple[str, ...] | None, DISTILS] = Field(
        default=None, min_length=1, description="groups of clients that count in the ensemble; None: all"
    )
    alignment: Annotated[Alignment, DISTILS] = Field(
        default="none", description="map of each client's representations to the server's, before they are averaged"
    )
    alignment_penalty: Annotated[float, Only(alignment="ridge")] = Field(
        default=RIDGE_PENALTY, ge=1e-6, description="ridge: penalty of the map; smaller ones drown in rounding"
    )
    diagnostic_samples: int = Field(default=1024, ge=0, description="public samples on which KD progress is measured")

    @property
    def keeps_rows(self) -> bool:
        """Whether the server learns from each client's rows, not from their mean alone."""
        return False

    @property
    def sums_suffice(self) -> bool:
        """Whether the server needs but the mean of the clients' rows by sample count."""
        return (
            type(self.aggregation) is Count and self.alignment == "none" and not (self.keeps_rows or self.judge_clients)
        )

    def facts_for(self, key: str) -> Facts:
        return {OF_REPRESENTATIONS: not self.exchanges_logits} if key == "aggregation" else {}

    judge_clients: Annotated[bool, MEASURES] = Field(
        default=False, description="measure every client's representations on the gallery, not the ensemble's alone"
    )

    # ---- server half

    def target(self, mean: Ensembled, own: Float[Tensor, "n w"]) -> Ensembled:
        return mean._replace(values=F.normalize(mean.values, dim=-1)) if self.renormalise_target else mean

    def setup(self, server: Server) -> None:
        """Check also that the weights over clients suit what crosses.

        Raises:
            ConfigError: they do not.
        """
        super().setup(server)
        groups = {client.group for client in server.clients}
        for name in {*(self.counted_groups or ())} - groups:
            raise ConfigError(f"algorithm.counted_groups: no clients are called '{name}'; {nearest(name, groups)}")
        if self.aggregation.needs_partner and not self.exchanges_logits and len(server.model.modalities) < 2:
            raise ConfigError(
                f"algorithm.aggregation '{self.aggregation.component_name()}' contrasts modalities, but server.model "
                f"encodes {list(server.model.modalities)}; add an encoder, or choose mean or sed"
            )
        # samples are classes of their own where representations cross
        has_labels = not self.exchanges_logits or self.output_kind.labels(server, server.public_set) is not None
        if self.aggregation.needs_labels and not has_labels:
            raise ConfigError(
                f"algorithm.aggregation '{self.aggregation.component_name()}' weighs scores by the true class, which "
                "the public set lacks; name its column under the source's targets, or choose mean or variance"
            )

    def ensembles(self, server: Server, server_outputs: PublicOutputs) -> Ensembles:
        return Ensembles(self, server, server_outputs)

    def distances(self, server: Server, targets: Mapping[str, Ensembled], when: str) -> dict[str, float]:
        """``kd_distance_<when>.<output>``: mean distance of the server's outputs to the targets, on a few samples."""
        samples = server.exchanged(self.public_samples)
        count = min(self.diagnostic_samples, len(samples))
        if not count or not targets:
            return {}
        index = fixed_sample(server, len(samples), count)  # the same every round, or rounds could not be compared
        outputs, rows = self.output_kind.of(server, samples.subset(index)), index.to(server.device)
        return {
            f"kd_distance_{when}.{name}": float(
                DISTILLATIONS["l2"](outputs[name], target.values[rows], target.valid[rows])
            )
            for name, target in targets.items()
        }


class Ensembles:
    """One weighted ensemble an output, into which clients' replies are folded as they come.

    Clients are weighed as the method says, beside the server's own outputs, output -> [n, w].
    """

    def __init__(self, method: EnsembleTeacher, server: Server, server_outputs: PublicOutputs) -> None:
        self._method, self._server, self._server_outputs = method, server, server_outputs
        samples = server.exchanged(method.public_samples)
        self._samples, self._labels = samples, method.output_kind.labels(server, samples)
        self._places = method.places(server)
        self._ensembles: dict[str, Ensemble] = {}
        self._senders: dict[str, list[str]] = {}
        self._rows: dict[str, dict[str, Rows]] = {}

    def add(self, reply: Reply, payload: PublicOutputs) -> None:
        """Fold in one client's outputs; no row outweighs others by its norm."""
        for output, values in self.received(payload).items():
            # weights come of the rows that count
            self.add_weighed(output, reply.sender.id, values, self.log_weights(reply, output, values))

    def received(self, payload: PublicOutputs) -> dict[str, Float[Tensor, "n w"]]:
        return self.comparable(self._method.from_wire(self._server, payload))

    def comparable(self, rows: Mapping[str, Float[Tensor, "n w"]]) -> dict[str, Float[Tensor, "n w"]]:
        """A client's rows by output: norms bounded, in the server's space if they are to be aligned."""
        method = self._method
        # clipped before: one long row would decide where all others go; no map makes rows longer than 1
        rows = {name: clip_row_norms(values, method.output_kind.largest) for name, values in rows.items()}
        if method.alignment == "none" or not rows:
            return rows
        # one map for all modalities, or what the client relates across them would be lost; the gallery does not
        # contribute to it: on it the map is judged
        reference = [self._server_outputs[name] * (part_of(name) != GALLERY) for name in rows]
        moved = align(torch.cat(list(rows.values())), torch.cat(reference), method.alignment, method.alignment_penalty)
        return dict(zip(rows, torch.split(moved, [len(values) for values in rows.values()]), strict=True))

    def log_weights(self, reply: Reply, output: str, values: Float[Tensor, "n w"]) -> Float[Tensor, " n"] | float:
        """Log weight of a client on each sample, or one for all; -inf if its group does not count."""
        method, labels = self._method, self._labels
        if method.counted_groups is not None and reply.sender.group not in method.counted_groups:
            return -math.inf
        part = part_of(output)
        known = of_part(self._server_outputs, part)
        if part == UNPAIRED:  # pictures and captions, but not of the same items: nothing that is compared with another
            known = {modality_of(output): self._server_outputs[output]}
        if part and len(known) < 2 and method.aggregation.needs_partner:
            return 0.0  # without a partner nobody can be told from others
        items = self._server.parts[output].items if part else self._samples.items
        evidence = Evidence(
            values=values,
            output=modality_of(output),
            server_outputs=method.output_kind.anchors(known),
            examples=reply.num_examples,
            modalities=len(reply.sender.modalities),
            labels=None if labels is None else labels.to(values.device),
            items=items.to(values.device),
            places=of_part(self._places, part),
        )
        return method.aggregation.log_weights(evidence)

    def add_weighed(
        self, output: str, sender: str, values: Float[Tensor, "n w"], log_weights: Float[Tensor, " n"] | float
    ) -> None:
        if output not in self._ensembles:
            count, width = self._server_outputs[output].shape
            # weights of all samples of all clients would outgrow the ensemble
            shown = fixed_sample(self._server, count, min(HEAT_MAP_SAMPLES, count))
            self._ensembles[output] = Ensemble(count, width, self._server.device, record=shown)
        self._ensembles[output].add(values, log_weights)
        self._senders.setdefault(output, []).append(sender)
        if self._method.keeps_rows or self._method.judge_clients:
            logs = torch.as_tensor(log_weights, device=values.device).expand(len(values))
            self._rows.setdefault(output, {})[sender] = Rows(values, logs)

    def targets(self) -> dict[str, Ensembled]:
        """What the server is to learn, for each output that somebody sent; records who sent and with which weight."""
        method, server, senders = self._method, self._server, of_part(self._senders)
        server.arrays |= {f"weights.{name}": (self._ensembles[name].weights(), senders[name]) for name in senders}
        server.record(**{f"senders.{name}": float(len(ids)) for name, ids in senders.items()})
        means = {name: ensemble.result() for name, ensemble in self._ensembles.items()}
        server.record(**mean_norms(means))
        targets = {
            name: method.target(mean, self._server_outputs[name])._replace(rows=self._rows.get(name, {}))
            for name, mean in means.items()
        }
        server.record(**self._quality(targets))
        return targets

    def _quality(self, targets: Mapping[str, Ensembled]) -> dict[str, float]:
        """How well targets, and clients if wanted, do the server's task, beside the server itself."""
        count = min(self._method.diagnostic_samples, len(self._samples))
        if not count or self._method.exchanges_logits:
            return {}
        judge = Judge(self._server, self._server_outputs, self._samples, self._shown(count))
        clients: dict[str, dict[str, Tensor]] = {}
        for output, rows in self._rows.items() if self._method.judge_clients else ():
            for sender, (values, _) in rows.items():
                clients.setdefault(sender, {})[output] = values
        return judge.metrics(targets, clients)

    def _shown(self, count: int) -> Tensor:
        return fixed_sample(self._server, len(self._samples), count)
