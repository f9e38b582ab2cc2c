"""CreamFL among averaged models, as FedCola's authors adapt it."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain, count
from typing import ClassVar, Self

from pydantic import Field, model_validator
from torch import Tensor

from polyfed.aggregation.weighting import GCA
from polyfed.algorithms.algorithm import Client, Cohort, Reply, Representations, Server, Weights, client_step, each
from polyfed.algorithms.creamfl import Contrast, InterModal, IntraModal
from polyfed.algorithms.fedavg import FedAvg
from polyfed.algorithms.shared.distiller import Distiller, compares_rows, require_learning
from polyfed.algorithms.shared.public_exchange import PublicExchange
from polyfed.algorithms.shared.public_training import Stored
from polyfed.algorithms.shared.teacher import Teacher
from polyfed.core.errors import ConfigError
from polyfed.core.settings import Settings
from polyfed.federation.plan import FederationPlan
from polyfed.federation.settings import TrainingSettings
from polyfed.federation.trainer import Regulariser
from polyfed.optim.settings import OptimizerSettings

_PUBLIC, _NONE = PublicExchange(), Representations({})


class StepContrast(Settings):
    """CreamFL's contrasts (Eq. 1-3) at every step of clients of one modality."""

    weight: float = Field(default=1e-7, gt=0, description="gamma (Eq. 3); FedCola's script 1")
    batch_size: int = Field(default=128, ge=2, description="public samples per step of local training")


class CreamFLAveraged(FedAvg):
    """CreamFL (Yu et al., ICLR 2023) in a federation that averages weights (Sun et al., ECCV 2024, baselines).

    Every type of clients has an averaged global model; the server's model is that of the clients with several
    modalities, and the server has no training of its own. Clients of one modality also receive the server's
    representations of the public set (FedCola's tables: 500 pairs), train with the contrasts towards them (CreamFL,
    Eq. 1-3) and return their own; clients of several modalities train plainly. The server averages the weights, weighs
    the representations by their contrast (Eq. 4-6), distils them into the averaged model (Eq. 7; squared error, AdamW
    and batch size of FedCola's script), which becomes the global model of its type.

    FedCola's paper gives the contrasts the weight 1e-7 and the distillation 1, the default; its script passes 1 and
    1e-7. Adam hardly feels the scale of a loss, so the latter does not weaken distillation in proportion: it acts where
    gradients approach the optimiser's ``eps``.

    As clients keep nothing, the previous representations of Eq. 2 are those of the model that a client receives.
    """

    needs_public: ClassVar[bool] = True
    needs_server: ClassVar[bool] = True

    contrast: StepContrast | None = Field(default=StepContrast(), description="contrasts; null: clients train plainly")
    teacher: Teacher = Teacher(weights=GCA())
    distiller: Distiller | None = Field(
        default=Distiller(
            loss="mse",
            training=TrainingSettings(optimizer=OptimizerSettings(kind="adamw", lr=1e-4, clip=2.0), batch_size=128),
        ),
        description="distance to the targets (Eq. 7), its weight (FedCola's script 1e-7) and optimiser, whose state "
        "lasts; null: the server averages alone",
    )

    @model_validator(mode="after")
    def _learns(self) -> Self:
        require_learning(None, self.distiller, self.teacher)
        return self

    @property
    def server_passes(self) -> int:
        """Passes of the distillation: the averaged model has no training of its own."""
        return 0 if self.distiller is None else self.distiller.epochs

    def require(self, plan: FederationPlan) -> None:
        super().require(plan)
        if len(plan.server_modalities) < 2:
            raise ConfigError(
                f"contrasts between modalities need two, but server.model encodes {plan.server_modalities}; give it "
                "the model and task of clients with several modalities"
            )

    # ---- server half

    def round(self, server: Server, cohort: Cohort) -> None:
        """CreamFL, Algorithm 1 (numbers are its lines), with averaged weights in place of the server's training."""
        exchange = self.teacher.exchange(_PUBLIC, server, keep_rows=compares_rows(self.distiller))  # 3
        pairs, rows = exchange.pairs, _PUBLIC.layout(server, exchange.outputs, "rows")["rows"]
        nothing = Representations({}, order=exchange.order)
        means = server.new_means(self.averaging, cohort)
        for reply in cohort.ask(  # 6-8
            self.fit,
            like={"representations": each(lambda client: rows.of(client) if len(client.modalities) == 1 else nothing)},
            weights=each(server.weights_for),
            representations=each(lambda client: pairs if len(client.modalities) == 1 else nothing),
        ):
            means[reply.type].add(reply.weights, reply.num_examples)
            exchange.add(reply, reply.representations)  # 9 and 12: Eq. 4-6
        server.update_weights(server.averaged(self.averaging, means))  # in place of 11
        targets = exchange.targets()
        if self.distiller is not None:  # 13: Eq. 7
            self.distiller.distil(server, _PUBLIC, targets, diagnostic_samples=self.teacher.diagnostic_samples)
        # the server's model goes on training in place next round, the broadcast must not follow it
        distilled = {name: value.clone() for name, value in server.model.exchanged().items()}
        server.update_weights({server.own_type: server.weights[server.own_type] | distilled})

    # ---- client half

    @client_step(weights=Weights, representations=Representations, num_examples=int, name="contrasted_fit")
    def fit(self, client: Client, weights: Weights, representations: Representations = _NONE) -> Reply:
        """Lines 15 to 20, from the received model, with contrasts where representations are received."""
        client.load_weights(weights)
        received = _PUBLIC.from_wire(client, representations)
        contrast = self.contrasting(client, received, self.contrast) if received and self.contrast is not None else None
        client.fit(client.train, epochs=self.local_epochs, steps=self.local_steps, regulariser=contrast)  # 16-18
        return Reply(
            weights=client.weights,
            representations=_PUBLIC.client_outputs(client, representations.order, representations),  # 19
            num_examples=client.num_examples,
        )

    def contrasting(self, client: Client, server_outputs: Mapping[str, Tensor], settings: StepContrast) -> Regulariser:
        """gamma (l_inter + l_intra) of a public batch, the next at every step (CreamFL, Eq. 1-3)."""
        # CreamFL's, at the temperature of FedCola's script
        contrast = Contrast(weight=settings.weight, inter=InterModal(tau=0.5), intra=IntraModal(tau=0.5))
        previous = Stored(client.represent(client.public_set, list(server_outputs)))
        targets = contrast.targets(client, _PUBLIC, server_outputs)
        # passes without end, as private steps may outnumber public batches; each pass draws anew
        passes = (client.public_batches(f"contrast-{number}", settings.batch_size) for number in count())
        batches = chain.from_iterable(passes)
        return lambda model, batch: settings.weight * contrast.loss(client, next(batches), targets, previous)
