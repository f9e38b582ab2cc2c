"""FedGEMS."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, NamedTuple

import torch
from jaxtyping import Bool, Float
from pydantic import Field, SerializeAsAny
from torch import Tensor
from torch.nn import functional as F

from polyfed.aggregation.distinct import Distinct
from polyfed.aggregation.ensemble import Ensembled
from polyfed.aggregation.statistics import row_statistics
from polyfed.aggregation.weighting import Weighting
from polyfed.aggregation.weightings.by_evidence import Entropy
from polyfed.algorithms.algorithm import Client, Cohort, Logits, Reply, Representations, Server, client_step, each
from polyfed.algorithms.shared.either_form import OF_FORM, SoftmaxForm
from polyfed.algorithms.shared.ensembles import MEASURES, EnsembleTeacher
from polyfed.algorithms.shared.public_exchange import DISTILS
from polyfed.core.effects import Condition, Not, Only
from polyfed.core.errors import ConfigError
from polyfed.data.samples import Batch
from polyfed.federation.public_outputs import PublicOutputs
from polyfed.losses.contrast import inter_modal
from polyfed.losses.distillation import row_kl
from polyfed.models.model import CachedModel

_STORE = "store"
_STUDIES = Only(public_epochs=Not(0))  # clients learn from the server
_SHARES = Only(epsilon=Not(1))  # there is more to learn than the task
_LEARNS = Only(kd_epochs=Not(0)) & _SHARES  # who teaches the server decides what it learns


class Lesson(NamedTuple):
    """What the server learns for one output on the exchanged samples."""

    teacher: Float[Tensor, "n w"]
    """What it is to say; anything finite where it is taught nothing."""
    taught: Bool[Tensor, " n"]
    """Samples of which it is taught."""
    anchors: Float[Tensor, "n w"] | None
    """What rows are compared with; None: they are class scores."""


class FedGEMS(SoftmaxForm, EnsembleTeacher):
    """Federated learning of larger server models via selective knowledge fusion (Cheng et al., arXiv 2110.11027).

    A round: a client trains on its own data, then on the exchanged public samples with eps x task + (1 - eps) x
    KL(server || client), and sends its logits on them. The server weighs clients that are right by their certainty, and
    trains on each sample as its own prediction at the start of the round requires:

    * it is right: its task alone, and its logits are stored;
    * it is wrong, but was right in an earlier round: eps x task + (1 - eps) x KL(stored || server);
    * it was never right: eps x task + (1 - eps) x KL(ensemble || server) if any client is right, else its task alone.

    With ``exchange: representations`` (a reconstruction) the server is right in a modality if, of its representations
    of each other modality, the sample's own or a sibling's is nearest; a client's task is then the cross-entropy of its
    similarities to the server's representations against the sample itself. As the server's own task is a loss of the
    whole batch, its factor is the mean of the samples' factors (1 or eps) over batch and modalities; of class scores it
    is exact, and the task is the plain cross-entropy. Divergences are averaged over samples and added over modalities.
    Public samples that are not exchanged in a round are learnt by the task alone.

    Server state: what it was right with, |P| x w numbers an output. Metrics, by output: shares of exchanged samples
    that are ``right``, taught from the store (``stored``) or by the ``ensemble``, and learnt ``alone``.
    """

    only_if: ClassVar[Mapping[str, Condition]] = {
        "aggregation": _LEARNS,  # whatever kd_weight: a sample that is taught has another share of the task
        "kd_weight": _LEARNS,
        "judge_clients": OF_FORM & MEASURES,
        "renormalise_target": DISTILS & _SHARES & OF_FORM,
        "alignment": _LEARNS & OF_FORM,
        "temperature": (DISTILS | _STUDIES) & _SHARES | _STUDIES & OF_FORM,
        "public_augment": Only(kd_epochs=Not(0)) | _STUDIES,
    }

    epsilon: Annotated[float, _STUDIES | Only(kd_epochs=Not(0))] = Field(
        default=0.75, ge=0, le=1, description="share of the task where there is a teacher"
    )
    public_epochs: int = Field(default=1, ge=0, description="a client's passes over the exchanged samples a round")
    public_batch_size: Annotated[int, _STUDIES] = Field(
        default=128, ge=2, description="public samples a step of a client"
    )
    mask_siblings: Annotated[bool, _STUDIES & OF_FORM] = Field(
        default=True, description="representations: captions of one picture are no rivals in a client's cross-entropy"
    )
    aggregation: SerializeAsAny[Weighting] = Field(
        default=Entropy(), description="weights over clients; the paper's: entropy, of those that are right"
    )
    kd_epochs: int = Field(default=1, ge=0, description="the server's passes over P a round")

    # ---- server half

    def setup(self, server: Server) -> None:
        """Check that the server can be right or wrong.

        Raises:
            ConfigError: there are no classes, or there is no other modality.
        """
        if self.exchange == "scores" and self.output_kind.labels(server, server.public_set) is None:
            raise ConfigError(
                "algorithm fedgems with exchange: scores asks who is right, but the public set has no classes; name "
                "their column under the source's targets, or set algorithm.exchange=representations"
            )
        if self.exchange == "representations" and len(server.model.modalities) < 2:
            raise ConfigError(
                "algorithm fedgems with exchange: representations matches modalities, but server.model encodes "
                f"{list(server.model.modalities)}; add an encoder, or set algorithm.exchange=scores"
            )
        super().setup(server)

    def aggregate(self, server: Server, cohort: Cohort, server_outputs: PublicOutputs) -> dict[str, Lesson]:
        ensembles = self.ensembles(server, server_outputs)
        check = self.outputs_check(server, server_outputs, "knowledge")
        sent = self.to_wire(server, server_outputs, server_outputs.order)
        for reply in cohort.ask(self.fit, check=check, knowledge=each(self.outputs_for(sent))):
            ensembles.add(reply, reply.knowledge)
        return self.lessons(server, server_outputs, ensembles.targets())

    def lessons(
        self, server: Server, server_outputs: PublicOutputs, targets: Mapping[str, Ensembled]
    ) -> dict[str, Lesson]:
        """The four cases, sample by sample; keeps what the server is right with."""
        index = server.exchanged_index(self.public_samples).to(server.device)
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
            lessons[name] = Lesson(teacher, stored | ensemble, self.anchors(server_outputs, name))
            cases = {"right": right, "stored": stored, "ensemble": ensemble, "alone": ~(right | stored | ensemble)}
            server.record(**{f"{case}.{name}": float(mask.float().mean()) for case, mask in cases.items()})
            store[f"values.{name}"] = kept.index_copy(0, index[right], own[right])
            store[f"known.{name}"] = has.index_fill(0, index[right], True)
        server.state[_STORE] = store
        return lessons

    def right(self, server: Server, server_outputs: PublicOutputs) -> dict[str, Bool[Tensor, " n"]]:
        """Of which exchanged samples the server is right, by output."""
        samples = server.exchanged(self.public_samples)
        labels = self.output_kind.labels(server, samples) if self.exchange == "scores" else None
        if labels is not None:
            return {name: values.argmax(1) == labels.to(values.device) for name, values in server_outputs.items()}
        places = self.places(server)
        known = {name: Distinct.of(rows, places.get(name), samples.items) for name, rows in server_outputs.items()}

        def finds(own: Distinct, partner: Distinct) -> Tensor:
            found = row_statistics(
                own.rows, partner.rows, {"winner"}, of=own.places, own=partner.places, items=partner.items
            )
            return found["winner"] == partner.places

        return {
            name: torch.stack([finds(own, partner) for other, partner in known.items() if other != name]).all(0)
            for name, own in known.items()
        }

    def distil(self, server: Server, targets: Mapping[str, Lesson]) -> None:
        goals = {name: Ensembled(lesson.teacher, lesson.taught) for name, lesson in targets.items()}
        server.record(**self.distances(server, goals, "before"))
        # the task's own optimiser: lessons and task are one loss
        trainer, size = server.trainer(), server.training.batch_size
        place = torch.full((len(server.public_set),), -1).index_copy_(
            0, index := server.exchanged_index(self.public_samples), torch.arange(len(index))
        )
        place = place.to(server.device)  # of each public sample among the exchanged ones; -1: it is not one
        for batch in self.public_passes(server, "distil", self.kd_epochs, size):
            trainer.step(self.lesson_loss(server, batch, targets, place[batch.index]))
        server.record(**self.distances(server, goals, "after"))

    def lesson_loss(self, server: Server, batch: Batch, lessons: Mapping[str, Lesson], place: Tensor) -> Tensor:
        """Task and divergence from the teachers, each sample with its own shares.

        ``place`` is that of each sample of the batch among the exchanged ones; -1: it is not one of them.
        """
        model, row = CachedModel(server.model), place.clamp_min(0)
        outputs = self.output_kind.outputs(server, model, batch, list(lessons))
        factors, parts = [], []
        for name, (teacher, taught, anchors) in lessons.items():
            # a sample that was not exchanged this round has no teacher, whatever row 0 says
            lesson = taught[row] & (place >= 0)
            factors.append(torch.where(lesson, self.epsilon, 1.0))
            parts.append(((1 - factors[-1]) * row_kl(outputs[name], teacher[row], anchors, self.tau)).mean())
        if self.exchange == "scores":
            ((name, logits),) = outputs.items()
            task = (factors[0] * F.cross_entropy(logits, batch.targets[name].long(), reduction="none")).mean()
        else:
            with server.autocast():
                task = torch.stack(factors).mean() * server.task.loss(model, server.head, batch)
        return task + self.kd_weight * torch.stack(parts).sum()

    # ---- client half

    @client_step(knowledge=Representations | Logits, num_examples=int)
    def fit(self, client: Client, knowledge: Representations | Logits) -> Reply:
        """Own data, then public samples; replies with the client's outputs on these."""
        client.fit(client.train, epochs=self.local_epochs)
        self.study(client, self.from_wire(client, knowledge))
        own = self.client_outputs(client, knowledge.order, list(knowledge))
        return Reply(knowledge=own, num_examples=client.num_examples)

    def study(self, client: Client, server_outputs: Mapping[str, Tensor]) -> None:
        samples, trainer = client.exchanged(self.public_samples), client.trainer()
        items = samples.items.to(client.device) if self.mask_siblings else None
        epochs = self.public_epochs if server_outputs else 0
        for batch in self.public_passes(client, "study", epochs, self.public_batch_size, samples):
            trainer.step(self.study_loss(client, batch, server_outputs, items))

    def study_loss(
        self, client: Client, batch: Batch, server_outputs: Mapping[str, Tensor], items: Tensor | None = None
    ) -> Tensor:
        """eps x task + (1 - eps) x KL(server || client), mean over the batch, added over outputs.

        With ``items``, those of the exchanged samples, siblings are no rivals in the task of representations.
        """
        anchors, losses = self.output_kind.anchors(server_outputs), []
        for name, own in self.output_kind.outputs(client, client.model, batch, list(server_outputs)).items():
            among = anchors.get(name)
            if among is None:
                task = F.cross_entropy(own, batch.targets[name].long())
            else:  # the contrast that CreamFL has between modalities, here within one
                task = inter_modal(own, among, batch.index, tau=self.tau, items=items)
            divergence = row_kl(own, server_outputs[name][batch.index], among, self.tau).mean()
            losses.append(self.epsilon * task + (1 - self.epsilon) * divergence)
        return torch.stack(losses).sum()
