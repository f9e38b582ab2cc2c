"""FedMKD."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import ClassVar, NamedTuple, Self

import torch
from jaxtyping import Float
from pydantic import Field, model_validator
from torch import Tensor, nn
from torch.nn import functional as F

from polyfed.algorithms.algorithm import Client, Cohort, Lifetime, Reply, Representations, Server, client_step
from polyfed.algorithms.shared.distiller import PublicServer, ServerTask
from polyfed.algorithms.shared.local_losses import Byol, SecondViews, random_views
from polyfed.algorithms.shared.public_exchange import Exchange, PublicExchange, clip_row_norms, fixed_sample
from polyfed.algorithms.shared.teacher import HEAT_MAP_SAMPLES
from polyfed.core.randomness import isolated
from polyfed.core.settings import Settings
from polyfed.core.untrusted import read_json
from polyfed.data.samples import Batch, Samples
from polyfed.federation.settings import TrainingSettings
from polyfed.losses.contrast import queue_contrast
from polyfed.losses.self_supervised import Predictor
from polyfed.models.model import CachedModel

_OPTIMIZER, _QUEUE = "student", "queue"


class Teachers(NamedTuple):
    """Clients' rows for one output on the exchanged samples, of unit norm."""

    values: Float[Tensor, "t n d"]
    senders: list[str]


class TargetContrast(Settings):
    """Contrast of the student's output with the teachers' target, and other samples' targets as negatives."""

    weight: float = Field(default=0.9, gt=0, description="factor of the contrast with the teachers' target")
    temperature: float | None = Field(default=0.1, gt=0, description="temperature of the contrast; None: 0.1")
    queue: int = Field(default=1024, ge=0, description="past targets per output that serve as negatives")


class StudentPasses(Settings):
    """The server's passes, in which it learns from the teachers."""

    epochs: int = Field(default=5, ge=1, description="passes over the exchanged samples per round")
    weight: float = Field(default=1.0, ge=0, description="factor of the loss")
    training: TrainingSettings | None = Field(
        default=None, description="optimiser; None: settings of the server's training"
    )


class FedMKD(PublicServer):
    """Multi-teacher knowledge distillation on unlabelled public data (FedMKD, NeurIPS 2024).

    Clients train on their own tasks and return their representations of the exchanged samples. The server's model
    learns from them in ``distiller.epochs`` passes, with a target for each sample and output that an attention over the
    teachers makes:

        0.1 BYOL + 0.9 InfoNCE(student, target; queue of past targets).

    BYOL compares two training views of each modality whose view is random, by a predictor and a slow copy of the
    encoders. The contrast compares the student's output with the teachers' target, both of unit norm; teachers have
    unit norm too, so that none outweighs others by its scale. The attention learns with the student, in one optimiser
    (``distiller.training``). Inferred, not stated in the paper: that this is the baseline of that name in multimodal
    studies, the form with representations of several modalities, negatives from the batch in addition to those of the
    queue, and leaving out negatives of the same item.

    Server state: adapters and predictors, the slow encoders, the queues. The outputs of a round's teachers are held at
    once, twice for a moment: teachers x exchanged samples x d x 4 bytes per output. Metrics: mean ``byol`` and
    ``contrast``; the weights of teachers as arrays.
    """

    keeps: ClassVar[Mapping[str, Lifetime]] = {"model": Lifetime.RUN, "optimizer": Lifetime.RUN}
    learns_by_fit: ClassVar[bool] = True

    local_epochs: int = Field(default=5, ge=1, description="E, local epochs per round")
    byol: Byol | None = Byol(weight=0.1)
    contrast: TargetContrast | None = TargetContrast()
    public: PublicExchange = PublicExchange(augment=True)
    task: ServerTask | None = ServerTask()
    distiller: StudentPasses | None = StudentPasses()

    @model_validator(mode="after")
    def _learns_something(self) -> Self:
        if self.task is not None and self.task.order != "last":
            raise ValueError(f"task.order is {self.task.order}, but FedMKD's server trains its task last; leave it")
        if self.distiller is not None and self.byol is None and self.contrast is None:
            raise ValueError("byol and contrast are both null; set distiller itself to null")
        return self

    @property
    def server_passes(self) -> int:
        return (self.task.epochs if self.task else 0) + (self.distiller.epochs if self.distiller else 0)

    # ---- server half

    def round(self, server: Server, cohort: Cohort) -> None:
        """Clients train and return representations, the server trains its task, then learns from all teachers."""
        exchange = self.public.exchange(server)
        teachers = self.teachers(exchange, cohort)
        if self.task is not None:
            server.fit(server.public_set, epochs=self.task.epochs)
        if self.distiller is not None:
            self.distil(server, teachers, self.distiller)

    def teachers(self, exchange: Exchange, cohort: Cohort) -> dict[str, Teachers]:
        """Rows of the cohort by output; an output that no client returns has no teachers."""
        server, outputs = exchange.server, exchange.outputs
        rows: dict[str, list[Tensor]] = {name: [values[:0]] for name, values in outputs.items()}
        senders: dict[str, list[str]] = {name: [] for name in outputs}
        for reply in exchange.ask(cohort, self.fit, order=exchange.order, channels=exchange.wanted):
            for name, values in self.public.from_wire(server, reply.knowledge).items():
                # unit norm: no teacher counts by its scale
                rows[name].append(F.normalize(clip_row_norms(values).float(), dim=1))
                senders[name].append(reply.sender.id)
        server.record(**{f"senders.{name}": float(len(ids)) for name, ids in senders.items() if ids})
        shapes = {name: (-1, *values.shape) for name, values in outputs.items()}
        return {name: Teachers(torch.cat(parts).view(shapes[name]), senders[name]) for name, parts in rows.items()}

    def distil(self, server: Server, teachers: Mapping[str, Teachers], passes: StudentPasses) -> None:
        """Passes over the exchanged samples; keeps the weights of the teachers for the report."""
        present = {name: one for name, one in teachers.items() if one.senders}
        if not present:
            return
        widths = {name: one.values.shape[2] for name, one in teachers.items()}
        samples = self.public.drawn(server)
        student = Student(self, passes, server, samples, widths)
        size = (passes.training or server.training).batch_size
        for batch in self.public.passes(server, "distil", passes.epochs, size, samples):
            student.learn(batch, present)
        student.keep()
        server.record(**student.means())
        index = fixed_sample(server, len(samples), min(HEAT_MAP_SAMPLES, len(samples)))
        own = server.represent(samples.subset(index))
        for name, (values, senders) in present.items():
            with torch.no_grad():
                rows = F.normalize(own[name], dim=1)
                _, weights = student.attention(name, rows, values[:, index.to(values.device)])
            server.diagnostics.arrays[f"weights.{name}"] = (weights, senders)

    # ---- client half

    @client_step(knowledge=Representations, num_examples=int)
    def fit(self, client: Client, order: str, channels: str) -> Reply:
        """Train on the client's own task; returns its representations of the exchanged samples."""
        client.fit(client.train, epochs=self.local_epochs)
        own = self.public.client_outputs(client, order, read_json(channels))
        return Reply(knowledge=own, num_examples=client.num_examples)


class Student:
    """The server's model while it learns from teachers, with the modules that its losses need.

    Attributes:
        attention: Attention over teachers.
        predictors: Predictors of BYOL, by modality.
        views: Pairs of views of the modalities whose training view is random, and the slow encoders.
        trainer: One optimiser over model, attention and predictors.
    """

    def __init__(
        self, method: FedMKD, passes: StudentPasses, server: Server, samples: Samples, widths: Mapping[str, int]
    ) -> None:
        self._method, self._weight, self._server = method, passes.weight, server
        byol = method.byol or Byol()
        model, device = server.model, server.device
        names = random_views(samples) if method.byol is not None else []
        with isolated(server.clock.seed, "student"):  # from the second round on the kept ones replace them
            self.attention = TeacherAttention(widths).to(device)
            self.predictors = nn.ModuleDict({name: Predictor(model.dim, byol.predictor_width) for name in names})
            self.predictors.to(device)
        self.views = SecondViews(samples, names, model, byol.momentum, server.generator("second-views"))
        for name in self.learnt_modules().keys() & server.state.keys():
            self.learnt_modules()[name].load_state_dict(server.state[name])
        trained = nn.ModuleDict({"model": model, "attention": self.attention, "predictors": self.predictors})
        self.trainer = server.trainer(_OPTIMIZER, passes.training, module=trained)
        empty = {f"values.{name}": torch.zeros(0, width) for name, width in widths.items()}
        empty |= {f"items.{name}": torch.zeros(0, dtype=torch.int64) for name in widths}
        self.queue = {name: value.to(device) for name, value in (server.state.get(_QUEUE) or empty).items()}
        self._losses: dict[str, list[Tensor]] = {"byol": [], "contrast": []}

    def learn(self, batch: Batch, teachers: Mapping[str, Teachers]) -> None:
        model, method, losses = CachedModel(self._server.model), self._method, dict[str, Tensor]()
        weighted = []
        # outputs first: BYOL takes the same embeddings of the first view
        outputs = method.public.batch_outputs(self._server, model, batch, list(teachers))
        if method.contrast is not None:
            contrasts = [
                self.contrast(name, outputs[name], teachers[name].values[:, batch.index], batch, method.contrast)
                for name in teachers
            ]
            losses["contrast"] = torch.stack(contrasts).sum()
            weighted.append(method.contrast.weight * losses["contrast"])
        if method.byol is not None and self.views.names:
            with self._server.autocast():
                losses["byol"] = self.views.loss(model, self.predictors, batch)
            weighted.append(method.byol.weight * losses["byol"])
        if weighted:
            self.trainer.step(self._weight * torch.stack(weighted).sum())
            self.views.target.follow()
        for name, value in losses.items():
            self._losses[name].append(value.detach())

    def contrast(self, output: str, own: Tensor, teachers: Tensor, batch: Batch, settings: TargetContrast) -> Tensor:
        """InfoNCE of the student's outputs with the teachers' target, which then joins the queue."""
        own = F.normalize(own.float(), dim=1)
        # gradient reaches the attention through the target, not through the queue
        targets = F.normalize(self.attention(output, own, teachers)[0], dim=1)
        values, items = self.queue[f"values.{output}"], self.queue[f"items.{output}"]
        loss = queue_contrast(own, targets, values, batch.items, items, settings.temperature or 0.1)
        kept = slice(settings.queue)  # newest first, so that the oldest fall out
        self.queue[f"values.{output}"] = torch.cat([targets.detach(), values])[kept]
        self.queue[f"items.{output}"] = torch.cat([batch.items, items])[kept]
        return loss

    def keep(self) -> None:
        server = self._server
        server.state |= {name: dict(module.state_dict()) for name, module in self.learnt_modules().items()}
        server.state[_QUEUE] = self.queue

    def means(self) -> dict[str, float]:
        return {name: float(torch.stack(values).mean()) for name, values in self._losses.items() if values}

    def learnt_modules(self) -> dict[str, nn.Module]:
        modules = {"attention": self.attention, "predictors": self.predictors, "target": self.views.target}
        return {name: module for name, module in modules.items() if module.state_dict()}


class TeacherAttention(nn.Module):
    """One target per sample from the rows of several teachers: sum_c softmax_c(q . k_c / sqrt(scores)) t_c.

    An adapter per output, an MLP to 10 scores, makes the query q of the student's row and the key k_c of teacher c's.
    The paper names the MLP and a softmax over teachers; that query and keys share it, and the scale, are inferred.

    Args:
        widths: Maps outputs to their width d.
        scores: Outputs of an adapter.
    """

    def __init__(self, widths: Mapping[str, int], scores: int = 10) -> None:
        super().__init__()
        self.positions = {output: position for position, output in enumerate(widths)}
        self._scale = 1 / math.sqrt(scores)
        self.adapters = nn.ModuleList(
            nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, scores)) for width in widths.values()
        )

    def forward(
        self, output: str, student: Float[Tensor, "b d"], teachers: Float[Tensor, "t b d"]
    ) -> tuple[Float[Tensor, "b d"], Float[Tensor, "t b"]]:
        """The targets, and the weight of each teacher; both carry gradient to the adapter.

        The student's rows are constants: it must not learn to choose easy teachers.
        """
        adapter = self.adapters[self.positions[output]]
        weights = (self._scale * (adapter(student.detach()) * adapter(teachers)).sum(-1)).softmax(0)
        return torch.einsum("tb,tbw->bw", weights, teachers), weights
