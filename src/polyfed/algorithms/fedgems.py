"""FedGEMS."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, NamedTuple

import torch
from jaxtyping import Bool, Float
from pydantic import Field
from torch import Tensor
from torch.nn import functional as F

from polyfed.aggregation.distinct import Distinct
from polyfed.aggregation.ensemble import Ensembled
from polyfed.aggregation.statistics import row_statistics
from polyfed.aggregation.weighting import Entropy
from polyfed.algorithms.algorithm import (
    Algorithm,
    Client,
    Cohort,
    FederationPlan,
    Lifetime,
    Logits,
    Reply,
    Representations,
    Server,
    client_step,
    each,
)
from polyfed.algorithms.shared.distiller import target_distances
from polyfed.algorithms.shared.public_exchange import EitherExchange, PublicOutputs
from polyfed.algorithms.shared.teacher import Teacher
from polyfed.core.errors import ConfigError
from polyfed.core.settings import Settings
from polyfed.data.samples import Batch
from polyfed.losses.contrast import inter_modal
from polyfed.losses.distillation import row_kl
from polyfed.models.model import CachedModel
from polyfed.wire.schema import Declared

_STORE = "store"


class DistillationTarget(NamedTuple):
    """What the server learns for one output on the exchanged samples."""

    teacher: Float[Tensor, "n w"]
    """What it is to say; anything finite where it is taught nothing."""
    taught: Bool[Tensor, " n"]
    """Samples of which it is taught."""
    anchors: Float[Tensor, "n w"] | None
    """What rows are compared with; None: they are class scores."""


class StudyPasses(Settings):
    """A client's passes over the exchanged samples, in which it learns from the server."""

    epochs: int = Field(default=1, ge=1, description="passes a round")
    batch_size: int = Field(default=128, ge=2, description="public samples a step")
    mask_siblings: bool = Field(
        default=True, description="representations: captions of one picture are no rivals in the cross-entropy"
    )


class ServerPasses(Settings):
    """The server's passes, in which it learns its task and its lessons."""

    epochs: int = Field(default=1, ge=1, description="passes over P a round")
    weight: float = Field(default=1.0, ge=0, description="factor of the divergence from the teachers")


class FedGEMS(Algorithm):
    """Federated learning of larger server models via selective knowledge fusion (Cheng et al., arXiv 2110.11027).

    A round: a client trains on its own data, then on the exchanged public samples with eps x task + (1 - eps) x
    KL(server || client), and sends its logits on them. The server weighs clients that are right by their certainty, and
    trains on each sample as its own prediction at the start of the round requires:

    * it is right: its task alone, and its logits are stored;
    * it is wrong, but was right in an earlier round: eps x task + (1 - eps) x KL(stored || server);
    * it was never right: eps x task + (1 - eps) x KL(ensemble || server) if any client is right, else its task alone.

    With ``public.form: representations`` (a reconstruction) the server is right in a modality if, of its
    representations of each other modality, the sample's own or a sibling's is nearest; a client's task is then the
    cross-entropy of its similarities to the server's representations against the sample itself. As the server's own
    task is a loss of the whole batch, its factor is the mean of the samples' factors (1 or eps) over batch and
    modalities; of class scores it is exact, and the task is the plain cross-entropy. Divergences are averaged over
    samples and added over modalities.
    Public samples that are not exchanged in a round are learnt by the task alone.

    Server state: what it was right with, |P| x w numbers an output. Metrics, by output: shares of exchanged samples
    that are ``right``, taught from the store (``stored``) or by the ``ensemble``, and learnt ``alone``.
    """

    keeps: ClassVar[Mapping[str, Lifetime]] = {"model": Lifetime.RUN, "optimizer": Lifetime.RUN}
    takes_late_replies: ClassVar[bool] = True
    needs_public: ClassVar[bool] = True
    needs_server: ClassVar[bool] = True

    local_epochs: int = Field(default=5, ge=1, description="E, local epochs a round")
    epsilon: float = Field(default=0.75, ge=0, le=1, description="share of the task where there is a teacher")
    temperature: float | None = Field(
        default=None, gt=0, description="of softmaxes over classes; None: 1 for scores, 0.1 for similarities"
    )
    study: StudyPasses | None = Field(default=StudyPasses(), description="clients learn from the server; null: no")
    public: EitherExchange = EitherExchange()
    teacher: Teacher = Teacher(weights=Entropy())
    distiller: ServerPasses | None = Field(default=ServerPasses(), description="null: the server does not learn")

    @property
    def server_passes(self) -> int:
        return 0 if self.distiller is None else self.distiller.epochs

    @property
    def tau(self) -> float:
        return self.public.tau(self.temperature)

    def sends(self, declared: Declared) -> Declared:
        return self.public.sends(declared)

    # ---- server half

    def require(self, plan: FederationPlan) -> None:
        super().require(plan)
        self.public.require(plan)
        self._require_classes(plan)
        if not self.public.exchanges_scores and len(plan.server_modalities) < 2:
            raise ConfigError(
                "algorithm fedgems with public.form: representations matches modalities, but server.model encodes "
                f"{plan.server_modalities}; add an encoder, or set algorithm.public.form=scores"
            )
        self.teacher.require(plan, self.public)

    def setup(self, server: Server) -> None:
        """Check that the server can be right or wrong.

        Raises:
            ConfigError: there are no classes.
        """
        self.public.require_samples(server)
        self._require_classes(server)
        self.teacher.require_labels(server, self.public)

    def _require_classes(self, federation: FederationPlan | Server) -> None:
        if self.public.exchanges_scores and not self.public.has_classes(federation):
            raise ConfigError(
                "algorithm fedgems with public.form: scores asks who is right, but the public set has no classes; name "
                "their column under the source's targets, or set algorithm.public.form=representations"
            )

    def round(self, server: Server, cohort: Cohort) -> None:
        """Clients train and study, the server weighs their outputs, and learns where it is wrong."""
        own = self.public.server_outputs(server)
        lessons = self.lessons(server, own, self.ask(server, cohort, own))
        if self.distiller is not None:
            self.learn(server, lessons, self.distiller)

    def ask(self, server: Server, cohort: Cohort, own: PublicOutputs) -> dict[str, Ensembled]:
        """Ask the cohort to train and study, and weigh its outputs."""
        ensembles = self.teacher.ensembles(server, self.public, own)
        layout = self.public.layout(server, own, "knowledge")
        sent = self.public.to_wire(server, own, own.order)
        for reply in cohort.ask(self.fit, like=layout, knowledge=each(self.public.outputs_for(sent))):
            ensembles.add(reply, reply.knowledge)
        return ensembles.targets()

    def lessons(
        self, server: Server, server_outputs: PublicOutputs, targets: Mapping[str, Ensembled]
    ) -> dict[str, DistillationTarget]:
        """The four cases, sample by sample; keeps what the server is right with."""
        index = server.exchanged_index(self.public.samples).to(server.device)
        lessons, store = {}, {name: value.to(server.device) for name, value in server.state.get(_STORE, {}).items()}
        for name, right in self.right(server, server_outputs).items():
            own = server_outputs[name]
            kept = store.setdefault(f"values.{name}", own.new_zeros(len(server.public_set), own.shape[1]))
            has = store.setdefault(f"known.{name}", right.new_zeros(len(server.public_set)))
            stored, ensemble = ~right & has[index], torch.zeros_like(right)
            teacher = kept[index]  # zeros where nothing is stored, of which nobody is taught
            if name in targets:
                # the store goes before the ensemble, as in the paper: the server prefers what it once knew
                ensemble = ~right & ~stored & targets[name].valid
                teacher = torch.where(ensemble[:, None], targets[name].values, teacher)
            lessons[name] = DistillationTarget(teacher, stored | ensemble, self.public.anchors(server_outputs, name))
            cases = {"right": right, "stored": stored, "ensemble": ensemble, "alone": ~(right | stored | ensemble)}
            server.record(**{f"{case}.{name}": float(mask.float().mean()) for case, mask in cases.items()})
            store[f"values.{name}"] = kept.index_copy(0, index[right], own[right])
            store[f"known.{name}"] = has.index_fill(0, index[right], True)
        server.state[_STORE] = store
        return lessons

    def right(self, server: Server, server_outputs: PublicOutputs) -> dict[str, Bool[Tensor, " n"]]:
        """Of which exchanged samples the server is right, by output."""
        samples = self.public.drawn(server)
        labels = self.public.labels(server, samples)
        if labels is not None:
            return {name: values.argmax(1) == labels.to(values.device) for name, values in server_outputs.items()}
        inverse = self.public.inverse_index(server)
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

    def learn(self, server: Server, lessons: Mapping[str, DistillationTarget], passes: ServerPasses) -> None:
        """Passes over the public set with the task and the lessons."""
        targets = {name: Ensembled(lesson.teacher, lesson.taught) for name, lesson in lessons.items()}
        count = self.teacher.diagnostic_samples
        server.record(**target_distances(server, self.public, targets, count, "before"))
        # the task's own optimiser: lessons and task are one loss
        trainer, size = server.trainer(), server.training.batch_size
        place = torch.full((len(server.public_set),), -1).index_copy_(
            0, index := server.exchanged_index(self.public.samples), torch.arange(len(index))
        )
        place = place.to(server.device)  # of each public sample among the exchanged ones; -1: it is not one
        for batch in self.public.passes(server, "distil", passes.epochs, size):
            trainer.step(self.lesson_loss(server, batch, lessons, place[batch.index], passes.weight))
        server.record(**target_distances(server, self.public, targets, count, "after"))

    def lesson_loss(
        self,
        server: Server,
        batch: Batch,
        lessons: Mapping[str, DistillationTarget],
        place: Tensor,
        weight: float = 1.0,
    ) -> Tensor:
        """Task and divergence from the teachers, each sample with its own shares.

        ``place`` is that of each sample of the batch among the exchanged ones; -1: it is not one of them.
        """
        model, row = CachedModel(server.model), place.clamp_min(0)
        outputs = self.public.batch_outputs(server, model, batch, list(lessons))
        factors, parts = [], []
        for name, (teacher, taught, anchors) in lessons.items():
            # a sample that was not exchanged this round has no teacher, whatever row 0 says
            lesson = taught[row] & (place >= 0)
            factors.append(torch.where(lesson, self.epsilon, 1.0))
            parts.append(((1 - factors[-1]) * row_kl(outputs[name], teacher[row], anchors, self.tau)).mean())
        if self.public.exchanges_scores:
            ((name, logits),) = outputs.items()
            task = (factors[0] * F.cross_entropy(logits, batch.targets[name].long(), reduction="none")).mean()
        else:
            with server.autocast():
                task = torch.stack(factors).mean() * server.task.loss(model, server.head, batch)
        return task + weight * torch.stack(parts).sum()

    # ---- client half

    @client_step(knowledge=Representations | Logits, num_examples=int)
    def fit(self, client: Client, knowledge: Representations | Logits) -> Reply:
        """Own data, then public samples; replies with the client's outputs on these."""
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

        With ``items``, those of the exchanged samples, siblings are no rivals in the task of representations.
        """
        losses = []
        for name, own in self.public.batch_outputs(client, client.model, batch, list(server_outputs)).items():
            among = None if self.public.exchanges_scores else server_outputs[name]
            if among is None:
                task = F.cross_entropy(own, batch.targets[name].long())
            else:  # the contrast that CreamFL has between modalities, here within one
                task = inter_modal(own, among, batch.index, tau=self.tau, items=items)
            divergence = row_kl(own, server_outputs[name][batch.index], among, self.tau).mean()
            losses.append(self.epsilon * task + (1 - self.epsilon) * divergence)
        return torch.stack(losses).sum()
