"""CreamFL among averaged models, as FedCola's authors adapt it."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain, count
from typing import Annotated, ClassVar, Literal

from pydantic import Field, SerializeAsAny
from torch import Tensor

from polyfed.aggregation.alignment import RIDGE_PENALTY, Alignment
from polyfed.aggregation.averaging import ByType
from polyfed.aggregation.weighting import Weighting
from polyfed.aggregation.weightings.gca import GCA
from polyfed.algorithms.algorithm import (
    Algorithm,
    Client,
    ClientInfo,
    Cohort,
    Reply,
    Representations,
    Server,
    Weights,
    client_step,
    each,
)
from polyfed.algorithms.creamfl import CreamFL
from polyfed.algorithms.fedavg import FedAvg
from polyfed.algorithms.shared.ensemble_distillation import MOVES
from polyfed.algorithms.shared.global_models import (
    LocalEpochs,
    LocalSteps,
    ReplyCheck,
    WeightAveraging,
    average,
    noted,
    start_averaging,
    weights_check,
)
from polyfed.algorithms.shared.public_exchange import DISTILS
from polyfed.core.effects import Not, Only
from polyfed.core.errors import ConfigError
from polyfed.data.samples import Batch
from polyfed.federation.public_outputs import PublicOutputs, Stored, of_part
from polyfed.federation.settings import TrainingSettings
from polyfed.federation.trainer import Regulariser
from polyfed.losses.distillation import Distillation
from polyfed.models.model import Embedder
from polyfed.optim.settings import OptimizerSettings

_CONTRASTS = Only(gamma=Not(0))


class CreamFLAveraged(Algorithm):
    """CreamFL (Yu et al., ICLR 2023) in a federation that averages weights (Sun et al., ECCV 2024, baselines).

    Every type of clients has an averaged global model; the server's model is that of the clients with several
    modalities, and the server has no training of its own. Clients of one modality also get the server's
    representations of the public set (FedCola's tables: 500 pairs), train with the contrasts towards them (CreamFL,
    Eq. 1-3) and send their own back; clients of several modalities train plainly. The server averages the weights,
    weighs the representations by their contrast (Eq. 4-6), distils them into the averaged model (Eq. 7, squared
    error), and this becomes the global model of its type.

    FedCola's paper gives the contrasts the weight 1e-7 and the distillation 1, the default; its script passes
    ``gamma: 1, kd_weight: 1e-7``. Adam hardly feels the scale of a loss, so the latter does not weaken distillation in
    proportion: it acts where gradients get close to the optimiser's ``eps``.

    As clients keep nothing, the previous representations of Eq. 2 are those of the model that a client receives.
    """

    needs_public: ClassVar[bool] = True
    needs_server: ClassVar[bool] = True

    has_global_models: ClassVar[bool] = True

    local_epochs: LocalEpochs = 5
    local_steps: LocalSteps = None
    averaging: WeightAveraging = ByType()
    gamma: float = Field(default=1e-7, ge=0, description="weight of the contrasts (CreamFL, Eq. 3); FedCola's script 1")
    tau_inter: Annotated[float, _CONTRASTS] = Field(
        default=0.5, gt=0, description="temperature of the inter-modal contrast (Eq. 1)"
    )
    tau_intra: Annotated[float, _CONTRASTS] = Field(
        default=0.5, gt=0, description="temperature of the intra-modal contrast (Eq. 2)"
    )
    aggregation: Annotated[SerializeAsAny[Weighting], DISTILS] = Field(
        default=GCA(), description="weights over clients (Eq. 4-5)"
    )
    public_batch_size: Annotated[int, _CONTRASTS] = Field(
        default=128, ge=2, description="public samples a step of local training"
    )
    alignment: Annotated[Alignment, DISTILS & MOVES] = Field(
        default="none", description="map of each client's representations to the server's, before they are averaged"
    )
    alignment_penalty: Annotated[float, Only(alignment="ridge")] = Field(
        default=RIDGE_PENALTY, ge=1e-6, description="ridge: penalty of the map"
    )
    kd_loss: Annotated[Literal[Distillation, "similarity"], DISTILS] = Field(
        default="mse", description="distance to the targets (Eq. 7); or similarity: which samples are alike"
    )
    kd_temperature: Annotated[float, DISTILS & Only(kd_loss="similarity")] = Field(
        default=0.05, gt=0, description="temperature of the similarities"
    )
    kd_weight: Annotated[float, Only(kd_epochs=Not(0))] = Field(
        default=1.0, ge=0, description="factor of the distillation; FedCola's script 1e-7"
    )
    kd_epochs: int = Field(default=1, ge=0, description="passes over the public set that distil a round")
    distillation: Annotated[TrainingSettings, Only(kd_epochs=Not(0))] = Field(
        default=TrainingSettings(optimizer=OptimizerSettings(kind="adamw", lr=1e-4, clip=2.0), batch_size=128),
        description="optimiser of the distillation; its state lasts",
    )

    @property
    def server_passes(self) -> int:
        """``kd_epochs``: the averaged model has no training of its own."""
        return self.kd_epochs

    @property
    def creamfl(self) -> CreamFL:
        names = CreamFL.model_fields.keys() & type(self).model_fields.keys() - FedAvg.model_fields.keys()
        # checked here already, where other settings decide which have an effect
        return CreamFL.model_construct(**{name: getattr(self, name) for name in names})

    # ---- server half

    def setup(self, server: Server) -> None:
        """Common initial weights.

        Raises:
            ConfigError: the server's model has one modality, so there is nothing to contrast with.
        """
        if len(modalities := server.model.modalities) < 2:
            raise ConfigError(
                f"contrasts between modalities need two, but server.model encodes {list(modalities)}; give it the "
                "model and task of clients with several modalities"
            )
        start_averaging(server, self.averaging)

    def round(self, server: Server, cohort: Cohort) -> None:
        """Broadcast, train, average, and distil what the clients of one modality see in the public set."""
        server_outputs = self.creamfl.server_outputs(server)
        ensembles = self.creamfl.ensembles(server, server_outputs)
        nothing = Representations({}, order=server_outputs.order)
        sent = self.creamfl.to_wire(server, of_part(server_outputs), server_outputs.order)
        replies = cohort.ask(
            self.contrasted_fit,
            check=self.reply_check(server, server_outputs),
            weights=each(server.weights_for),
            representations=each(lambda client: sent if _is_single(client) else nothing),
        )
        folded = noted(replies, lambda reply: ensembles.add(reply, reply.representations))
        average(server, cohort, folded, self.averaging)
        self.creamfl.distil(server, ensembles.targets())
        # the server's model goes on training in place next round, the broadcast must not follow it
        distilled = {name: value.clone() for name, value in server.model.exchanged().items()}
        server.update_weights({server.own_type: server.weights[server.own_type] | distilled})

    def reply_check(self, server: Server, server_outputs: PublicOutputs) -> ReplyCheck:
        check_weights, shapes = weights_check(server), self.creamfl.shapes(server, server_outputs)

        def check(reply: Reply) -> None:
            check_weights(reply)
            sender = reply.sender
            own = self.creamfl.output_kind.channels(sender, list(shapes)) if _is_single(sender) else ()
            reply.representations.require(server_outputs.order, {name: shapes[name] for name in own})

        return check

    # ---- client half

    @client_step(weights=Weights, representations=Representations, num_examples=int)
    def contrasted_fit(self, client: Client, weights: Weights, representations: Representations) -> Reply:
        """Train the received model, with the contrasts if there are representations, and send these in return."""
        client.load_weights(weights)
        server_outputs = self.creamfl.from_wire(client, representations)
        contrast = self.contrast(client, server_outputs) if server_outputs and self.gamma else None
        client.fit(client.train, epochs=self.local_epochs, steps=self.local_steps, regulariser=contrast)
        return Reply(
            weights=Weights(client.model.exchanged()),
            representations=self.creamfl.client_outputs(client, representations.order, representations),
            num_examples=client.num_examples,
        )

    def contrast(self, client: Client, server_outputs: Mapping[str, Tensor]) -> Regulariser:
        """gamma (l_inter + l_intra) of a public batch, the next at every step (CreamFL, Eq. 1-3)."""
        creamfl, previous = self.creamfl, Stored(client.represent(client.public_set, list(server_outputs)))
        goals = creamfl.goals(client, client.public_set, server_outputs)
        # passes without end, as private steps may outnumber public batches; each pass draws anew
        passes = (client.public_batches(f"contrast-{number}", self.public_batch_size) for number in count())
        batches = chain.from_iterable(passes)

        def regularise(model: Embedder, batch: Batch) -> Tensor:
            public = next(batches)
            return self.gamma * creamfl.contrasts(client, public, goals, previous)

        return regularise


def _is_single(client: ClientInfo) -> bool:
    return len(client.modalities) == 1
