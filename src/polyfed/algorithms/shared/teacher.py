"""Ensembles of clients' representations of the public set: the teacher of server models, a part that methods hold."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from statistics import fmean

import torch
from jaxtyping import Float
from pydantic import Field, SerializeAsAny
from torch import Tensor
from torch.nn import functional as F

from polyfed.aggregation.ensemble import Alignment, Ensemble, Ensembled, Rows
from polyfed.aggregation.weighting import Evidence, Mean, Weighting
from polyfed.algorithms.algorithm import FederationPlan, Reply, Representations, Server
from polyfed.algorithms.shared.public_exchange import (
    GALLERY,
    UNPAIRED,
    Exchange,
    PublicExchange,
    clip_row_norms,
    fixed_sample,
    modality_of,
    of_part,
    part_of,
)
from polyfed.core.errors import ConfigError, nearest
from polyfed.core.settings import Settings
from polyfed.data.samples import Samples

HEAT_MAP_SAMPLES = 256
"""Public samples whose weights over clients are kept, for the heat map of the report."""


class Teacher(Settings):
    """How clients' representations are weighed into one ensemble, sample by sample, from which the server learns."""

    weights: SerializeAsAny[Weighting] = Field(
        default=Mean(), description="weights over clients: gca, sed, entropy, variance, margin, mean, count, iot, ..."
    )
    renormalise: bool = Field(default=False, description="scale aggregated targets to unit length")
    groups: tuple[str, ...] | None = Field(
        default=None, min_length=1, description="groups of clients that count in the ensemble; None: all"
    )
    alignment: Alignment | None = Field(
        default=None, description="map of each client's representations to the server's, before they are averaged"
    )
    diagnostic_samples: int = Field(default=1024, ge=0, description="public samples on which progress is measured")

    def require(self, plan: FederationPlan) -> None:
        """Check that the settings suit the federation.

        Raises:
            ConfigError: A group does not exist, or weights contrast modalities of which the server has only one.
        """
        groups = {client.group for client in plan.clients}
        for name in {*(self.groups or ())} - groups if groups else ():
            raise ConfigError(f"algorithm.teacher.groups: no clients are called '{name}'; {nearest(name, groups)}")
        if self.weights.needs_partner and len(plan.server_modalities) < 2:
            raise ConfigError(
                f"algorithm.teacher.weights '{self.weights.component_name()}' contrasts modalities, but server.model "
                f"encodes {plan.server_modalities}; add an encoder, or choose mean or sed"
            )

    def exchange(
        self, public: PublicExchange, server: Server, *, keep_rows: bool = False, largest: float = 1.0
    ) -> Ensembles:
        """The exchange of a round, into whose ensembles replies are folded.

        Args:
            public: Settings of the exchange.
            server: Server of the run; clients are weighed by comparison with its representations.
            keep_rows: True keeps each client's rows in addition to their mean.
            largest: Largest norm of a client's row; longer ones are scaled down.
        """
        return Ensembles(self, public, server, public.server_outputs(server), keep_rows, largest)

    def target(self, mean: Ensembled, own: Float[Tensor, "n d"]) -> Ensembled:
        """Target of the server, from a weighted mean and its own representations."""
        return mean._replace(values=F.normalize(mean.values, dim=-1)) if self.renormalise else mean


class Ensembles(Exchange):
    """An exchange with one weighted ensemble per output, into which replies are folded; see ``Teacher``."""

    def __init__(
        self,
        teacher: Teacher,
        public: PublicExchange,
        server: Server,
        outputs: Representations,
        keep_rows: bool = False,
        largest: float = 1.0,
    ) -> None:
        super().__init__(public, server, outputs)
        self._teacher, self._keep_rows, self._largest = teacher, keep_rows, largest
        self._samples, self._inverse_index = public.drawn(server), public.inverse_index(server)
        self._ensembles: dict[str, Ensemble] = {}
        self._senders: dict[str, list[str]] = {}
        self._gaps: dict[str, list[float]] = {}
        self._rows: dict[str, dict[str, Rows]] = {}

    def add(self, reply: Reply, payload: Representations) -> None:
        """Fold in one client's representations; no row outweighs others by its norm."""
        for output, values in self.received(payload).items():
            # by the rows that count
            weights = self.log_weights(reply, output, values)
            gap = values.mean(0) - self.outputs[output].mean(0).to(values)
            self._gaps.setdefault(output, []).append(float(torch.linalg.vector_norm(gap)))
            self.add_weighed(output, reply.sender.id, values, weights, reply.mixing)

    def received(self, payload: Representations) -> dict[str, Float[Tensor, "n d"]]:
        """A client's rows by output, comparable with those of others."""
        return self.clip_and_align(self.public.from_wire(self.server, payload))

    def clip_and_align(self, rows: Mapping[str, Float[Tensor, "n d"]]) -> dict[str, Float[Tensor, "n d"]]:
        """A client's rows by output: norms bounded, mapped to the server's space where ``alignment`` is set."""
        # clipped before: one long row would decide where all others go; no map makes rows longer than 1
        rows = {name: clip_row_norms(values, self._largest) for name, values in rows.items()}
        if self._teacher.alignment is None or not rows:
            return rows
        # one map for all modalities, or what the client relates across them would be lost; the gallery does not
        # contribute to it: on it the map is judged
        reference = [self.outputs[name] * (part_of(name) != GALLERY) for name in rows]
        moved = self._teacher.alignment.move(torch.cat(list(rows.values())), torch.cat(reference))
        return dict(zip(rows, torch.split(moved, [len(values) for values in rows.values()]), strict=True))

    def log_weights(self, reply: Reply, output: str, values: Float[Tensor, "n d"]) -> Float[Tensor, " n"] | float:
        """Log weight of a client on each sample, or one for all; -inf if its group does not count."""
        weights, part = self._teacher.weights, part_of(output)
        if self._teacher.groups is not None and reply.sender.group not in self._teacher.groups:
            return -math.inf
        known = of_part(self.outputs, part)
        if part == UNPAIRED:  # images and captions of different items are not compared with each other
            known = {modality_of(output): self.outputs[output]}
        if part and len(known) < 2 and weights.needs_partner:
            return 0.0  # without a partner all clients count alike
        items = self.server.public.parts[output].items if part else self._samples.items
        evidence = Evidence(
            values=values,
            output=modality_of(output),
            server_outputs=known,
            examples=reply.num_examples,
            modalities=len(reply.sender.modalities),
            items=items.to(values.device),
            # an unpaired part has samples of its own for each modality
            inverse_index={name: rows for name, rows in of_part(self._inverse_index, part).items() if name in known},
        )
        return weights.log_weights(evidence)

    def add_weighed(
        self,
        output: str,
        sender: str,
        values: Float[Tensor, "n d"],
        log_weights: Float[Tensor, " n"] | float,
        mixing: float = 1.0,
    ) -> None:
        """Fold in a client's rows; of a client that the server follows in part, its own rows are the remainder."""
        values = self.mix_with_server(output, values, mixing)
        if output not in self._ensembles:
            count, width = self.outputs[output].shape
            # weights of all samples of all clients would outgrow the ensemble
            shown = fixed_sample(self.server, count, min(HEAT_MAP_SAMPLES, count))
            self._ensembles[output] = Ensemble(count, width, self.server.device, record=shown)
        self._ensembles[output].add(values, log_weights)
        self._senders.setdefault(output, []).append(sender)
        if self._keep_rows:
            logs = torch.as_tensor(log_weights, device=values.device).expand(len(values))
            self._rows.setdefault(output, {})[sender] = Rows(values, logs)

    def mix_with_server(self, output: str, values: Float[Tensor, "n d"], mixing: float) -> Float[Tensor, "n d"]:
        """A client's rows, moved towards the server's own by the share that it does not follow."""
        return torch.lerp(self.outputs[output].to(values), values, mixing) if mixing < 1 else values

    def targets(self, target: Callable[[Ensembled, Tensor], Ensembled] | None = None) -> dict[str, Ensembled]:
        """Targets of the server, for each output that a client sent.

        Records senders and their weights, the agreement of clients, the distance of the mean of a client's rows from
        the server's (``centre_gap``: 0 to 2 of unit vectors, mean over clients), and the targets' quality in the
        server's task.

        Args:
            target: Makes the target of the weighted mean and the server's own outputs; None: ``Teacher.target``.
        """
        server, own, target = self.server, self.outputs, target or self._teacher.target
        senders = of_part(self._senders)
        weights = {name: self._ensembles[name].weights() for name in senders}
        server.diagnostics.arrays |= {f"weights.{name}": (weights[name], ids) for name, ids in senders.items()}
        server.record(**{f"senders.{name}": float(len(ids)) for name, ids in senders.items()})
        server.record(**{f"weight_entropy.{name}": entropy_share(own) for name, own in weights.items() if len(own) > 1})
        server.record(**{f"centre_gap.{name}": fmean(gaps) for name, gaps in of_part(self._gaps).items()})
        means = {name: ensemble.result() for name, ensemble in self._ensembles.items()}
        server.record(**mean_norms(means))
        targets = {
            name: target(mean, own[name])._replace(rows=self._rows.get(name, {})) for name, mean in means.items()
        }
        if count := min(self._teacher.diagnostic_samples, len(self._samples)):
            index = fixed_sample(server, len(self._samples), count)
            server.record(**teacher_quality(server, own, targets, self._samples, index))
        return targets


# ---- diagnostics of a teacher


def entropy_share(weights: Float[Tensor, "c k"]) -> float:
    """Entropy of c clients' weights in percent of that of equal ones, mean over samples: 0 where one has all, to 100.

    >>> round(entropy_share(torch.tensor([[0.5, 1.0], [0.5, 0.0]])))
    50
    """
    counted = weights[:, weights.any(0)].double()
    return 100 * float(torch.special.entr(counted).sum(0).mean()) / math.log(len(counted))


def mean_norms(targets: Mapping[str, Ensembled]) -> dict[str, float]:
    """``mean_norm.<output>``: mean norm of the clients' weighted mean before any scaling.

    Means of unit vectors have norm 1 where all clients agree, and fall to 1 / sqrt(clients) where their spaces have
    nothing in common.
    """
    return {
        f"mean_norm.{name}": float(torch.linalg.vector_norm(target.values[target.valid], dim=1).mean())
        for name, target in of_part(targets).items()
        if bool(target.valid.any())
    }


def teacher_quality(
    server: Server, own: Mapping[str, Tensor], targets: Mapping[str, Ensembled], samples: Samples, index: Tensor
) -> dict[str, float]:
    """The server's primary metric m, of the representations of teacher and server.

    ``teacher.m`` of the targets; ``teacher.m.<modality>`` of the targets of one modality with the server's own
    representations of the others; ``student.m`` of the server's own; ``teacher.gallery``: number of gallery samples,
    from which no participant learns, 0 if public pairs are judged. Empty if the task cannot judge, or samples have no
    target.

    Args:
        server: Server of the run.
        own: The server's outputs.
        targets: Targets by output.
        samples: Exchanged samples.
        index: Samples judged without a ``public.gallery``. The server has trained on these pairs, and ranks them better
            than others.
    """
    gallery = of_part(server.public.parts, GALLERY)
    judge_samples = next(iter(gallery.values())) if gallery else samples.subset(index)
    index = index.to(server.device)

    def rows(outputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        pairs = {} if gallery else of_part(outputs)
        return of_part(outputs, GALLERY) | {name: values[index] for name, values in pairs.items()}

    student = rows(own)
    teacher = rows({name: target.values for name, target in targets.items() if bool(target.valid.all())})
    if not teacher:
        return {}
    metric = server.task.primary
    pairings = {f"teacher.{metric}.{modality}": student | {modality: values} for modality, values in teacher.items()}
    if teacher.keys() == student.keys():
        pairings[f"teacher.{metric}"] = teacher
    pairings[f"student.{metric}"] = student
    values = {name: server.task.judge(representations, judge_samples) for name, representations in pairings.items()}
    metrics = {name: value for name, value in values.items() if value is not None}
    return metrics | {"teacher.gallery": float(len(judge_samples) if gallery else 0)} if metrics else {}
