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

from polyfed.aggregation.alignment import RIDGE_PENALTY, Alignment, aligned
from polyfed.aggregation.ensemble import Ensemble, Ensembled, Rows
from polyfed.aggregation.weighting import OF_REPRESENTATIONS, Evidence, Weighting
from polyfed.aggregation.weightings.mean import Mean
from polyfed.algorithms.algorithm import Reply, Server
from polyfed.algorithms.shared.public_exchange import DISTILS, PublicExchange, fixed_sample
from polyfed.core.effects import Facts, Only, Such
from polyfed.core.errors import ConfigError, nearest
from polyfed.federation.public_outputs import GALLERY, UNPAIRED, PublicOutputs, clip_row_norms, modality_of, of_part
from polyfed.losses.distillation import DISTILLATIONS

COMPARING = Such(lambda weighting: weighting.compares, "one that compares with the server")
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
        default=None, description="groups of clients that count in the ensemble; None: all"
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

    def facts_for(self, key: str) -> Facts:
        """What crosses, for weightings."""
        return {OF_REPRESENTATIONS: not self.exchanges_logits} if key == "aggregation" else {}

    # ---- server half

    def setup(self, server: Server) -> None:
        """Check also that the weights over clients suit what crosses.

        Raises:
            ConfigError: they do not.
        """
        super().setup(server)
        groups = {client.group for client in server.clients}
        for name in self.counted_groups or ():
            if name not in groups:
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
        """Where the outputs of this round's clients go."""
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
        self._ensembles: dict[str, Ensemble] = {}
        self._senders: dict[str, list[str]] = {}
        self._rows: dict[str, dict[str, Rows]] = {}

    def add(self, reply: Reply, payload: PublicOutputs) -> None:
        """Fold in one client's outputs; no row outweighs others by its norm."""
        for output, values in self.received(payload).items():
            # weights come of the rows that count
            self.add_weighed(output, reply.sender.id, values, self.log_weights(reply, output, values))

    def received(self, payload: PublicOutputs) -> dict[str, Float[Tensor, "n w"]]:
        """Rows of all samples on the server's device, by output: norms bounded, in the server's space if they are to be
        aligned."""
        method, server = self._method, self._server
        rows = method.from_wire(server, payload)
        # clipped before: one long row would decide where all others go; no map makes rows longer than 1
        rows = {name: clip_row_norms(values, method.output_kind.largest) for name, values in rows.items()}
        return rows if method.alignment == "none" else self._aligned(rows)

    def _aligned(self, rows: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """One map a modality, to which the gallery does not contribute: on it the map is to be judged."""
        method, aligned_rows = self._method, dict[str, Tensor]()
        for modality in dict.fromkeys(map(modality_of, rows)):
            names = [name for name in rows if modality_of(name) == modality]
            reference = [self._server_outputs[name] * (not name.startswith(GALLERY)) for name in names]
            moved = aligned(
                torch.cat([rows[name] for name in names]),
                torch.cat(reference),
                method.alignment,
                method.alignment_penalty,
            )
            aligned_rows |= zip(names, torch.split(moved, [len(rows[name]) for name in names]), strict=True)
        return aligned_rows

    def log_weights(self, reply: Reply, output: str, values: Float[Tensor, "n w"]) -> Float[Tensor, " n"] | float:
        """Log weight of a client on each sample, or one for all; -inf if its group does not count."""
        method, labels = self._method, self._labels
        if method.counted_groups is not None and reply.sender.group not in method.counted_groups:
            return -math.inf
        part = output.rpartition("/")[0]
        known = of_part(self._server_outputs, part)
        if output.startswith(UNPAIRED):  # what else is without partner are other items
            known = {modality_of(output): known[modality_of(output)]}
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
        )
        return method.aggregation.log_weights(evidence)

    def add_weighed(
        self, output: str, sender: str, values: Float[Tensor, "n w"], log_weights: Float[Tensor, " n"] | float
    ) -> None:
        """Fold in rows whose weights are known."""
        if output not in self._ensembles:
            count, width = self._server_outputs[output].shape
            # weights of all samples of all clients would outgrow the ensemble
            shown = fixed_sample(self._server, count, min(HEAT_MAP_SAMPLES, count))
            self._ensembles[output] = Ensemble(count, width, self._server.device, record=shown)
        self._ensembles[output].add(values, log_weights)
        self._senders.setdefault(output, []).append(sender)
        if self._method.keeps_rows:
            logs = torch.as_tensor(log_weights, device=values.device).expand(len(values))
            self._rows.setdefault(output, {})[sender] = Rows(values, logs)

    def targets(self) -> dict[str, Ensembled]:
        """What the server is to learn, for each output that somebody sent; records who sent and with which weight."""
        senders = self._senders
        for output, ensemble in self._ensembles.items():
            self._server.arrays[f"weights.{output}"] = (ensemble.weights(), senders[output])
        self._server.record(**{f"senders.{output}": float(len(names)) for output, names in senders.items()})
        targets = {
            output: ensemble.result()._replace(rows=self._rows.get(output, {}))
            for output, ensemble in self._ensembles.items()
        }
        if self._method.renormalise_target:
            return {
                name: target._replace(values=F.normalize(target.values, dim=-1)) for name, target in targets.items()
            }
        return targets
