"""FedGEMS."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, NamedTuple

import torch
from jaxtyping import Bool, Float
from pydantic import Field
from torch import Tensor

from polyfed.aggregation.distinct import Distinct
from polyfed.aggregation.ensemble import Ensembled
from polyfed.aggregation.statistics import row_statistics
from polyfed.aggregation.weighting import Entropy
from polyfed.algorithms.algorithm import Client, Cohort, Lifetime, Reply, Representations, Server, client_step
from polyfed.algorithms.shared.distiller import PublicServer, target_distances
from polyfed.algorithms.shared.public_exchange import PublicExchange
from polyfed.algorithms.shared.teacher import Teacher
from polyfed.core.errors import ConfigError
from polyfed.core.settings import Settings
from polyfed.data.samples import Batch
from polyfed.federation.plan import FederationPlan
from polyfed.losses.contrast import inter_modal
from polyfed.losses.distillation import similarity_kl
from polyfed.models.model import CachedModel

_STORE = "store"


class SelectedTarget(NamedTuple):
    """The server's target for one output on the exchanged samples."""

    teacher: Float[Tensor, "n d"]
    """Representations to move towards; anything finite where no sample is taught."""
    taught: Bool[Tensor, " n"]
    """Samples that have a teacher."""
    anchors: Float[Tensor, "n d"]
    """The server's representations, with which rows are compared."""


class StudyPasses(Settings):
    """A client's passes over the exchanged samples, in which it learns from the server."""

    epochs: int = Field(default=1, ge=1, description="passes per round")
    batch_size: int = Field(default=128, ge=2, description="public samples per step")
    mask_siblings: bool = Field(
        default=True, description="captions of one image are not rivals of each other in the cross-entropy"
    )


class ServerPasses(Settings):
    """The server's passes, in which it learns its task and from its teachers."""

    epochs: int = Field(default=1, ge=1, description="passes over P per round")
    weight: float = Field(default=1.0, ge=0, description="factor of the divergence from the teachers")


class FedGEMS(PublicServer):
    """Federated learning of larger server models via selective knowledge fusion (Cheng et al., arXiv 2110.11027).

    A round: a client trains on its own data, then on the exchanged public samples with eps x task + (1 - eps) x
    KL(server || client), and returns its representations of them. The server weighs clients that are right by their
    certainty, and trains on each sample by its own prediction at the start of the round:

    * right: its task alone, and its representation is stored;
    * wrong, but right in an earlier round: eps x task + (1 - eps) x KL(stored || server);
    * never right: eps x task + (1 - eps) x KL(ensemble || server) if any client is right, else its task alone.

    The paper's outputs are class scores. Here (a reconstruction) they are representations, and softmaxes are over
    their similarities to the server's representations: the server is right in a modality if, of its representations of
    each other modality, the sample's own or a sibling's is nearest; a client's task is the cross-entropy of its
    similarities against the sample itself. As the server's own task is a loss of the batch, its factor is the mean of
    the samples' factors (1 or eps) over batch and modalities. Divergences are averaged over samples and added over
    modalities. Public samples that are not exchanged in a round are learnt by the task alone.

    Server state: its stored representations, |P| x d numbers per output. Metrics, by output: shares of exchanged
    samples that are ``right``, taught from the store (``stored``) or by the ``ensemble``, and learnt ``alone``.
    """

    keeps: ClassVar[Mapping[str, Lifetime]] = {"model": Lifetime.RUN, "optimizer": Lifetime.RUN}
    takes_late_replies: ClassVar[bool] = True

    local_epochs: int = Field(default=5, ge=1, description="E, local epochs per round")
    epsilon: float = Field(default=0.75, ge=0, le=1, description="share of the task where there is a teacher")
    temperature: float | None = Field(
        default=None, gt=0, description="temperature of softmaxes over similarities; None: 0.1"
    )
    study: StudyPasses | None = Field(default=StudyPasses(), description="clients learn from the server; null: no")
    public: PublicExchange = PublicExchange()
    teacher: Teacher = Teacher(weights=Entropy())
    distiller: ServerPasses | None = Field(default=ServerPasses(), description="null: the server does not learn")

    @property
    def server_passes(self) -> int:
        return 0 if self.distiller is None else self.distiller.epochs

    @property
    def tau(self) -> float:
        return self.temperature or 0.1

    def require(self, plan: FederationPlan) -> None:
        super().require(plan)
        if len(plan.server_modalities) < 2:
            raise ConfigError(
                f"algorithm fedgems matches modalities, but server.model encodes {plan.server_modalities}; add an "
                "encoder"
            )
        self.teacher.require(plan)

    # ---- server half

    def round(self, server: Server, cohort: Cohort) -> None:
        """Selective knowledge fusion: clients learn and return, the server learns by the cases of the class."""
        exchange = self.teacher.exchange(self.public, server)
        sent = self.public.for_clients(self.public.to_wire(server, exchange.outputs, exchange.order))
        for reply in exchange.ask(cohort, self.fit, knowledge=sent):  # client training and knowledge transfer
            exchange.add(reply, reply.knowledge)  # ensemble of the clients that are right, by their certainty
        targets = self.selected(server, exchange.outputs, exchange.targets())  # self-distillation or ensemble
        if self.distiller is not None:
            self.distil(server, targets, self.distiller)

    def selected(
        self, server: Server, server_outputs: Representations, ensembles: Mapping[str, Ensembled]
    ) -> dict[str, SelectedTarget]:
        """Targets by the cases of the class, sample by sample; stores the representations that are right."""
        index = server.exchanged_index(self.public.samples).to(server.device)
        targets, store = {}, {name: value.to(server.device) for name, value in server.state.get(_STORE, {}).items()}
        for name, right in self.right(server, server_outputs).items():
            own = server_outputs[name]
            kept = store.setdefault(f"values.{name}", own.new_zeros(len(server.public_set), own.shape[1]))
            has = store.setdefault(f"known.{name}", right.new_zeros(len(server.public_set)))
            stored, ensemble = ~right & has[index], torch.zeros_like(right)
            teacher = kept[index]  # zeros where nothing is stored; these samples are not taught from the store
            if name in ensembles:
                # the store goes before the ensemble, as in the paper: the server prefers its own earlier knowledge
                ensemble = ~right & ~stored & ensembles[name].valid
                teacher = torch.where(ensemble[:, None], ensembles[name].values, teacher)
            targets[name] = SelectedTarget(teacher, stored | ensemble, own)
            cases = {"right": right, "stored": stored, "ensemble": ensemble, "alone": ~(right | stored | ensemble)}
            server.record(**{f"{case}.{name}": float(mask.float().mean()) for case, mask in cases.items()})
            store[f"values.{name}"] = kept.index_copy(0, index[right], own[right])
            store[f"known.{name}"] = has.index_fill(0, index[right], True)
        server.state[_STORE] = store
        return targets

    def right(self, server: Server, server_outputs: Representations) -> dict[str, Bool[Tensor, " n"]]:
        """Maps outputs to the exchanged samples on which the server is right."""
        samples, inverse = self.public.drawn(server), self.public.inverse_index(server)
        known = {name: Distinct.of(rows, inverse.get(name), samples.items) for name, rows in server_outputs.items()}

        def finds(own: Distinct, partner: Distinct) -> Tensor:
            nearest = row_statistics(
                own.rows, partner.rows, {"winner"}, of=own.inverse_index, own=partner.inverse_index, items=partner.items
            )
            return nearest["winner"] == partner.inverse_index

        return {
            name: torch.stack([finds(own, partner) for other, partner in known.items() if other != name]).all(0)
            for name, own in known.items()
        }

    def distil(self, server: Server, targets: Mapping[str, SelectedTarget], passes: ServerPasses) -> None:
        """Passes over the public set on the task and the divergence from the teachers."""
        ensembles = {name: Ensembled(target.teacher, target.taught) for name, target in targets.items()}
        count = self.teacher.diagnostic_samples
        server.record(**target_distances(server, self.public, ensembles, count, "before"))
        # the task's own optimiser: task and divergence are one loss
        trainer, size = server.trainer(), server.training.batch_size
        index = server.exchanged_index(self.public.samples)
        # position of each public sample among the exchanged ones; -1: it is not exchanged
        position = torch.full((len(server.public_set),), -1).index_copy_(0, index, torch.arange(len(index)))
        position = position.to(server.device)
        for batch in self.public.passes(server, "distil", passes.epochs, size):
            trainer.step(self.server_loss(server, batch, targets, position[batch.index], passes.weight))
        server.record(**target_distances(server, self.public, ensembles, count, "after"))

    def server_loss(
        self, server: Server, batch: Batch, targets: Mapping[str, SelectedTarget], position: Tensor, weight: float = 1.0
    ) -> Tensor:
        """Task and divergence from the teachers, each sample with its own shares.

        Args:
            server: Server of the run.
            batch: Public batch.
            targets: Targets by output.
            position: Position of each sample of the batch among the exchanged ones; -1: it is not exchanged.
            weight: Factor of the divergence.
        """
        model, row = CachedModel(server.model), position.clamp_min(0)
        outputs = self.public.batch_outputs(server, model, batch, list(targets))
        factors, parts = [], []
        for name, (teacher, taught, anchors) in targets.items():
            # a sample that was not exchanged this round has no teacher, whatever row 0 holds
            has_teacher = taught[row] & (position >= 0)
            factors.append(torch.where(has_teacher, self.epsilon, 1.0))
            parts.append(((1 - factors[-1]) * similarity_kl(outputs[name], teacher[row], anchors, self.tau)).mean())
        with server.autocast():
            task = torch.stack(factors).mean() * server.task.loss(model, server.head, batch)
        return task + weight * torch.stack(parts).sum()

    # ---- client half

    @client_step(knowledge=Representations, num_examples=int)
    def fit(self, client: Client, knowledge: Representations) -> Reply:
        """Own data, then the server's knowledge of public samples; returns the client's representations of these."""
        client.fit(client.train, epochs=self.local_epochs)
        if self.study is not None and knowledge:
            self.learn_from(self.public.from_wire(client, knowledge), client, self.study)
        own = self.public.client_outputs(client, knowledge.order, list(knowledge))
        return Reply(knowledge=own, num_examples=client.num_examples)

    def learn_from(self, server_outputs: Mapping[str, Tensor], client: Client, study: StudyPasses) -> None:
        """A client's passes over the exchanged samples."""
        samples, trainer = self.public.drawn(client), client.trainer()
        items = samples.items.to(client.device) if study.mask_siblings else None
        for batch in self.public.passes(client, "study", study.epochs, study.batch_size, samples):
            trainer.step(self.study_loss(client, batch, server_outputs, items))

    def study_loss(
        self, client: Client, batch: Batch, server_outputs: Mapping[str, Tensor], items: Tensor | None = None
    ) -> Tensor:
        """eps x task + (1 - eps) x KL(server || client), mean over the batch, added over outputs.

        With ``items``, those of the exchanged samples, siblings are not rivals in the task.
        """
        losses = []
        for name, own in self.public.batch_outputs(client, client.model, batch, list(server_outputs)).items():
            anchors = server_outputs[name]
            # the contrast that CreamFL has between modalities, here within one
            task = inter_modal(own, anchors, batch.index, tau=self.tau, items=items)
            divergence = similarity_kl(own, anchors[batch.index], anchors, self.tau).mean()
            losses.append(self.epsilon * task + (1 - self.epsilon) * divergence)
        return torch.stack(losses).sum()
