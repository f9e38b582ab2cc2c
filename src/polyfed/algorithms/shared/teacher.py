"""Ensembles of clients' outputs on the public set: the teacher of server models, a part that methods hold."""

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
from polyfed.algorithms.algorithm import FederationPlan, Reply, Server
from polyfed.algorithms.shared.public_exchange import (
    GALLERY,
    UNPAIRED,
    PublicExchange,
    PublicOutputs,
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
    """What the server learns from: clients' outputs, weighed into one ensemble, sample by sample."""

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

    def require(self, plan: FederationPlan, public: PublicExchange) -> None:
        """Check that the settings suit the clients and what crosses.

        Raises:
            ConfigError: they do not.
        """
        groups = {client.group for client in plan.clients}
        for name in {*(self.groups or ())} - groups if groups else ():
            raise ConfigError(f"algorithm.teacher.groups: no clients are called '{name}'; {nearest(name, groups)}")
        if public.exchanges_scores:
            self._require_scores()
            self.require_labels(plan, public)
        elif self.weights.needs_partner and len(plan.server_modalities) < 2:
            raise ConfigError(
                f"algorithm.teacher.weights '{self.weights.component_name()}' contrasts modalities, but server.model "
                f"encodes {plan.server_modalities}; add an encoder, or choose mean or sed"
            )

    def _require_scores(self) -> None:
        given = [key for key in ("renormalise", "alignment") if getattr(self, key)]
        given += [f"weights.{key}" for key in ("mask_siblings", "include_self") if getattr(self.weights, key, False)]
        if given:
            raise ConfigError(f"algorithm.teacher.{given[0]} is of representations, but scores cross; leave it out")

    def require_labels(self, federation: FederationPlan | Server, public: PublicExchange) -> None:
        """Check that the public set has the classes by which scores are weighed.

        Raises:
            ConfigError: it has not.
        """
        if public.exchanges_scores and self.weights.needs_labels and not public.has_classes(federation):
            raise ConfigError(
                f"algorithm.teacher.weights '{self.weights.component_name()}' weighs scores by the true class, which "
                "the public set lacks; name its column under the source's targets, or choose mean or variance"
            )

    def ensembles(
        self,
        server: Server,
        public: PublicExchange,
        own: PublicOutputs,
        *,
        keep_rows: bool = False,
        largest: float | None = None,
    ) -> Ensembles:
        """Where the replies of a round are folded in as they come.

        Args:
            server: of the run.
            public: what crosses.
            own: the server's own outputs, output -> [n, w], beside which clients are weighed.
            keep_rows: whether each client's rows are kept beside their mean.
            largest: norm of a client's row at most, longer ones are scaled down; None: that of what crosses.
        """
        return Ensembles(self, public, server, own, keep_rows, largest or public.largest_norm)

    def target(self, mean: Ensembled, own: Float[Tensor, "n w"]) -> Ensembled:
        """What the server is to learn of a weighted mean, beside its own outputs."""
        return mean._replace(values=F.normalize(mean.values, dim=-1)) if self.renormalise else mean


class Ensembles:
    """One weighted ensemble an output, into which clients' replies are folded as they come; see ``Teacher``."""

    def __init__(
        self,
        teacher: Teacher,
        public: PublicExchange,
        server: Server,
        own: PublicOutputs,
        keep_rows: bool,
        largest: float,
    ) -> None:
        self._teacher, self._public, self._server, self._server_outputs = teacher, public, server, own
        self._keep_rows, self._largest = keep_rows, largest
        self._samples, self._inverse_index = public.drawn(server), public.inverse_index(server)
        self._labels = public.labels(server, self._samples)
        self._ensembles: dict[str, Ensemble] = {}
        self._senders: dict[str, list[str]] = {}
        self._gaps: dict[str, list[float]] = {}
        self._rows: dict[str, dict[str, Rows]] = {}

    def add(self, reply: Reply, payload: PublicOutputs) -> None:
        """Fold in one client's outputs; no row outweighs others by its norm."""
        for output, values in self.received(payload).items():
            # weights come of the rows that count
            weights = self.log_weights(reply, output, values)
            gap = values.mean(0) - self._server_outputs[output].mean(0).to(values)
            self._gaps.setdefault(output, []).append(float(torch.linalg.vector_norm(gap)))
            self.add_weighed(output, reply.sender.id, values, weights, reply.mixing)

    def received(self, payload: PublicOutputs) -> dict[str, Float[Tensor, "n w"]]:
        """A client's rows by output, as they can be compared with others'."""
        return self.clip_and_align(self._public.from_wire(self._server, payload))

    def clip_and_align(self, rows: Mapping[str, Float[Tensor, "n w"]]) -> dict[str, Float[Tensor, "n w"]]:
        """A client's rows by output: norms bounded, in the server's space if they are to be aligned."""
        # clipped before: one long row would decide where all others go; no map makes rows longer than 1
        rows = {name: clip_row_norms(values, self._largest) for name, values in rows.items()}
        if self._teacher.alignment is None or not rows:
            return rows
        # one map for all modalities, or what the client relates across them would be lost; the gallery does not
        # contribute to it: on it the map is judged
        reference = [self._server_outputs[name] * (part_of(name) != GALLERY) for name in rows]
        moved = self._teacher.alignment.move(torch.cat(list(rows.values())), torch.cat(reference))
        return dict(zip(rows, torch.split(moved, [len(values) for values in rows.values()]), strict=True))

    def log_weights(self, reply: Reply, output: str, values: Float[Tensor, "n w"]) -> Float[Tensor, " n"] | float:
        """Log weight of a client on each sample, or one for all; -inf if its group does not count."""
        weights, part = self._teacher.weights, part_of(output)
        if self._teacher.groups is not None and reply.sender.group not in self._teacher.groups:
            return -math.inf
        known = of_part(self._server_outputs, part)
        if part == UNPAIRED:  # pictures and captions, but not of the same items: nothing that is compared with another
            known = {modality_of(output): self._server_outputs[output]}
        if part and len(known) < 2 and weights.needs_partner:
            return 0.0  # without a partner nobody can be told from others
        items = self._server.public.parts[output].items if part else self._samples.items
        evidence = Evidence(
            values=values,
            output=modality_of(output),
            server_outputs={} if self._public.exchanges_scores else known,
            examples=reply.num_examples,
            modalities=len(reply.sender.modalities),
            labels=None if self._labels is None else self._labels.to(values.device),
            items=items.to(values.device),
            # an unpaired part has samples of its own for each modality
            inverse_index={name: rows for name, rows in of_part(self._inverse_index, part).items() if name in known},
        )
        return weights.log_weights(evidence)

    def add_weighed(
        self,
        output: str,
        sender: str,
        values: Float[Tensor, "n w"],
        log_weights: Float[Tensor, " n"] | float,
        mixing: float = 1.0,
    ) -> None:
        """Fold in a client's rows; of one that the server follows in part, its own rows are the rest."""
        values = self.mix_with_server(output, values, mixing)
        if output not in self._ensembles:
            count, width = self._server_outputs[output].shape
            # weights of all samples of all clients would outgrow the ensemble
            shown = fixed_sample(self._server, count, min(HEAT_MAP_SAMPLES, count))
            self._ensembles[output] = Ensemble(count, width, self._server.device, record=shown)
        self._ensembles[output].add(values, log_weights)
        self._senders.setdefault(output, []).append(sender)
        if self._keep_rows:
            logs = torch.as_tensor(log_weights, device=values.device).expand(len(values))
            self._rows.setdefault(output, {})[sender] = Rows(values, logs)

    def mix_with_server(self, output: str, values: Float[Tensor, "n w"], mixing: float) -> Float[Tensor, "n w"]:
        """A client's rows as far as the server follows them from its own."""
        return torch.lerp(self._server_outputs[output].to(values), values, mixing) if mixing < 1 else values

    def targets(self, target: Callable[[Ensembled, Tensor], Ensembled] | None = None) -> dict[str, Ensembled]:
        """What the server is to learn, for each output that somebody sent.

        Records who sent and with which weight, how far clients agree, how far the mean of a client's rows lies from
        the server's (``centre_gap``: 0 to 2 of unit vectors, mean over clients), and how well the targets do the
        server's task.
        ``target`` makes it of the weighted mean and the server's own outputs; None: ``Teacher.target``.
        """
        server, own, target = self._server, self._server_outputs, target or self._teacher.target
        senders = of_part(self._senders)
        weights = {name: self._ensembles[name].weights() for name in senders}
        server.diagnostics.arrays |= {f"weights.{name}": (weights[name], ids) for name, ids in senders.items()}
        server.record(**{f"senders.{name}": float(len(ids)) for name, ids in senders.items()})
        server.record(**{f"weight_entropy.{name}": entropy_share(own) for name, own in weights.items() if len(own) > 1})
        if not self._public.exchanges_scores:
            server.record(**{f"centre_gap.{name}": fmean(gaps) for name, gaps in of_part(self._gaps).items()})
        means = {name: ensemble.result() for name, ensemble in self._ensembles.items()}
        server.record(**mean_norms(means))
        targets = {
            name: target(mean, own[name])._replace(rows=self._rows.get(name, {})) for name, mean in means.items()
        }
        count = min(self._teacher.diagnostic_samples, len(self._samples))
        if count and not self._public.exchanges_scores:
            index = fixed_sample(server, len(self._samples), count)
            server.record(**teacher_quality(server, own, targets, self._samples, index))
        return targets


# ---- whether an ensemble of clients is a teacher that the server can learn from


def entropy_share(weights: Float[Tensor, "c k"]) -> float:
    """Entropy of c clients' weights in percent of that of equal ones, mean over samples: 0 where one has all, to 100.

    >>> round(entropy_share(torch.tensor([[0.5, 1.0], [0.5, 0.0]])))
    50
    """
    counted = weights[:, weights.any(0)].double()
    return 100 * float(torch.special.entr(counted).sum(0).mean()) / math.log(len(counted))


def mean_norms(targets: Mapping[str, Ensembled]) -> dict[str, float]:
    """``mean_norm.<output>``: mean norm of the clients' weighted mean before any scaling.

    Means of unit vectors have norm 1 where all clients agree, and fall to 1 / sqrt(clients) where nothing is common to
    their spaces.
    """
    return {
        f"mean_norm.{name}": float(torch.linalg.vector_norm(target.values[target.valid], dim=1).mean())
        for name, target in of_part(targets).items()
        if bool(target.valid.any())
    }


def teacher_quality(
    server: Server, own: Mapping[str, Tensor], targets: Mapping[str, Ensembled], samples: Samples, index: Tensor
) -> dict[str, float]:
    """The server's task as a judge of representations: its primary metric m, of teacher and server.

    ``teacher.m`` of the targets; ``teacher.m.<modality>`` of those of one modality beside the server's own of the
    others; ``student.m`` of the server's own; ``teacher.gallery``: how many samples nobody learns from, 0 if they are
    public pairs. Nothing if the task cannot judge, or samples have no target.

    Args:
        server: of the run.
        own: the server's outputs.
        targets: by output.
        samples: those that were exchanged.
        index: among these, where there is no ``public.gallery``, on which nobody learns: on these pairs the server
            ranks better than on others, as it has trained on them.
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
