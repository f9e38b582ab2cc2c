"""Clients that agree with each other: every round they learn the mean of what they said before."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from pydantic import Field
from torch import Tensor

from polyfed.aggregation.ensemble import Ensemble
from polyfed.algorithms.algorithm import (
    Algorithm,
    Client,
    Cohort,
    Lifetime,
    LocalTraining,
    Reply,
    Server,
    client_step,
)
from polyfed.losses.distillation import l2
from polyfed.wire.payload import Representations


class Consensus(Algorithm):
    """FedMD (Li and Wang, 2019), on representations of the public set instead of class scores.

    A round: clients *digest* the consensus of the round before, *revisit* their private data, and send their
    representations; the mean of these is the new consensus, which the server digests as well.
    """

    keeps: ClassVar[Mapping[str, Lifetime]] = {"model": Lifetime.RUN, "optimizer": Lifetime.RUN}
    needs_public: ClassVar[bool] = True

    local_epochs: int = Field(default=1, ge=1, description="passes over private data a round")
    digest_epochs: int = Field(default=1, ge=0, description="passes over the public set a round")

    @property
    def local_training(self) -> LocalTraining:
        """Schedules by epoch and the twin of clients alone go by it."""
        return LocalTraining(self.local_epochs)

    @property
    def server_passes(self) -> int:
        """The twin of a server alone goes by it."""
        return self.digest_epochs

    def round(self, server: Server, cohort: Cohort) -> None:
        """Ask everybody, average by modality, digest."""

        def check(reply: Reply) -> None:
            sent = reply.representations
            sent.require(server.public_order, dict.fromkeys(sent, (len(server.public_set), server.model.dim)))

        means: dict[str, Ensemble] = {}
        consensus = Representations(server.state.get("consensus", {}), order=server.public_order)
        for reply in cohort.ask(self.fit, check=check, consensus=consensus):
            for modality, values in reply.representations.items():
                mean = means.setdefault(modality, Ensemble(*values.shape))
                mean.add(values.cpu(), 0.0)  # log of the weight 1
        agreed = {modality: mean.result().values for modality, mean in means.items()}
        server.state["consensus"] = {**consensus, **agreed}
        self.digest(server, server.state["consensus"])

    @client_step(representations=Representations)
    def fit(self, client: Client, consensus: Representations) -> Reply:
        """Digest, revisit, and say what the public set looks like now."""
        self.digest(client, consensus)
        client.fit(client.train, epochs=self.local_epochs)
        own = client.represent(client.public_set)
        return Reply(representations=Representations(own, order=consensus.order))

    def digest(self, participant: Client | Server, consensus: Mapping[str, Tensor]) -> None:
        """Move a participant's representations of the public set towards the consensus."""
        modalities = [name for name in participant.public_set.modalities if name in consensus]
        targets = {name: consensus[name].to(participant.device) for name in modalities}

        def distance(model, batch):
            own = {name: model.represent(name, batch.inputs[name]) for name in targets}
            return sum(l2(own[name], target[batch.index]) for name, target in targets.items())

        if targets:
            public, epochs = participant.public_set, self.digest_epochs
            participant.fit(public, epochs=epochs, purpose="digest", task_weight=0, regulariser=distance)
